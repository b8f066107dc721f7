"""Messages one after the other, as on a device: programs in order are proved, and those that post ahead are not."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from _message_proof import prove, spell
from _schedules import SCHEDULES
from _serial_proof import MessageEnd, joins, prove_in_order

from carrywave.errors import PlanError
from carrywave.plan.schedule.messages import Program, ProgramStep, with_messages
from carrywave.plan.schedule.schedule import Schedule, wavefront


@settings(max_examples=300)
@given(SCHEDULES)
def test_every_generated_schedule_is_proved_in_order(schedule: Schedule) -> None:
    made = with_messages(schedule).in_order
    prove_in_order(made)
    prove(made)  # under the host's rules too
    # Nothing is left out: the same steps as with receives posted ahead.
    assert [sorted(steps) for steps in made.stages] == [sorted(steps) for steps in with_messages(schedule).stages]


def test_one_stage_after_the_other() -> None:
    assert spell(with_messages(wavefront(2, 2)).in_order).splitlines() == [
        "F0 F0> F1 F1> <B1 B1 <B0 B0 W",
        "<F0 <F1 F0 F1 B1 B1> B0 B0> W",
    ]


@pytest.mark.parametrize("schedule", [wavefront(2, 3), wavefront(3, 4, 2), wavefront(3, 4, share_head=True)])
def test_receives_posted_ahead_would_hold_up_the_sends_behind_them(schedule: Schedule) -> None:
    made = with_messages(schedule, 1)
    prove(made)  # with channels of their own, and a host that waits, they run
    with pytest.raises(PlanError, match=r"messages in order deadlock: stage 0 waits for messages with stage|is sent for"):
        prove_in_order(made)


@settings(max_examples=100)
@given(SCHEDULES, st.data())
def test_a_program_that_lacks_a_message_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    made = with_messages(schedule).in_order
    messages = [(stage, at) for stage, steps in enumerate(made.stages) for at, step in enumerate(steps) if step.kind != "run"]
    if not messages:
        return
    stage, at = data.draw(st.sampled_from(messages))
    with pytest.raises(PlanError, match=r"is sent for|messages to stage|deadlock"):
        prove_in_order(with_stage(made, stage, [*made.stages[stage][:at], *made.stages[stage][at + 1 :]]))


def test_what_goes_into_one_batch() -> None:
    send, receive = MessageEnd(1, receives=False), MessageEnd(1, receives=True)
    assert joins(send, send)
    assert joins(send, receive)
    assert not any((joins(receive, receive), joins(receive, send), joins(send, receive._replace(peer=2))))


def test_two_lines_of_one_pair_share_an_order() -> None:
    """What the last stage hands down to be scored, and gradients, go the same way: swapped at one end they would be mixed up."""
    made = with_messages(wavefront(2, 4, share_head=True)).in_order
    steps = list(made.stages[0])
    first, second = [at for at, step in enumerate(steps) if step.kind == "receive" and step.task.phase == "H"][:2]
    steps[first], steps[second] = steps[second], steps[first]
    with pytest.raises(PlanError, match=r"from stage 1 to stage 0 is sent for H. but received for H.; use one order"):
        prove_in_order(with_stage(made, 0, steps))


def with_stage(program: Program, place: int, steps: list[ProgramStep]) -> Program:
    rows = list(program.stages)
    rows[place] = tuple(steps)
    return replace(program, stages=tuple(rows))
