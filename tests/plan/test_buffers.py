"""Buffers in device memory: as many as are counted suffice, and fewer do not."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from _buffer_proof import prove_in_place
from _schedules import GENERATORS

from carrywave.errors import PlanError
from carrywave.plan.schedule.buffers import places
from carrywave.plan.schedule.messages import Channel, with_messages
from carrywave.plan.schedule.schedule import gpipe, wavefront


@settings(deadline=None, max_examples=150)
@given(
    kind=st.sampled_from(sorted(GENERATORS)),
    stages=st.integers(1, 5),
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    backward=st.booleans(),
)
def test_what_is_counted_suffices(kind: str, stages: int, counts: list[int], backward: bool) -> None:
    prove_in_place(with_messages(GENERATORS[kind](stages, counts, backward)))


def test_one_micro_batch_needs_one_slot() -> None:
    assert {room.slots for room in places(with_messages(wavefront(4, 8))).values()} == {1}


def test_gpipe_holds_every_micro_batch() -> None:
    found = places(with_messages(gpipe(3, 6)))
    assert found[Channel("F", 0, 1)].slots == 6  # all forwards come before the first backward


def test_one_forward_one_backward_holds_few() -> None:
    found = places(with_messages(wavefront(2, 4, micro_batches=16)))
    assert max(room.slots for room in found.values()) <= 3


def test_too_few_slots_deadlock() -> None:
    program = with_messages(gpipe(2, 4))
    held = {channel: replace(room, slots=1) for channel, room in places(program).items()}
    with pytest.raises(PlanError, match="give their channels more buffers"):
        prove_in_place(program, held)


def test_too_few_signals_deadlock() -> None:
    """Stage 0 may run ahead of stage 1 by several micro-batches before it needs an answer; without signals it cannot."""
    program = with_messages(wavefront(3, 1, micro_batches=6, share_head=True))
    held = {channel: replace(room, signals=0) for channel, room in places(program).items()}
    with pytest.raises(PlanError, match="deadlock"):
        prove_in_place(program, held)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_shared_head_needs_few_signals_however_many_chunks_wait_for_it(stages: int) -> None:
    """It reads the last chunks first: who has waited for the last message knows that those before it are there."""
    program = with_messages(wavefront(stages, 125, micro_batches=2, share_head=True))
    assert max(room.signals for room in places(program).values()) <= 6
    prove_in_place(program)


def test_a_message_that_is_read_first_has_to_be_told_of() -> None:
    program = with_messages(wavefront(2, 4, share_head=True))
    channel = Channel("F", 0, 1)
    held = places(program)
    held[channel] = replace(held[channel], signalled=held[channel].signalled[1:])
    with pytest.raises(PlanError, match="stage 1 does not wait for F0 from stage 0, nor for a later message"):
        prove_in_place(program, held)
