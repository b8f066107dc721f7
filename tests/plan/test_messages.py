"""Programs are text: `<F0` posts the receive of what F0 reads, `F0` runs it, `F0>` sends what it gives. All are proved not to hang."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from _message_proof import prove, spell
from _schedules import SCHEDULES, peak

from carrywave.errors import PlanError
from carrywave.plan.schedule.messages import Program, ProgramStep, channels_of, incoming, outgoing, pairs_of, with_messages
from carrywave.plan.schedule.schedule import Phase, Schedule, StageTask, serial, wavefront

AHEAD = st.integers(0, 4)


def program(*rows: str, schedule: Schedule) -> Program:
    """A program from its text."""
    return Program(schedule, tuple(tuple(step(word, stage) for word in row.split()) for stage, row in enumerate(rows)))


def step(word: str, stage: int) -> ProgramStep:
    found = re.fullmatch(r"(<?)([FBHW])(\d*)([a-z]?)(>?)", word)
    assert found is not None
    task = StageTask(cast(Phase, found[2]), stage, int(found[3] or 0), ord(found[4]) - ord("a") if found[4] else 0)
    return ProgramStep("receive" if found[1] else "send" if found[5] else "run", task)


@pytest.mark.parametrize(
    ("schedule", "ahead", "rows"),
    [
        (serial(2), 2, ["F0 F1 B1 B0 W"]),
        (wavefront(2, 2), 0, ["F0 F0> F1 F1> <B1 B1 <B0 B0 W", "<F0 <F1 F0 F1 B1 B1> B0 B0> W"]),
        (wavefront(2, 3, backward=False), 1, ["F0 F0> F1 F1> F2 F2>", "<F0 <F1 <F2 F0 F1 F2"]),
        # F1c on its way up crosses B1b on its way down: each stage posts the receive of the one before it sends the other.
        (
            wavefront(2, 2, 3),
            0,
            [
                "F0a F0a> F1a F1a> F0b F0b> F1b F1b> <B1a B1a <B0a B0a F0c F0c> <B1b F1c F1c> B1b <B0b B0b Wa Wb <B1c B1c <B0c B0c Wc",
                "<F0a <F1a F0a <F0b F1a <F1b B1a B1a> B0a B0a> F0b F1b <F0c B1b B1b> <F1c B0b B0b> Wa F0c F1c B1c B1c> B0c B0c> Wb Wc",
            ],
        ),
        # What is scored elsewhere goes there, and its gradient back.
        (
            wavefront(2, 2, share_head=True),
            0,
            ["F0 F0> F1 F1> <H0 H0 H0> <B1 B1 <B0 B0 W", "<F0 <F1 F0 F0> <B0 F1 H1 B1 B1> B0 B0> W"],
        ),
    ],
)
def test_programs(schedule: Schedule, ahead: int, rows: list[str]) -> None:
    assert spell(with_messages(schedule, ahead)).splitlines() == rows


@settings(max_examples=300)
@given(SCHEDULES, AHEAD)
def test_every_generated_schedule_is_proved(schedule: Schedule, ahead: int) -> None:
    made = with_messages(schedule, ahead)
    prove(made)
    known = channels_of(len(made.stages), share_head=bool(schedule.scorers))
    for each in (each for steps in made.stages for each in steps if each.kind != "run"):
        assert (incoming if each.kind == "receive" else outgoing)(each.task, schedule) in known


@settings(max_examples=100)
@given(SCHEDULES, AHEAD)
def test_open_receives_are_bounded(schedule: Schedule, ahead: int) -> None:
    last = len(schedule.stages) - 1
    for stage, steps in enumerate(with_messages(schedule, ahead).stages):
        for channel in channels_of(last + 1, share_head=True):
            waiting: list[StageTask] = []
            for each in steps:
                if channel.receiver != stage or incoming(each.task, schedule) != channel:
                    continue
                if each.kind == "receive":
                    waiting.append(each.task)
                if each.kind == "run" and each.task in waiting:
                    # A sender is never further ahead than by what it holds. What is scored, and its gradient, belong to a chunk that the
                    # last stage holds.
                    holder = channel.sender if abs(channel.sender - stage) == 1 and channel.phase == each.task.phase != "H" else last
                    holder = last if stage == last and channel.phase == "B" else holder
                    assert len(waiting) <= (peak(schedule)[holder] if schedule.backward else 2) + ahead
                    waiting.remove(each.task)


@settings(max_examples=200)
@given(SCHEDULES, AHEAD, st.booleans(), st.data())
def test_a_program_that_lacks_any_step_or_has_it_twice_is_refused(schedule: Schedule, ahead: int, twice: bool, data: st.DataObject) -> None:
    made = with_messages(schedule, ahead)
    stage = data.draw(st.integers(0, len(made.stages) - 1))
    at = data.draw(st.integers(0, len(made.stages[stage]) - 1))
    steps = made.stages[stage]
    changed = (*steps[: at + twice], *steps[at + (not twice) :])
    with pytest.raises(PlanError):
        prove(Program(made.schedule, (*made.stages[:stage], changed, *made.stages[stage + 1 :])))


GOOD = ("F0 F0> F1 F1> <B1 B1 <B0 B0", "<F0 F0 <F1 F1 B1 B1> B0 B0>")  # weight gradients are part of the backwards
SHARED = ("F0 F0> F1 F1> <H0 H0 H0> <B1 B1 <B0 B0", "<F0 <F1 F0 F0> <B0 F1 H1 B1 B1> B0 B0>")
PLAIN, SCORED = wavefront(2, 2, defer_weights=False), wavefront(2, 2, share_head=True, defer_weights=False)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (GOOD[0], "<F1 <F0 F0 F1 B1 B1> B0 B0>", "a message to stage 1 is sent for F0 but received for F1"),
        (GOOD[0], "<F0 F0 F1 <F1 B1 B1> B0 B0>", "stage 1 runs F1 without a receive"),
        (GOOD[0], "<F0 F0 <F1 F1 B1 B1> B0", "deadlocks: stage 0 waits to run B0"),
        (GOOD[0] + " <B0", GOOD[1], "stage 0 posts a receive for B0 that no send matches"),
        ("F0> F0 F1 F1> <B1 B1 <B0 B0", GOOD[1], "stage 0 sends F0 before it has run"),
        ("F0 F0> <B1 B1 <B0 B0", GOOD[1], "stage 0 does not run its tasks"),
        (GOOD[0], GOOD[1].replace("F0 <F1", "F0 F0> <F1"), "stage 1 has no neighbour for send F0"),
        (SHARED[0].replace(" H0>", ""), SHARED[1], "deadlocks: stage 0 waits to run B0, stage 1 waits to run B0"),
        # Each receive just before the run that needs it: then F1 on its way up waits for what F0 has to say about the head.
        (SHARED[0], "<F0 F0 F0> <F1 F1 H1 B1 B1> <B0 B0 B0>", "deadlocks: stage 0 waits to send F1, stage 1 waits to send F0"),
    ],
)
def test_a_broken_program_is_refused_by_the_step(first: str, second: str, message: str) -> None:
    prove(program(*GOOD, schedule=PLAIN))
    prove(program(*SHARED, schedule=SCORED))
    with pytest.raises(PlanError, match=message):
        prove(program(first, second, schedule=SCORED if "H0" in first else PLAIN))


@settings(max_examples=150)
@given(SCHEDULES, AHEAD)
def test_what_others_wait_for_is_sent_before_weight_gradients(schedule: Schedule, ahead: int) -> None:
    made = with_messages(schedule, ahead)
    for steps in (*made.stages, *made.in_order.stages):
        for number, each in enumerate(steps):
            if each.kind == "run" and each.task.phase == "W":
                ran = {step.task for step in steps[:number] if step.kind == "run" and outgoing(step.task, made.schedule) is not None}
                assert ran <= {step.task for step in steps[:number] if step.kind == "send"}


def test_neighbours_connect_and_with_a_shared_head_the_last_stage_and_every_other() -> None:
    assert pairs_of(channels_of(4, share_head=False)) == [(0, 1), (1, 2), (2, 3)]
    assert pairs_of(channels_of(4, share_head=True)) == [(0, 1), (0, 3), (1, 2), (1, 3), (2, 3)]
