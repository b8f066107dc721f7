"""Claim: stages on GPUs pay. The wavefront with its steps recorded as CUDA graphs is faster than every other way to run stages.

One GPU stands in for several: a *share* is a worker process under NVIDIA's MPS with a part of the multiprocessors, and reaches the memory
of the others as GPUs of one host do. The whole GPU as one device is in the table too, so that nobody mistakes shares for a gain.

- one share: the whole stack on one of the shares; ratios are relative to it (recorded), in the same run;
- sequential: stages one after another; gpipe: micro-batches of the lanes, all forward, then all backward;
- wavefront: chunks of time, with several numbers of them; recorded (the work of a stage is one CUDA graph) and launched by the host;
- replicas, of single shares and of pipelines of two; DDP: PyTorch's around one `nn.LSTM` in bf16, sums over NCCL.

Timed are forward and backward of the stack in bf16 with all weight gradients, messages between stages and sums over replicas; with
`--whole-step` also clipping and the optimizer. The workers of every number of shares are started once; their variants take turns, a block
of passes each; the median counts, and the slowest worker of a block. A variant whose first losses are not those of one share has a note.
`--rows "8x512 4shares wavefront"` runs the rows with all of these words, `--chunks 4,8` other numbers of chunks.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import timing
from benchmarks.harness.command import main
from benchmarks.harness.shapes import StackShape
from benchmarks.harness.workers import TimedWorkers, printed
from benchmarks.peers.gpu_stacks import DTYPES
from benchmarks.shares.mps import PERCENT, shares
from carrywave.data.batch import Batch
from carrywave.errors import RunError, UserError
from carrywave.kernels import random
from carrywave.model.encoders import Numbers
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.parallel import worker_pool
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.startup.environment import TRANSPORT
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World
from carrywave.plan.plan import Plan
from carrywave.plan.schedule import schedule as schedules
from carrywave.step.trainer import Trainer

CHUNKS, SHORTEST_CHUNK = (2, 4, 8, 16, 32), 4  # steps
MOST_LAUNCHED = 8  # chunks: the host takes as long for any chunk, so that more of them only get slower
WHOLE = 100  # percent
ROUNDS, BLOCK_SECONDS = 5, 0.1
CHECKED, WARM_UP = (
    3,
    3,
)  # steps whose losses are compared; passes before any is timed, of which the second is captured
LR, CLIP = 1e-3, 1.0
TRAIN = {"optimizer": "adam", "lr": LR, "clip": CLIP}
# Tolerance on a loss, as a fraction of its fall over the compared steps on one share, and of the loss: in bf16 other cuts round otherwise,
# and Adam's first steps are as long for a gradient that is pure rounding error as for any other.
OF_FALL, OF_LOSS = 0.1, 2e-3
DDP = "DDP"
SCHEDULERS = {
    "sequential": lambda stages, chunks, *, backward=True, weights=True: schedules.gpipe(stages, 1, backward=backward),
    "gpipe": lambda stages, chunks, *, backward=True, weights=True: schedules.gpipe(stages, len(chunks), backward=backward),
    "wavefront": schedules.wavefront,
}


@dataclass(frozen=True)
class SummedStack(StackShape):
    """A stack whose outputs are summed, and its batch."""

    def model(self) -> Model:
        """The model with its initial weights, identical in every process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return Model(Numbers(self.hidden), LSTM(self.hidden, self.hidden, self.layers), Total())

    def batch(self) -> Batch:
        """The only batch. Its targets are not read: the loss falls from the first step on whatever they are."""
        x_TBF = torch.randn(self.steps, self.lanes, self.hidden, generator=torch.Generator().manual_seed(2))
        return Batch.of(x_TBF, torch.ones(self.steps, self.lanes, 1), step=0)


class Total(nn.Module):
    """The least that can be a head: the sum of all outputs."""

    def forward(self, y_TBW: Tensor) -> Tensor:
        """The sum for each step and lane."""
        return y_TBW.sum(-1)

    def loss(self, y_TBW: Tensor, target_TB: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over everything, and the number of targets."""
        return y_TBW.sum(dtype=torch.float32), y_TBW.new_full((), target_TB.shape[0] * target_TB.shape[1], dtype=torch.float32)


@dataclass(frozen=True)
class Split:
    """One way to split a case over shares."""

    family: str  # a schedule; replicas of single shares run a wavefront of one stage. Or DDP, the peer
    stages: int = 1
    replicas: int = 1
    chunks: int = 1
    micro_batches: int = 1
    recorded: bool = True
    transport: str = "device"  # of messages and sums, as CARRYWAVE_TRANSPORT names it

    @property
    def workers(self) -> int:
        """Number of shares."""
        return self.replicas * self.stages

    @property
    def name(self) -> str:
        """What runs, as shown in the table."""
        if self.workers == 1:
            return "one device"
        parts = [f"{self.replicas} replicas"] * (self.replicas > 1) + [self.family] * (self.stages > 1 or self.family == DDP)
        parts += [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1) + [f"{self.chunks} chunks"] * (self.chunks > 1)
        return " ".join(parts)

    def plan(self, case: SummedStack) -> Plan:
        """The plan, with layers divided evenly."""
        chunk_steps = -(-case.steps // self.chunks) if self.chunks > 1 else None
        return Plan(self.replicas, self.stages, chunk_steps=chunk_steps, micro_batches=self.micro_batches)

    @property
    def bubble(self) -> float | None:
        """The idle fraction that the schedule predicts if all stages and chunks take equal time; None without stages."""
        if self.stages == 1:
            return None
        return round(schedules.bubble(SCHEDULERS[self.family](self.stages, (self.chunks,) * self.micro_batches)), 3)


@dataclass(frozen=True)
class Setting:
    """A case on shares of one size."""

    case: SummedStack
    percent: int
    stages: tuple[int, ...]
    replicas: tuple[tuple[int, int], ...] = ()  # (replicas, stages of each)

    def splits(self, chunks: Sequence[int]) -> list[Split]:
        """All ways to split the case over the shares."""
        counts = [count for count in chunks if self.case.steps >= count * SHORTEST_CHUNK]
        found = [Split("wavefront"), Split("wavefront", recorded=False)]
        for stages in self.stages:
            found.append(Split("sequential", stages))
            found += [Split("gpipe", stages, micro_batches=parts) for parts in (stages, 2 * stages) if self.case.lanes % parts == 0]
            each = [(count, recorded) for recorded in (True, False) for count in counts if recorded or count <= MOST_LAUNCHED]
            for transport in ("device", "nccl"):
                found += [Split("wavefront", stages, chunks=count, recorded=how, transport=transport) for count, how in each]
        for replicas, stages in self.replicas:
            for transport in ("device", "nccl"):
                several = counts if stages > 1 else (1,)
                found += [Split("wavefront", stages, replicas, chunks=count, transport=transport) for count in several]
            found += [Split(DDP, 1, replicas, recorded=False, transport="nccl")] if stages == 1 else []
        return found

    def words(self, split: Split) -> set[str]:
        """The words that select a row."""
        how = ("recorded" if split.recorded else "launched", split.transport, f"{split.workers}shares", f"{self.percent}%")
        return {*self.case.name.split(), *split.name.split(), *how}


SETTINGS = (
    Setting(SummedStack(8, 512, 64, 256), 25, (2, 4), ((2, 1), (2, 2))),
    Setting(SummedStack(8, 1024, 64, 128), 50, (2,)),
    # Not wider: a layer of 512 units takes more multiprocessors than an eighth of a GPU has.
    Setting(SummedStack(8, 256, 64, 256), 12, (8,)),
)
QUICK = (Setting(SummedStack(4, 64, 16, 32), 25, (2,), ((2, 1),)),)


def run(
    *, quick: bool = False, rows: Sequence[str] = (), chunks: Sequence[int] = CHUNKS, rounds: int = ROUNDS, whole_step: bool = False
) -> list[Row]:
    """One row per variant; one share is always among them."""
    timing.cuda_device()
    table: list[Row] = []
    for setting in QUICK if quick else SETTINGS:
        asked = [set(each.split()) for each in rows]
        kept = [each for each in setting.splits(chunks) if not asked or any(words <= setting.words(each) for words in asked)]
        if not kept:
            continue
        base = Split("wavefront")
        job = {"device": "cuda", "precision": "bf16", "whole_step": whole_step, "rounds": rounds}
        with shares(max(each.workers for each in kept), setting.percent) as environment:
            share = environment | {PERCENT: str(setting.percent)}
            found = rows_of(setting, [base, *(each for each in kept if each != base)], job, share)
            whole = measured(setting.case, [base], job, environment | {PERCENT: str(WHOLE)})[base]
            found.append({**row_of(setting, base, whole, found[0]["ms"]), "shares": "whole GPU", "efficiency": None})
            table += printed(found)
    if not table:
        raise UserError(f"no row matches {' or '.join(rows)}; use words such as 8x512, 4shares, wavefront, 8, chunks, recorded")
    return table


def rows_of(setting: Setting, splits: Sequence[Split], job: Row, environment: Mapping[str, str]) -> list[Row]:
    """The rows of a setting: one share, the first of the splits, and the others beside it."""
    found: dict[Split, Row] = {}
    for workers, transport in dict.fromkeys((each.workers, each.transport) for each in splits):
        same = [each for each in splits if (each.workers, each.transport) == (workers, transport)]
        asked = {TRANSPORT: transport} if transport != "device" else {}
        found |= measured(setting.case, same, job, {**environment, **asked})
    base = found[splits[0]]
    for each in splits:
        if "losses" in found[each] and "losses" in base:
            found[each]["note"] = found[each]["note"] or differs(found[each]["losses"], base["losses"])
    return [row_of(setting, each, found[each], found[splits[0]].get("ms")) for each in splits]


def measured(case: SummedStack, splits: Sequence[Split], job: Row, environment: Mapping[str, str]) -> dict[Split, Row]:
    """What workers say of these splits, which need equally many of them: of each block, that of the slowest."""
    given = {**job, "case": asdict(case), "splits": [asdict(each) for each in splits]}
    try:
        answers = worker_pool.start(__name__, given, splits[0].workers, environment=environment, name=__name__)
    except RunError as error:
        return {each: {"note": str(error)} for each in splits}
    found = {}
    for each, rows in zip(splits, zip(*answers, strict=True), strict=True):
        blocks = [max(values) for values in zip(*(row["ms"] for row in rows), strict=True)]
        found[each] = {**rows[0], "ms": statistics.median(blocks), "spread": round(timing.spread(blocks), 3), "note": ""}
        if rows[0]["recorded"] != each.recorded:
            found[each]["note"] = f"it was not {'recorded' if each.recorded else 'launched'}"
    return found


def differs(losses: Sequence[float], base: Sequence[float]) -> str:
    """A note if a variant does not compute what one share computes; empty if it does."""
    allowed = OF_FALL * abs(base[0] - base[-1]) + OF_LOSS * abs(base[0])
    far = [number for number, (a, b) in enumerate(zip(losses, base, strict=True)) if not abs(a - b) <= allowed]
    return f"its loss at step {far[0]} is {losses[far[0]]:.4g}, but {base[far[0]]:.4g} on one share" if far else ""


def row_of(setting: Setting, split: Split, found: Row, base_ms: float | None) -> Row:
    """The row of a variant."""
    ms = found.get("ms")
    ratio = None if ms is None or base_ms is None else base_ms / ms
    return {
        "case": setting.case.name,
        "shares": f"{split.workers} x {setting.percent}%",
        "multiprocessors": found.get("multiprocessors"),
        "variant": split.name,
        "transport": "" if split.workers == 1 else split.transport,
        "how": "recorded" if split.recorded else "launched",
        "ms": None if ms is None else round(ms, 2),
        "spread": found.get("spread"),
        "ratio": None if ratio is None else round(ratio, 2),
        "efficiency": None if ratio is None else round(ratio / split.workers, 2),
        "bubble": split.bubble,
        "kernel": found.get("kernel"),
        "note": found["note"],
    }


# In a worker


class Loop:
    """A trainer with one way to split its steps."""

    def __init__(self, world: World, case: SummedStack, split: Split, precision: str) -> None:
        plan = split.plan(case)
        capture = os.environ.pop("CARRYWAVE_CAPTURE", None)
        os.environ |= {} if split.recorded else {"CARRYWAVE_CAPTURE": "0"}
        self.trainer = Trainer(case.model(), {**TRAIN, "precision": precision}, plan=plan, mesh=Mesh(world, plan), keep_state=False)
        os.environ.pop("CARRYWAVE_CAPTURE", None)
        os.environ |= {} if capture is None else {"CARRYWAVE_CAPTURE": capture}
        self.batch = case.batch()
        self.trainer.compute.scheduler = SCHEDULERS[split.family]
        part = self.trainer.local_part(self.batch)
        # As the loader hands it out: on the device, and marked as a part, so that ranks do not compare their batches at every step.
        self.part = replace(part, part_of=part.part_of or (self.batch.real, self.batch.lanes.shape[0]))
        self.key = random.key(self.trainer.spec.seed, self.batch.epoch, self.batch.step)

    def update(self) -> Tensor:
        """One optimizer step; returns its mean loss."""
        return self.trainer.step(self.batch)

    def whole_step(self) -> None:
        """One optimizer step of what the loader hands out."""
        self.trainer.update(self.part)

    def forward_backward(self) -> None:
        """Everything of a step up to its summed gradients; in one graph, if the step as a whole would be."""
        trainer, engine = self.trainer, self.trainer.engine
        if trainer.capture is not None and trainer.mesh.on_device and engine.gradients.on_device:
            trainer.capture("forward_backward", self._forward_backward, [self.part], [self.key], None)
        else:
            self._forward_backward([self.part], [self.key], None, trainer.capture)

    def _forward_backward(self, batches: Any, keys: Any, carry: Any, graphs: Any = None) -> tuple[None, Any]:
        engine = self.trainer.engine
        engine.gradients.begin()
        run = engine.run_pass
        (_, reached), left = run(batches, keys, carry) if graphs is None else graphs("batch", run, batches, keys, carry)
        engine.gradients.end_passes([reached])
        engine.gradients.sum()
        return None, left

    @property
    def replays(self) -> int:
        """How many passes or steps were replayed from CUDA graphs."""
        return 0 if self.trainer.capture is None else sum(self.trainer.capture.replays.values())


class DataParallelStack:
    """The peer: DistributedDataParallel around one `nn.LSTM`, weights and inputs in the precision that is compared."""

    replays = 0

    def __init__(self, world: World, case: SummedStack, precision: str) -> None:
        stack = nn.LSTM(case.hidden, case.hidden, case.layers)
        stack.load_state_dict({name: tensor.detach() for name, tensor in case.model().lstm.state_dict().items()})
        on_gpu = [world.device] if world.device.type == "cuda" else None
        dtype, self.workers, self.targets = DTYPES[precision], world.size, case.steps * case.lanes
        self.stack = DistributedDataParallel(stack.to(world.device, dtype), device_ids=on_gpu, gradient_as_bucket_view=True)
        self.x_TBF = case.batch().inputs.chunk(world.size, dim=1)[world.rank].to(world.device, dtype)
        self.optimizer = torch.optim.Adam(self.stack.parameters(), lr=LR, fused=True)

    def update(self) -> Tensor:
        """One optimizer step; returns the mean loss over all replicas."""
        loss = self.whole_step()
        torch.distributed.all_reduce(loss)
        return loss / self.workers

    def whole_step(self) -> Tensor:
        """One optimizer step; returns this replica's part of the loss."""
        loss = self.forward_backward()
        nn.utils.clip_grad_norm_(self.stack.parameters(), CLIP)
        self.optimizer.step()
        return loss

    def forward_backward(self) -> Tensor:
        """Gradients of the mean loss: DDP divides their sum by the number of replicas."""
        self.optimizer.zero_grad(set_to_none=False)
        loss: Tensor = self.stack(self.x_TBF)[0].sum(dtype=torch.float32) * self.workers / self.targets
        loss.backward()
        return loss.detach()


def work(world: World, job: dict[str, Any]) -> Iterator[Row]:
    """Entry point of every worker: take the steps whose losses are compared, then time all loops in turns."""
    crew, case = TimedWorkers(world), SummedStack(**job["case"])
    passes, rows = {}, {}
    for number, each in enumerate(job["splits"]):
        split = Split(**each)
        loop = DataParallelStack(world, case, job["precision"]) if split.family == DDP else Loop(world, case, split, job["precision"])
        losses = [float(loop.update()) for _ in range(CHECKED)]
        call = loop.whole_step if job["whole_step"] else loop.forward_backward
        for _ in range(WARM_UP):
            call()
        before = loop.replays
        once = crew.most(_seconds(crew, call, 1))
        repeats = max(2, round(BLOCK_SECONDS / once))
        passes[str(number)] = lambda call=call, repeats=repeats: 1e3 * _seconds(crew, call, repeats) / repeats
        rows[str(number)] = {"losses": losses, "recorded": loop.replays > before, **_device(world, case, job["precision"])}
    for number, blocks in timing.take_turns(passes, job["rounds"]).items():
        yield {**rows[number], "ms": blocks}
    passes.clear()
    gc.collect()


def _seconds(crew: TimedWorkers, call: timing.Call, repeats: int) -> float:
    """Seconds of a block of calls on this worker; all begin together."""
    timing.settle(crew.world.device)
    crew.barrier()
    return timing.call_seconds(call, repeats, crew.world.device) * repeats


def _device(world: World, case: SummedStack, precision: str) -> Row:
    """The multiprocessors of this share, and the backend that runs a layer on it."""
    layer = LSTM(case.hidden, case.hidden, device=world.device).weights(0)
    one = torch.empty((), dtype=DTYPES[precision], device=world.device)
    on_gpu = world.device.type == "cuda"
    return {
        "multiprocessors": torch.cuda.get_device_properties(world.device).multi_processor_count if on_gpu else 0,
        "kernel": LSTM.backends.in_use("auto", one.expand(case.steps, case.lanes, case.hidden), layer),
    }


if __name__ == "__main__":
    main("benchmarks.gpu_pipeline")
