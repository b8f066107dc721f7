"""Buffers in device memory: as many as are counted suffice, and fewer do not."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

sys.path.insert(0, str(Path(__file__).parent))
from _buffer_proof import prove_in_place
from _schedules import SCHEDULES

from carrywave.errors import PlanError
from carrywave.plan.schedule.buffers import places
from carrywave.plan.schedule.messages import Channel, with_messages
from carrywave.plan.schedule.schedule import Schedule, gpipe, wavefront

UP = Channel("F", 0, 1)


@settings(deadline=None, max_examples=150)
@given(SCHEDULES)
def test_what_is_counted_suffices(schedule: Schedule) -> None:
    prove_in_place(with_messages(schedule))


def test_how_many_micro_batches_are_held() -> None:
    assert {room.slots for room in places(with_messages(wavefront(4, 8))).values()} == {1}
    assert places(with_messages(gpipe(3, 6)))[UP].slots == 6  # all forwards come before the first backward
    assert max(room.slots for room in places(with_messages(wavefront(2, 4, micro_batches=16))).values()) <= 3


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_shared_head_needs_few_signals_however_many_chunks_wait_for_it(stages: int) -> None:
    """It reads the last chunks first: who has waited for the last message knows that those before it are there."""
    program = with_messages(wavefront(stages, 125, micro_batches=2, share_head=True))
    assert max(room.signals for room in places(program).values()) <= 6
    prove_in_place(program)


@pytest.mark.parametrize(
    ("schedule", "fewer", "said"),
    [
        (gpipe(2, 4), {"slots": 1}, "give their channels more buffers"),
        (wavefront(3, 1, micro_batches=6, share_head=True), {"signals": 0}, "deadlock"),  # a stage could not run ahead of the next
        (wavefront(2, 4, share_head=True), {"signalled": (1, 2, 3)}, "stage 1 does not wait for F0 from stage 0, nor for a later message"),
    ],
)
def test_fewer_do_not(schedule: Schedule, fewer: dict[str, object], said: str) -> None:
    program = with_messages(schedule)
    held = places(program)
    changed = {channel: replace(room, **fewer) for channel, room in held.items() if "signalled" not in fewer or channel == UP}
    with pytest.raises(PlanError, match=said):
        prove_in_place(program, held | changed)
