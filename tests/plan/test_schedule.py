"""Schedules are pictures."""

from __future__ import annotations

import pytest

from carrywave.errors import PlanError
from carrywave.plan.schedule import Schedule, Task, place, serial, show


def test_one_chunk_goes_forward_and_back() -> None:
    assert show(serial()) == "F0 B0"


def test_chunks_come_back_in_reverse() -> None:
    assert show(serial(chunks=3)) == "F0 F1 F2 B2 B1 B0"


def test_a_slice_ends_before_the_next_starts() -> None:
    assert show(serial(chunks=2, slices=2)) == "F0a F1a B1a B0a F0b F1b B1b B0b"


def test_evaluation_has_no_backward() -> None:
    assert show(serial(chunks=3, backward=False)) == "F0 F1 F2"


def test_two_stages_wait_for_each_other() -> None:
    forward = [tuple(Task("F", stage, chunk) for chunk in range(3)) for stage in range(2)]
    assert show(Schedule(tuple(forward), chunks=3, slices=1)) == "F0 F1 F2 .\n.  F0 F1 F2"


def test_backward_before_its_forward_is_refused() -> None:
    broken = Schedule(((Task("B", 0, 0), Task("F", 0, 0)),), chunks=1, slices=1)
    with pytest.raises(PlanError, match="cannot go on: B0 wait"):
        place(broken)


def test_a_task_that_no_stage_runs_is_named() -> None:
    broken = Schedule(((Task("F", 0, 1),),), chunks=2, slices=1)
    with pytest.raises(PlanError, match="F1 on stage 0 needs F0, which no stage runs"):
        place(broken)


def test_no_chunks_are_refused() -> None:
    with pytest.raises(PlanError, match="at least one chunk"):
        serial(chunks=0)
