"""The rows of `bench gpu-pipeline`: which stacks are split in which ways over shares of which size, and what was measured of each."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from carrywave.benchmarks.peers.gpu_replicas import DDP
from carrywave.benchmarks.stages.gpu_worker import Split, SummedStack
from carrywave.benchmarks.stages.variants import SCHEDULERS
from carrywave.errors import UserError
from carrywave.parallel.worker_pool import Row
from carrywave.plan.profile import BY_BACKEND, DEVICE_MEMORY
from carrywave.plan.schedule import schedule as schedules

CHUNKS = (2, 4, 8, 16, 32)
SHORTEST_CHUNK = 4  # steps
MOST_LAUNCHED = 8  # chunks: the host takes as long for any chunk, so that more of them only get slower
WHOLE = 100  # percent
TRANSPORTS = {"device": DEVICE_MEMORY, "nccl": BY_BACKEND["nccl"]}
FEWEST_PASSES = 2


@dataclass(frozen=True)
class Setting:
    """A case on shares of one size."""

    case: SummedStack
    percent: int
    stages: tuple[int, ...]
    replicas: tuple[tuple[int, int], ...] = ()  # (replicas, stages of each)
    only_if_fits: bool = False  # leave it out where the share is too small for the persistent kernel


SETTINGS = (
    Setting(SummedStack(8, 512, 64, 256), 25, (2, 4), ((2, 1), (2, 2))),
    Setting(SummedStack(8, 1024, 64, 128), 50, (2,)),
    # Not wider: a layer of 512 units takes more multiprocessors than an eighth of a GPU has.
    Setting(SummedStack(8, 256, 64, 256), 12, (8,), only_if_fits=True),
)
QUICK = (Setting(SummedStack(4, 64, 16, 32), 25, (2,), ((2, 1),)),)


@dataclass(frozen=True)
class Variant:
    """One row: a way to split a case, on shares of this size."""

    setting: Setting
    split: Split
    percent: int  # that of the setting, or the whole GPU

    @property
    def name(self) -> str:
        """What runs, as shown in the table."""
        split = self.split
        if split.workers == 1:
            return "whole GPU" if self.percent == WHOLE else "one share"
        parts = [f"{split.replicas} replicas"] if split.replicas > 1 else []
        if split.stages > 1 or split.family == DDP:
            parts.append(split.family)
            parts += [f"{split.micro_batches} micro-batches"] if split.micro_batches > 1 else []
            parts += [f"{split.chunks} chunks"] if split.chunks > 1 else []
        return " ".join(parts)

    @property
    def shares(self) -> str:
        """The workers, as shown in the table."""
        return "whole GPU" if self.percent == WHOLE else f"{self.split.workers} x {self.percent}%"

    @property
    def transport(self) -> str:
        """What carries messages and sums; empty for one worker."""
        return "" if self.split.workers == 1 else TRANSPORTS[self.split.transport]

    @property
    def how(self) -> str:
        """Who launches the work."""
        return "recorded" if self.split.recorded else "launched"

    @property
    def words(self) -> frozenset[str]:
        """The words that select the row."""
        case, split = self.setting.case, self.split
        counts = {f"{split.workers}shares", f"{self.setting.percent}%", f"{split.chunks}chunks"}
        return frozenset({*case.name.split(), *self.name.split(), self.how, *self.transport.split(), *counts})

    @property
    def is_base(self) -> bool:
        """True if ratios are relative to it."""
        return self.split == Split("wavefront") and self.percent != WHOLE

    @property
    def is_priced(self) -> bool:
        """True if the planner predicts it: it knows the wavefront, recorded, and no other schedule."""
        return self.split.recorded and self.split.family == "wavefront" and self.percent != WHOLE

    @property
    def bubble(self) -> float | None:
        """The idle fraction that the schedule predicts if all stages and chunks take equal time; None without stages."""
        split = self.split
        if split.stages == 1:
            return None
        return schedules.bubble(SCHEDULERS[split.family](split.stages, (split.chunks,) * split.micro_batches))


@dataclass
class Measured:
    """What was measured and predicted of a variant."""

    ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    passes: int = FEWEST_PASSES  # in a block
    predicted_ms: float | None = None
    notes: list[str] = field(default_factory=list)

    def add_note(self, note: str) -> None:
        """Add a note, unless it is empty or there already."""
        if note and note not in self.notes:
            self.notes.append(note)

    @property
    def median_ms(self) -> float | None:
        """None if it was not timed."""
        return statistics.median(self.ms) if self.ms else None


Measurements = dict[Variant, Measured]
Described = Mapping[tuple[SummedStack, int], Row]  # a share of this size, for a case: multiprocessors and kernel


def variants(settings: Sequence[Setting], *, chunks: Sequence[int] = CHUNKS, rows: Sequence[str] = ()) -> list[Variant]:
    """All variants that `rows` selects, and one share of every size among them."""
    if bad := [count for count in chunks if count < 2]:
        raise UserError(f"bench gpu-pipeline cuts time into {bad[0]} chunks; use 2 or more")
    words = [frozenset(each.split()) for each in rows]
    chosen: list[Variant] = []
    for setting in settings:
        every = [Variant(setting, split, setting.percent) for split in splits_of(setting, chunks)]
        every.append(Variant(setting, Split("wavefront"), WHOLE))
        kept = [each for each in every if not words or any(some <= each.words for some in words)]
        base = Variant(setting, Split("wavefront"), setting.percent)
        chosen += [base, *(each for each in kept if each != base)] if kept else []
    if not chosen:
        raise UserError(
            f"no row of bench gpu-pipeline matches {' or '.join(rows)}; use words such as 8x512, 4shares, wavefront, 8chunks, recorded"
        )
    return chosen


def splits_of(setting: Setting, chunks: Sequence[int]) -> list[Split]:
    """All ways to split a case over the shares of a setting."""
    case = setting.case
    counts = [count for count in chunks if case.steps >= count * SHORTEST_CHUNK]
    splits = [Split("wavefront"), Split("wavefront", recorded=False)]
    for stages in setting.stages:
        splits.append(Split("sequential", stages))
        splits += [Split("gpipe", stages, micro_batches=parts) for parts in (stages, 2 * stages) if case.lanes % parts == 0]
        splits += [
            Split("wavefront", stages, chunks=count, recorded=recorded, transport=transport)
            for transport in TRANSPORTS
            for recorded in (True, False)
            for count in counts
            if recorded or count <= MOST_LAUNCHED
        ]
    for replicas, stages in setting.replicas:
        splits += [
            Split("wavefront", stages, replicas, chunks=count, transport=transport)
            for transport in TRANSPORTS
            for count in (counts if stages > 1 else (1,))
        ]
        splits += [Split(DDP, 1, replicas, recorded=False, transport="nccl")] if stages == 1 else []
    return splits
