"""Claim: the wavefront (time chunks moving through layers on several workers) beats every other way to split one step among them.

All variants run in the same worker processes, one thread each, with the same model, batches, optimizer, clipping and cuts, and take turns:

- serial: one worker with one thread, ours and plain PyTorch; speed-up and efficiency are relative to the faster one;
- DDP: data parallel with the same global batch, an equal share of the lanes on every worker;
- torch.distributed.pipelining's GPipe and 1F1B, each with the best number of micro-batches;
- DDP and torch's pipelines run twice: with the fastest LSTM, which may be ours, and with nn.LSTM, which most programs use;
- replicas: ours, with the same global batch as DDP; replicas x wavefront: both;
- wavefront: with several numbers of chunks, with the head's work shared by all workers, and with micro-batches as well (1F1B).

A loop is timed only if its losses over the first steps match the serial ones. `--workers 2,4` says how many, instead of up to one for two
cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.harness.command import main
from benchmarks.harness.shapes import BATCHES, LanguageShape
from benchmarks.harness.timing import spread
from benchmarks.harness.workers import Loop, TimedWorkers, crew_sizes, printed, start, time_loops, timed_block
from benchmarks.peers import pipeline_loops as peers
from benchmarks.peers.pipeline_loops import Step, balanced_cuts
from carrywave.data.batch import Batch
from carrywave.errors import RunError
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World
from carrywave.plan.plan import Plan
from carrywave.plan.schedule import schedule as schedules
from carrywave.step.trainer import Trainer

SMALL = LanguageShape(2, 64, 16, 32, 100)  # what a step costs besides its arithmetic: replicas beside DDP
CASES = (SMALL, LanguageShape(4, 512, 16, 128, 2000), LanguageShape(4, 1024, 16, 64, 2000), LanguageShape(8, 256, 32, 256, 2000))
WIDE = LanguageShape(8, 512, 16, 64, 2000)  # only with 8 workers or more
QUICK = LanguageShape(4, 32, 8, 16, 50)
CHUNKS, MICRO_BATCHES, SHORTEST_CHUNK = (4, 8, 16, 32), (2, 4, 8), 4
PIPELINES = ("torch GPipe", "torch 1F1B")
TORCH = " nn.LSTM"  # suffix of peers that are held to torch's own LSTM
# The first steps all use one batch: its loss falls fast, which shows the effect of each update.
CHECKED = (0, BATCHES, 2 * BATCHES)
# Tolerance on the loss: a fraction of the serial loss's decrease over these steps, plus a fraction of the loss itself. Float32 sums differ
# by about 1e-7 of the loss, which the second term covers. Adam amplifies that, because its first steps are as long for a gradient that is
# pure rounding error as for any other, but only by a small part of the decrease. A wrong gradient changes the decrease by tens of percent.
OF_FALL, OF_LOSS = 0.02, 1e-6


@dataclass(frozen=True)
class Variant:
    """One way to split a step: the method, and the number of parts."""

    family: str
    micro_batches: int = 1  # parts of the lanes
    chunks: int = 1  # parts of the window
    share_head: bool = False
    replicas: int = 1  # of a pipeline, or of single workers

    @property
    def name(self) -> str:
        """The name shown in the table."""
        parts = [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1) + [f"{self.chunks} chunks"] * (self.chunks > 1)
        ending = ", head shared" if self.share_head else ""
        family = f"{self.replicas} {self.family}" if self.replicas > 1 else self.family
        return family + (f" {' x '.join(parts)}" if parts else "") + ending

    @property
    def ours(self) -> bool:
        """True if it is one of our plans."""
        return self.family in ("serial", "wavefront", "replicas", "replicas x wavefront")

    def plan(self, case: LanguageShape, workers: int) -> Plan:
        """Our plan for it, with the same cuts as the peers."""
        stages = workers // self.replicas
        cuts = balanced_cuts(case, stages, share_head=self.share_head)
        chunk_steps = -(-case.steps // self.chunks) if self.chunks > 1 else None
        how: dict[str, Any] = {"micro_batches": self.micro_batches, "share_head": self.share_head}
        return Plan(self.replicas, stages, cuts=cuts, chunk_steps=chunk_steps, **how)

    def bubble(self, workers: int) -> float | None:
        """The idle fraction of our schedule if all stages and chunks take equal time; None without stages of ours."""
        stages = workers // self.replicas
        if not self.ours or self.family == "serial" or stages == 1:
            return None
        return round(schedules.bubble(schedules.wavefront(stages, (self.chunks,) * self.micro_batches, share_head=self.share_head)), 3)


def variants_of(case: LanguageShape, size: int) -> list[Variant]:
    """All variants to try. With more workers than layers, only those with replicas."""
    micro = [count for count in MICRO_BATCHES if case.lanes % count == 0]
    chunks = [count for count in CHUNKS if case.steps >= count * SHORTEST_CHUNK]
    best = min(8, chunks[-1])
    found = [Variant("serial"), Variant("serial PyTorch"), Variant("DDP"), Variant(f"DDP{TORCH}"), Variant("replicas", replicas=size)]
    both = [count for count in (2, 4) if size % count == 0 and 2 <= size // count <= case.layers]
    found += [Variant("replicas x wavefront", replicas=count, chunks=best) for count in both]
    if size > case.layers:
        return found
    for kind in ("", TORCH):
        found += [Variant(f"torch GPipe{kind}", micro_batches=count) for count in micro]
        found += [Variant(f"torch 1F1B{kind}", micro_batches=count) for count in micro if count >= size]
    found += [Variant("wavefront", chunks=count, share_head=shared) for count in chunks for shared in (False, True)]
    return [*found, Variant("wavefront", micro_batches=4, chunks=4)]


def run(*, quick: bool = False, workers: Sequence[int] = ()) -> list[Row]:
    """One row per loop. A case with fewer layers than workers has only loops with replicas; with fewer than half as many, none."""
    rows: list[Row] = []
    for size in workers or ([2] if quick else crew_sizes()):
        for case in (QUICK,) if quick else (*CASES, WIDE) if size >= 8 else CASES:
            if size <= 2 * case.layers:
                rows += printed(_compare(case, size, quick=quick))
    return rows


def _compare(case: LanguageShape, size: int, *, quick: bool) -> list[Row]:
    rounds, seconds = (2, 0.02) if quick else (3, 0.5)
    job = {"case": asdict(case), "variants": [asdict(each) for each in variants_of(case, size)], "rounds": rounds, "seconds": seconds}
    timed = start(__name__, job, size)[0]
    return rows_of(case, size, timed)


def rows_of(case: LanguageShape, size: int, timed: Sequence[Row]) -> list[Row]:
    """The table: every loop beside the faster serial one and the best of each kind of peer."""
    best: dict[str, float] = {}
    for row in timed:
        family = row["variant"]["family"]
        best[family] = min(row["step_ms"], best.get(family, torch.inf))
    serial_ms = min(best["serial"], best["serial PyTorch"])
    nn_lstm_ms = min((best[f"{family}{TORCH}"] for family in PIPELINES if f"{family}{TORCH}" in best), default=None)
    pipelining_ms = min((best[family] for family in PIPELINES if family in best), default=None)
    over = {
        "over_pipelining": None if pipelining_ms is None or nn_lstm_ms is None else min(pipelining_ms, nn_lstm_ms),
        "over_pipelining_nn_lstm": nn_lstm_ms,
        "over_ddp": min(best["DDP"], best[f"DDP{TORCH}"]),
        "over_ddp_nn_lstm": best[f"DDP{TORCH}"],
    }
    rows: list[Row] = []
    for row in timed:
        variant, step_ms = Variant(**row["variant"]), row["step_ms"]
        used = 1 if variant.family.startswith("serial") else size
        rows.append(
            {
                "case": case.name,
                "workers": used,
                "variant": variant.name,
                "lstm": row["lstm"],
                "step_ms": round(step_ms, 2),
                "spread": round(row["spread"], 3),
                "speedup": round(serial_ms / step_ms, 3),
                "efficiency": round(serial_ms / step_ms / used, 3),
                **{name: None if theirs is None else round(theirs / step_ms, 3) for name, theirs in over.items()},
                "bubble": variant.bubble(size),
            }
        )
    return rows


# In a worker


def work(world: World, job: dict[str, Any]) -> Iterator[Row]:
    """Entry point of every worker: time all loops in turn."""
    crew, case = TimedWorkers(world), LanguageShape(**job["case"])
    # The fastest LSTM for the peers, on a worker's share of the lanes under data parallelism, which is also a typical micro-batch; and the
    # fastest of torch's own.
    lstms = peers.fastest_lstm(crew, case, max(1, case.lanes // crew.size)), peers.fastest_lstm(crew, case, case.lanes, peers.LSTMS[:2])
    loops: dict[Variant, Step | None] = {}
    losses: dict[Variant, list[float]] = {}
    first_ms: dict[Variant, float] = {}
    lstm_of: dict[Variant, str] = {}
    for variant in (Variant(**each) for each in job["variants"]):
        torchs = variant.family == "serial PyTorch" or variant.family.endswith(TORCH)
        lstm_of[variant] = peers.OURS if variant.ours else lstms[torchs]
        loops[variant] = loop_of(variant, case, crew, lstm_of[variant])
        first_ms[variant], losses[variant] = first_steps(crew, loops[variant])
    check_losses({variant.name: values for variant, values in losses.items()}, reference="serial")
    # Of the pipelines with micro-batches, only the fastest is timed further; the others are freed.
    tuned = [f"{family}{kind}" for family in PIPELINES for kind in ("", TORCH)]
    fastest = {family: min((each for each in loops if each.family == family), key=first_ms.__getitem__, default=None) for family in tuned}
    loops = {each: loop for each, loop in loops.items() if fastest.get(each.family, each) == each}
    steps = {variant.name: counted(loop) for variant, loop in loops.items()}
    timings = time_loops(crew, steps, rounds=job["rounds"], seconds=job["seconds"], first=CHECKED[-1] + 1)
    for variant in loops:
        step_ms = timings[variant.name].step_ms
        yield {"variant": asdict(variant), "lstm": lstm_of[variant], "step_ms": statistics.median(step_ms), "spread": spread(step_ms)}


def loop_of(variant: Variant, case: LanguageShape, crew: TimedWorkers, lstm: str) -> Step | None:
    """The loop of a variant on this worker; None if this worker has no part in it."""
    match variant.family.removesuffix(TORCH):
        case "serial":
            return ours(case, Mesh.alone(peers.CPU)) if crew.rank == 0 else None
        case "serial PyTorch":
            return peers.Serial(case, lstm).step if crew.rank == 0 else None
        case "DDP":
            return peers.DataParallel(case, lstm, crew.rank, crew.size).step
        case "torch GPipe" | "torch 1F1B":
            return peers.TorchPipeline(case, lstm, crew.rank, crew.size, variant.family.split()[1], variant.micro_batches).step
        case _:
            return ours(case, Mesh(crew.world, variant.plan(case, crew.size)))


def ours(case: LanguageShape, mesh: Mesh) -> Step:
    """Our trainer, with the plan of a mesh."""
    train = {"optimizer": "adam", "lr": peers.LR, "clip": peers.CLIP, "precision": "fp32"}
    trainer = Trainer(case.model(), train, mesh=mesh, keep_state=False)
    batches = [Batch.of(x_TB, target_TB) for x_TB, target_TB in case.batches()]
    return lambda number: trainer.step(batches[number % len(batches)])


def _mean_loss(crew: TimedWorkers, loop: Step | None, number: int) -> float:
    """Run a step and return its loss, the same on every worker. If several workers have a loss, each covers an equal share of the lanes."""
    loss = None if loop is None else loop(number)
    return crew.sum(0.0 if loss is None else float(loss)) / crew.sum(loss is not None)


def first_steps(crew: TimedWorkers, loop: Step | None) -> tuple[float, list[float]]:
    """Run the checked steps; returns the fastest time after the first step, in milliseconds, and all losses."""
    losses: list[float] = []

    def step(number: int) -> int:
        losses.append(_mean_loss(crew, loop, number))
        return 0

    seconds = [timed_block(crew, step, 1, number)[0] for number in CHECKED]
    return 1e3 * min(seconds[1:]), losses


def counted(loop: Step | None, tokens: int = 0) -> Loop:
    """A loop whose steps return how many tokens this worker has trained on; none if it has no part in it."""

    def step(number: int) -> int:
        if loop is None:
            return 0
        loop(number)
        return tokens

    return step


def check_losses(losses: dict[str, list[float]], reference: str) -> None:
    """Raise if a loop does not compute what one worker computes."""
    serial = losses[reference]
    allowed = OF_FALL * (serial[0] - serial[-1]) + OF_LOSS * serial[0]
    for name, values in losses.items():
        for number, (value, wanted) in enumerate(zip(values, serial, strict=True)):
            if not abs(value - wanted) <= allowed:
                raise RunError(f"{name} has loss {value} at step {number}, but {reference} has {wanted}; fix that before comparing speed")


if __name__ == "__main__":
    main("benchmarks.pipeline")
