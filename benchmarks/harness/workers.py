"""Runs multi-worker benchmarks in worker processes: loops that take turns.

A benchmark module defines `work(world, job)`, which every worker calls; see `parallel.worker_pool`.

Timing: all loops live in the same processes and take turns, a block of steps each, for several rounds. Each block starts with a barrier,
and its time is that of the slowest worker. A worker with no part in a loop waits in the collective that ends the block.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from benchmarks.harness.timing import take_turns
from carrywave.errors import UserError
from carrywave.launch.hardware import cores as cores_here
from carrywave.parallel import worker_pool
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World

R = TypeVar("R", bound=Mapping[str, object])
Loop = Callable[[int], int]  # runs step i; returns this worker's share of the real tokens


@dataclass(frozen=True)
class TimedWorkers:
    """The workers of one job, seen from this rank."""

    world: World

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.world.size

    def barrier(self) -> None:
        """Wait until every worker has arrived."""
        if self.size > 1:
            dist.barrier()

    def most(self, value: float) -> float:
        """The maximum over all workers. Collective."""
        return self._together(value, dist.ReduceOp.MAX)

    def sum(self, value: float) -> float:
        """The sum over all workers. Collective."""
        return self._together(value, dist.ReduceOp.SUM)

    def _together(self, value: float, how: Any) -> float:
        shared = torch.tensor([value], dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(shared, how)
        return float(shared)


@dataclass(frozen=True)
class Timing:
    """The timed blocks of a loop: steps per block, seconds of the slowest worker, real tokens of all workers."""

    steps: int
    seconds: list[float]
    tokens: list[float]

    @property
    def step_ms(self) -> list[float]:
        """Milliseconds per step, for each block."""
        return [1e3 * seconds / self.steps for seconds in self.seconds]

    @property
    def tokens_per_second(self) -> list[float]:
        """Real tokens per second, for each block."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]


def printed(rows: Iterable[R]) -> list[R]:
    """The same rows, after printing each on a line of stderr, without what they leave empty: benchmarks can take minutes."""
    kept = list(rows)
    for row in kept:
        print("  ".join(f"{name} {value}" for name, value in row.items() if value not in (None, "")), file=sys.stderr)
    return kept


def start(module: str, job: Mapping[str, Any], workers: int) -> list[list[Row]]:
    """Run the `work` of a benchmark's module in `workers` single-threaded processes; returns the rows of each, by rank."""
    return worker_pool.start(module, job, workers, name=module)


def crew_sizes(cores: int | None = None) -> list[int]:
    """The worker counts to time on this machine: up to one worker per two cores, and always two workers."""
    cores = cores_here() if cores is None else cores
    if cores < 2:
        raise UserError(f"this benchmark compares several workers, but there is {cores} core; run it on two or more")
    return [workers for workers in (2, 4, 8) if workers <= max(2, cores // 2)]


def time_loops(crew: TimedWorkers, loops: Mapping[str, Loop], *, rounds: int, seconds: float, first: int = 0) -> dict[str, Timing]:
    """Time the loops in turn, in blocks of about `seconds` each, sized by one trial step; steps are numbered from `first`."""
    steps = {name: max(1, math.ceil(seconds / timed_block(crew, loop, 1, first)[0])) for name, loop in loops.items()}

    def block(name: str) -> Callable[[], tuple[float, float]]:
        begins = itertools.count(first + 1, steps[name])
        return lambda: timed_block(crew, loops[name], steps[name], next(begins))

    blocks = take_turns({name: block(name) for name in loops}, rounds)
    return {name: Timing(steps[name], *map(list, zip(*several, strict=True))) for name, several in blocks.items()}


def timed_block(crew: TimedWorkers, loop: Loop, steps: int, first: int) -> tuple[float, float]:
    """Run one block; returns the seconds of the slowest worker and the real tokens of all workers."""
    crew.barrier()
    begin, tokens = time.perf_counter(), 0
    for number in range(first, first + steps):
        tokens += loop(number)
    elapsed = crew.most(time.perf_counter() - begin)
    return elapsed, crew.sum(tokens)
