"""Every way to make a schedule, by name: (stages, chunks of each micro-batch, whether it goes backward); and what it holds at most."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from hypothesis import strategies as st

from carrywave.plan.schedule.schedule import Schedule, gpipe, serial, wavefront

Generator = Callable[[int, list[int], bool], Schedule]

GENERATORS: dict[str, Generator] = {
    "serial": lambda stages, counts, backward: serial(counts, backward=backward),
    "gpipe": lambda stages, counts, backward: gpipe(stages, len(counts), backward=backward),
    "wavefront": lambda stages, counts, backward: wavefront(stages, counts, backward=backward),
    "whole backwards": lambda stages, counts, backward: wavefront(stages, counts, backward=backward, defer_weights=False),
    "head shared": lambda stages, counts, backward: wavefront(stages, counts, backward=backward, share_head=True),
}
COUNTS = st.lists(st.integers(1, 6), min_size=1, max_size=5)
EQUAL = st.tuples(st.integers(1, 6), st.integers(1, 5)).map(lambda shape: [shape[0]] * shape[1])
SCHEDULES: st.SearchStrategy[Any] = st.builds(
    lambda kind, stages, counts, backward: GENERATORS[kind](stages, counts, backward),
    st.sampled_from(sorted(GENERATORS)),
    st.integers(1, 6),
    COUNTS | EQUAL,
    st.booleans(),
)


def peak(schedule: Schedule) -> tuple[int, ...]:
    """The peak number of chunks in flight on each stage, from the start of a forward to the end of its backward."""
    if not schedule.backward:
        return (1,) * len(schedule.stages)  # only the current chunk: nothing is kept for a backward
    return tuple(max(accumulate({"F": 1, "B": -1, "H": 0, "W": 0}[task.phase] for task in tasks)) for tasks in schedule.stages)
