"""The workers of `bench gpu-pipeline`: one share of a GPU each. They hold a trainer for every variant, and run what they are asked.

What is timed is forward and backward of one batch with all weight gradients, as the engine of a training step runs them: messages between
stages and sums over replicas are included, clipping and the optimizer are not (unless whole steps are asked for). The model is a stack on
numbers, as wide as its layers, and its loss is the sum of its outputs, so that next to nothing but the stack is timed.

Shapes: T time, B lane, F features, K steps ahead, C columns.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.benchmarks.harness.gpu_timing import one_line
from carrywave.benchmarks.harness.shapes import StackShape
from carrywave.benchmarks.harness.standing_pool import requests
from carrywave.benchmarks.harness.workers import TimedWorkers, environment
from carrywave.benchmarks.peers.gpu_replicas import DDP, DataParallelStack
from carrywave.benchmarks.peers.gpu_stacks import DTYPES
from carrywave.benchmarks.stages.variants import SCHEDULERS
from carrywave.data.batch import Batch
from carrywave.kernels import random
from carrywave.kernels.lstm.dispatch import BACKENDS
from carrywave.measure.timing import call_seconds, settle
from carrywave.model.encoders import Numbers
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.parallel.liveness.lost_contact import sounds_lost
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World, all_gather_text
from carrywave.plan.plan import Plan
from carrywave.plan.units import Units
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse
from carrywave.step.graphs.capture import Capture
from carrywave.step.passes.device_clock import DeviceClock
from carrywave.step.passes.micro_batches import FlatCarry
from carrywave.step.trainer import Trainer

CHECKED = 3  # optimizer steps whose losses are compared; they are the warm-up too
WARM_UP = 3  # passes before any is timed: the first runs plainly, the second is captured
LR, CLIP = 1e-3, 1.0
TRAIN = {"optimizer": "adam", "lr": LR, "clip": CLIP}


@dataclass(frozen=True)
class SummedStack(StackShape):
    """A stack whose outputs are summed, and its batch."""

    @property
    def units(self) -> Units:
        """The units as the planner sees them."""
        spec = {
            "task": "forecasting",
            "model": {"hidden": self.hidden, "layers": self.layers},
            "data": {"horizon": 1},
            "batch": {"lanes": self.lanes, "steps": self.steps},
            "train": {**TRAIN, "precision": "bf16"},
        }
        return Units.of(parse(spec), DataFacts(features=self.hidden, outputs=1, sequences=1, steps=10**6, longest=10**6))

    def model(self) -> Model:
        """The model with its initial weights, identical in every process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return Model(Numbers(self.hidden), LSTM(self.hidden, self.hidden, self.layers), Total())

    def batch(self) -> Batch:
        """The only batch. Its targets are not read: the loss falls from the first step on whatever they are."""
        random_numbers = torch.Generator().manual_seed(2)
        x_TBF = torch.randn(self.steps, self.lanes, self.hidden, generator=random_numbers)
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

    family: str  # a schedule: sequential, gpipe or wavefront; replicas of single shares run a wavefront of one stage. Or DDP, the peer
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

    def plan(self, case: SummedStack) -> Plan:
        """The plan, with layers divided evenly."""
        chunk_steps = -(-case.steps // self.chunks) if self.chunks > 1 else None
        return Plan(self.replicas, self.stages, chunk_steps=chunk_steps, micro_batches=self.micro_batches)


class Loop:
    """A trainer with one way to split its steps."""

    def __init__(self, world: World, case: SummedStack, split: Split, precision: str, *, clock: bool = False) -> None:
        plan = split.plan(case)
        with _capturing(split.recorded):
            self.trainer = Trainer(case.model(), {**TRAIN, "precision": precision}, plan=plan, mesh=Mesh(world, plan), keep_state=False)
        self.recorded, self.batch = split.recorded, case.batch()
        self.trainer.compute.scheduler = SCHEDULERS[split.family]
        self.clock = DeviceClock(world.device) if clock else None
        self.trainer.compute.clock = self.clock
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
        one_piece = trainer.mesh.on_device and engine.gradients.on_device
        if trainer.capture is not None and one_piece:
            trainer.capture("forward_backward", self._forward_backward, [self.part], [self.key], None)
        else:
            self._forward_backward([self.part], [self.key], None, trainer.capture)

    def _forward_backward(
        self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry, graphs: Capture | None = None
    ) -> tuple[None, FlatCarry]:
        engine = self.trainer.engine
        engine.gradients.begin_step()
        _, left = engine.run_passes(batches, keys, carry, graphs)
        engine.gradients.sum_over_workers(meanwhile=lambda: None)
        return None, left

    @property
    def replays(self) -> int:
        """How many passes or steps were replayed from CUDA graphs."""
        return 0 if self.trainer.capture is None else sum(self.trainer.capture.replays.values())


def work(world: World, job: dict[str, Any]) -> Iterator[Row]:
    """Entry point of every worker: do what is asked until the pool ends."""
    bench = _Worker(world, job["precision"], whole_step=job["whole_step"])
    for request, answer in requests(job, world.rank):
        answer(bench.handle(request))
    yield from ()


def loop_of(world: World, case: SummedStack, split: Split, precision: str) -> Loop | DataParallelStack:
    """The loop of a way to split a case."""
    if split.family != DDP:
        return Loop(world, case, split, precision)
    weights = {name: tensor.detach() for name, tensor in case.model().lstm.state_dict().items()}
    part = case.batch().inputs.chunk(world.size, dim=1)[world.rank].to(world.device, DTYPES[precision])
    targets = case.steps * case.lanes
    return DataParallelStack(weights, part, layers=case.layers, targets=targets, lr=LR, clip=CLIP)


class _Worker:
    """One worker of a pool, with the loops that it has prepared."""

    def __init__(self, world: World, precision: str, *, whole_step: bool) -> None:
        self.world, self.precision, self.whole_step = world, precision, whole_step
        self.crew = TimedWorkers(world)
        self.loops: dict[tuple[SummedStack, Split], Loop | DataParallelStack] = {}

    def handle(self, request: Row) -> Row:
        """Do one request; a failure on any worker is a note on all."""
        what, case = request["what"], SummedStack(**request["case"])
        if what == "forget":
            return self._forget()
        if what == "describe":
            return self._tried(lambda: self._describe(case))
        split = Split(**request["split"])
        if what == "prepare":
            return self._tried(lambda: self._prepare(case, split))
        if what == "trace":
            return self._tried(lambda: self._trace(case, split))
        return self._tried(lambda: {"ms": self._timed(self.loops[case, split], request["steps"])})

    def _tried(self, work: Callable[[], Row]) -> Row:
        """What `work` returns, with an empty note; if it fails on any worker, the note says why. Collective."""
        try:
            answer, note = work(), ""
        except Exception as error:
            answer, note = {}, one_line(error)
        notes = all_gather_text(self.world, note)
        failed = [rank for rank, text in enumerate(notes) if text]
        if not failed:
            return {**answer, "note": ""}
        # If several fail at once, one is the cause, and the others have only lost contact with it.
        cause = min(failed, key=lambda rank: sounds_lost(notes[rank]))
        return {"note": notes[cause] if self.world.size == 1 else f"rank {cause}: {notes[cause]}"}

    def _describe(self, case: SummedStack) -> Row:
        """This device: its multiprocessors, and the backend that runs a layer of the case on it."""
        device = self.world.device
        layer = LSTM(case.hidden, case.hidden, device=device).weights(0)
        one = torch.empty((), dtype=DTYPES[self.precision], device=device)
        kernel = BACKENDS.in_use("auto", one.expand(case.steps, case.lanes, case.hidden), layer)
        on_gpu = device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
            "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 0,
            "kernel": kernel,
        }

    def _prepare(self, case: SummedStack, split: Split) -> Row:
        """Build a loop, take the steps whose losses are compared, and time one block roughly."""
        with _capturing(split.recorded):
            loop = self.loops[case, split] = loop_of(self.world, case, split, self.precision)
            losses = [float(loop.update()) for _ in range(CHECKED)]
            for _ in range(WARM_UP):
                self._pass(loop)
        before = loop.replays
        ms = self._timed(loop, 1)
        return {"losses": losses, "ms": ms, "recorded": loop.replays > before}

    def _pass(self, loop: Loop | DataParallelStack) -> None:
        if self.whole_step:
            loop.whole_step()
        else:
            loop.forward_backward()

    def _timed(self, loop: Loop | DataParallelStack, steps: int) -> float:
        """Milliseconds per pass over a block of them, on this worker. Collective: all begin together."""
        with _capturing(loop.recorded):
            settle(self.world.device)
            self.crew.barrier()
            return 1e3 * call_seconds(lambda: self._pass(loop), steps, self.world.device)

    def _trace(self, case: SummedStack, split: Split) -> Row:
        """The tasks of one pass, timed by the device: (label, task, start and end in seconds on the device's clock)."""
        with _capturing(split.recorded):
            loop = Loop(self.world, case, split, self.precision, clock=True)
            loop.update()
            for _ in range(WARM_UP):
                self._pass(loop)
            before = loop.replays
            ms = self._timed(loop, 2)  # two, so that the stages of the second are as far apart as in any later one
        assert loop.clock is not None
        laps = [[lap.label, list(lap.task), lap.start, lap.end] for lap in loop.clock.read()]
        return {"laps": laps, "ms": ms, "recorded": loop.replays > before}

    def _forget(self) -> Row:
        """Free the loops of a case that is done."""
        self.loops.clear()
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        return {"note": ""}


def _capturing(recorded: bool) -> AbstractContextManager[None]:
    """With CUDA graphs or without."""
    return environment(CARRYWAVE_CAPTURE=None if recorded else "0")


def request_of(case: SummedStack, split: Split | None = None, **more: Any) -> Row:
    """A request as JSON can hold it."""
    return {"case": asdict(case), **({} if split is None else {"split": asdict(split)}), **more}
