"""The ways to split a step that `bench pipeline` compares: their names, our plans and schedules for them, and the targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from carrywave.benchmarks.harness.shapes import LanguageShape
from carrywave.benchmarks.peers.pipeline_loops import balanced_cuts
from carrywave.plan.plan import Plan
from carrywave.plan.schedule import schedule as schedules
from carrywave.plan.schedule.schedule import Schedule

CHUNKS, MICRO_BATCHES = (4, 8, 16, 32), (2, 4, 8)
SHORTEST_CHUNK = 4  # steps
PIPELINES = ("torch GPipe", "torch 1F1B")
TORCH = " nn.LSTM"  # suffix of peers that are held to torch's own LSTM
REPLICAS, BOTH = "replicas", "replicas x wavefront"


@dataclass(frozen=True)
class Variant:
    """One way to split a step: the method, and the number of parts."""

    family: str
    micro_batches: int = 1  # parts of the lanes: micro-batches
    chunks: int = 1  # parts of the window
    recompute: bool = False
    share_head: bool = False
    replicas: int = 1  # of a pipeline, or of single workers

    @property
    def name(self) -> str:
        """The name shown in the table."""
        parts = [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        parts += [f"{self.chunks} chunks"] if self.chunks > 1 else []
        ending = (" recompute" if self.recompute else "") + (", head shared" if self.share_head else "")
        family = f"{self.replicas} {self.family}" if self.replicas > 1 else self.family
        return family + (f" {' x '.join(parts)}" if parts else "") + ending


def variants_of(case: LanguageShape, size: int, *, quick: bool = False) -> list[Variant]:
    """All variants to try; of those that differ only in the number of micro-batches, only the best is timed in full. With more workers than
    layers, only those with replicas.
    """
    micro = [count for count in MICRO_BATCHES if case.lanes % count == 0 and (not quick or count <= 4)]
    chunks = [count for count in CHUNKS if case.steps >= count * SHORTEST_CHUNK]
    best = min(8, chunks[-1])
    found = [Variant("serial"), Variant("serial PyTorch"), Variant("DDP"), Variant(f"DDP{TORCH}"), Variant(REPLICAS, replicas=size)]
    both = [count for count in (2, 4) if size % count == 0 and 2 <= size // count <= case.layers]
    found += [Variant(BOTH, replicas=count, chunks=best) for count in both]
    if size > case.layers:
        return found
    found += [Variant("sequential"), Variant("round-robin")]
    found += [Variant("gpipe", micro_batches=count) for count in micro if count > 1]
    for kind in ("", TORCH):
        found += [Variant(f"torch GPipe{kind}", micro_batches=count) for count in micro]
        found += [Variant(f"torch 1F1B{kind}", micro_batches=count) for count in micro if count >= size]
    found += [Variant("wavefront", chunks=count, share_head=shared) for count in chunks for shared in (False, True)]
    return [*found, Variant("wavefront", micro_batches=4, chunks=4), Variant("wavefront", chunks=best, recompute=True)]


def plan_of(variant: Variant, case: LanguageShape, workers: int) -> Plan:
    """Our plan for a variant, with the same cuts as the peers."""
    stages = workers // variant.replicas
    chunk_steps = -(-case.steps // variant.chunks) if variant.chunks > 1 else None
    return Plan(
        variant.replicas,
        stages,
        cuts=balanced_cuts(case, stages, share_head=variant.share_head),
        chunk_steps=chunk_steps,
        micro_batches=variant.micro_batches,
        recompute=variant.recompute,
        share_head=variant.share_head,
    )


def _gpipe(stages: int, chunks: Sequence[int], *, backward: bool = True, weights: bool = True) -> Schedule:
    del weights  # never deferred: time is not cut
    return schedules.gpipe(stages, len(chunks), backward=backward)


SCHEDULERS: dict[str, Callable[..., Schedule]] = {
    "sequential": schedules.sequential,
    "gpipe": _gpipe,
    "wavefront": schedules.wavefront,
    REPLICAS: schedules.wavefront,
    BOTH: schedules.wavefront,
}


def bubble_of(variant: Variant, workers: int) -> float | None:
    """The idle fraction that our schedule predicts if all stages and chunks take equal time; None for variants without such a schedule."""
    stages = workers // variant.replicas
    if variant.family not in SCHEDULERS or stages == 1:
        return None
    options = ({"share_head": True} if variant.share_head else {}) | ({"defer_weights": False} if variant.recompute else {})
    return schedules.bubble(SCHEDULERS[variant.family](stages, (variant.chunks,) * variant.micro_batches, **options))


def targets_of(case: LanguageShape, size: int, variant: Variant, *, best: bool) -> list[str]:
    """The targets of a row: speed for the fastest wavefront, memory for two stages (unless they share the head, which both then hold)."""
    wanted = []
    if best and size == 2:
        wanted += ["over_pipelining >= 1.7", "over_ddp >= 1.0"]
        efficiency = {(8, 256): 0.80, (4, 512): 0.78}.get((case.layers, case.hidden))
        wanted += [f"efficiency >= {efficiency}"] if efficiency else []
    if best and size == 8 and (case.layers, case.hidden) == (8, 512):
        wanted += ["over_pipelining >= 3.0", "over_ddp >= 1.8", "speedup >= 4.5 (stretch)"]
    if size == 2 and variant.family == "wavefront" and not variant.share_head:
        wanted.append("peak_share <= 0.4" if variant.micro_batches > 1 else "peak_share <= 0.6")
    return wanted
