"""Programs are text: `<F0` posts the receive of what F0 reads, `F0` runs it, `F0>` sends what it gives. Broken ones are refused."""

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
from _schedules import GENERATORS, peak

from carrywave.errors import PlanError
from carrywave.plan.schedule.messages import Program, ProgramStep, channels_of, incoming, outgoing, pairs_of, with_messages
from carrywave.plan.schedule.schedule import Phase, Schedule, StageTask, sequential, serial, wavefront


def program(*rows: str, schedule: Schedule) -> Program:
    """A program from its text."""
    return Program(schedule, tuple(tuple(step(word, stage) for word in row.split()) for stage, row in enumerate(rows)))


def step(word: str, stage: int) -> ProgramStep:
    found = re.fullmatch(r"(<?)([FBHW])(\d*)([a-z]?)(>?)", word)
    assert found is not None
    task = StageTask(cast(Phase, found[2]), stage, int(found[3] or 0), ord(found[4]) - ord("a") if found[4] else 0)
    return ProgramStep("receive" if found[1] else "send" if found[5] else "run", task)


def rows(text: str) -> list[str]:
    return text.splitlines()


def test_one_stage_has_no_messages() -> None:
    assert spell(with_messages(serial(2))) == "F0 F1 B1 B0 W"


def test_receives_stand_before_what_needs_them_and_sends_right_after_their_run() -> None:
    assert rows(spell(with_messages(wavefront(2, 2), ahead=0))) == [
        "F0 F0> F1 F1> <B1 B1 <B0 B0 W",
        "<F0 <F1 F0 F1 B1 B1> B0 B0> W",
    ]


def test_receives_are_posted_ahead() -> None:
    assert rows(spell(with_messages(wavefront(2, 3, backward=False), ahead=1))) == [
        "F0 F0> F1 F1> F2 F2>",
        "<F0 <F1 <F2 F0 F1 F2",
    ]


def test_a_stage_in_turn_hands_on_whole_micro_batches() -> None:
    assert rows(spell(with_messages(sequential(2, 2), ahead=0))) == [
        "F0 F1 F0> F1> <B1 <B0 B1 B0 W",
        "<F0 <F1 F0 F1 B1 B0 B1> B0> W",
    ]


def test_neighbours_that_send_to_each_other_have_posted_before() -> None:
    # F1c on its way up crosses B1b on its way down: each stage posts the receive of the one before it sends the other.
    assert rows(spell(with_messages(wavefront(2, 2, 3), ahead=0))) == [
        "F0a F0a> F1a F1a> F0b F0b> F1b F1b> <B1a B1a <B0a B0a F0c F0c> <B1b F1c F1c> B1b <B0b B0b Wa Wb <B1c B1c <B0c B0c Wc",
        "<F0a <F1a F0a <F0b F1a <F1b B1a B1a> B0a B0a> F0b F1b <F0c B1b B1b> <F1c B0b B0b> Wa F0c F1c B1c B1c> B0c B0c> Wb Wc",
    ]


def test_what_is_scored_elsewhere_goes_there_and_its_gradient_back() -> None:
    assert rows(spell(with_messages(wavefront(2, 2, share_head=True), ahead=0))) == [
        "F0 F0> F1 F1> <H0 H0 H0> <B1 B1 <B0 B0 W",
        "<F0 <F1 F0 F0> <B0 F1 H1 B1 B1> B0 B0> W",
    ]


CASES = {
    "name": st.sampled_from(sorted(GENERATORS)),
    "stages": st.integers(1, 6),
    "counts": st.one_of(
        st.lists(st.integers(1, 6), min_size=1, max_size=5),
        st.tuples(st.integers(1, 6), st.integers(1, 5)).map(lambda shape: [shape[0]] * shape[1]),
    ),
    "backward": st.booleans(),
    "ahead": st.integers(0, 4),
}


@settings(max_examples=300)
@given(**CASES)
def test_every_generated_schedule_is_proved(name: str, stages: int, counts: list[int], backward: bool, ahead: int) -> None:
    schedule = GENERATORS[name](stages, counts, backward)
    made = with_messages(schedule, ahead)
    prove(made)
    for steps, tasks in zip(made.stages, schedule.stages, strict=True):
        assert tuple(step.task for step in steps if step.kind == "run") == tasks
    known = channels_of(len(made.stages), share_head=bool(schedule.scorers))
    for each in (each for steps in made.stages for each in steps if each.kind != "run"):
        assert (incoming if each.kind == "receive" else outgoing)(each.task, schedule) in known


@settings(max_examples=100)
@given(**CASES)
def test_open_receives_are_bounded(name: str, stages: int, counts: list[int], backward: bool, ahead: int) -> None:
    schedule = GENERATORS[name](stages, counts, backward)
    for stage, steps in enumerate(with_messages(schedule, ahead).stages):
        for channel in channels_of(stages, share_head=True):
            waiting: list[StageTask] = []
            for each in steps:
                if channel.receiver != stage or incoming(each.task, schedule) != channel:
                    continue
                if each.kind == "receive":
                    waiting.append(each.task)
                if each.kind == "run" and each.task in waiting:
                    # A sender is never further ahead than by what it holds, or by a whole micro-batch that it hands on in turn. What is
                    # scored, and its gradient, belong to a chunk that the last stage holds.
                    holder = channel.sender if abs(channel.sender - stage) == 1 and channel.phase == each.task.phase != "H" else stages - 1
                    holder = stages - 1 if stage == stages - 1 and channel.phase == "B" else holder
                    held = max(counts) if schedule.in_turn else peak(schedule)[holder] if backward else 2
                    assert len(waiting) <= held + ahead
                    waiting.remove(each.task)


@settings(max_examples=150)
@given(**CASES, data=st.data())
def test_a_program_that_lacks_any_step_is_refused(
    name: str, stages: int, counts: list[int], backward: bool, ahead: int, data: st.DataObject
) -> None:
    made = with_messages(GENERATORS[name](stages, counts, backward), ahead)
    stage = data.draw(st.integers(0, len(made.stages) - 1))
    at = data.draw(st.integers(0, len(made.stages[stage]) - 1))
    steps = made.stages[stage]
    lacking = Program(made.schedule, (*made.stages[:stage], (*steps[:at], *steps[at + 1 :]), *made.stages[stage + 1 :]))
    with pytest.raises(PlanError):
        prove(lacking)


@settings(max_examples=150)
@given(**CASES, data=st.data())
def test_a_program_that_has_any_step_twice_is_refused(
    name: str, stages: int, counts: list[int], backward: bool, ahead: int, data: st.DataObject
) -> None:
    made = with_messages(GENERATORS[name](stages, counts, backward), ahead)
    stage = data.draw(st.integers(0, len(made.stages) - 1))
    at = data.draw(st.integers(0, len(made.stages[stage]) - 1))
    steps = made.stages[stage]
    doubled = Program(made.schedule, (*made.stages[:stage], (*steps[: at + 1], *steps[at:]), *made.stages[stage + 1 :]))
    with pytest.raises(PlanError):
        prove(doubled)


GOOD = ("F0 F0> F1 F1> <B1 B1 <B0 B0", "<F0 F0 <F1 F1 B1 B1> B0 B0>")  # weight gradients are part of the backwards


def test_a_good_program_is_let_through() -> None:
    prove(program(*GOOD, schedule=wavefront(2, 2, defer_weights=False)))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (GOOD[0], "<F1 <F0 F0 F1 B1 B1> B0 B0>", "message 0 to stage 1 is sent for F0 but received for F1; post receives in the order"),
        ("F0 F1 F1> F0> <B1 B1 <B0 B0", GOOD[1], "message 0 to stage 1 is sent for F1 but received for F0"),
        (GOOD[0], "<F0 F0 F1 B1 B1> B0 B0>", "stage 1 runs F1 without a receive"),
        (GOOD[0], "<F0 F0 F1 <F1 B1 B1> B0 B0>", "stage 1 runs F1 without a receive"),
        (GOOD[0], "<F0 F0 <F1 F1 B1 B0 B0>", "message 0 to stage 0 is sent for B0 but received for B1"),
        (GOOD[0], "<F0 F0 <F1 F1 B1 B1> B0", "deadlocks: stage 0 waits to run B0; "),
        (GOOD[0], "<F0 F0 <F1 F1 B1 B1> B0 B0> B0>", "deadlocks: stage 1 waits to send B0"),
        (GOOD[0] + " <B0", GOOD[1], "stage 0 posts a receive for B0 that no send matches"),
        ("F0> F0 F1 F1> <B1 B1 <B0 B0", GOOD[1], "stage 0 sends F0 before it has run"),
        ("F0 F0> <B1 B1 <B0 B0", GOOD[1], "stage 0 runs B1 where the schedule has F1"),
        (GOOD[0] + " B0", GOOD[1], "stage 0 runs B0 where the schedule has nothing"),
        ("F0 F0> F1 F1> <B1 B1", GOOD[1], "stage 0 runs nothing where the schedule has B0"),
        ("<F0 " + GOOD[0], GOOD[1], "stage 0 has no neighbour for receive F0"),
        (GOOD[0], GOOD[1].replace("F0 <F1", "F0 F0> <F1"), "stage 1 has no neighbour for send F0"),
    ],
)
def test_a_broken_program_is_refused_by_the_step(first: str, second: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        prove(program(first, second, schedule=wavefront(2, 2, defer_weights=False)))


SHARED = ("F0 F0> F1 F1> <H0 H0 H0> <B1 B1 <B0 B0", "<F0 <F1 F0 F0> <B0 F1 H1 B1 B1> B0 B0>")


def test_a_good_program_with_a_shared_head_is_let_through() -> None:
    prove(program(*SHARED, schedule=wavefront(2, 2, share_head=True, defer_weights=False)))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (SHARED[0], SHARED[1].replace(" F0>", ""), "deadlocks: stage 0 waits to run H0"),
        (SHARED[0].replace(" <H0", ""), SHARED[1], "stage 0 runs H0 without a receive"),
        (SHARED[0].replace(" H0>", ""), SHARED[1], "deadlocks: stage 0 waits to run B0, stage 1 waits to run B0"),
        (SHARED[0].replace("H0>", "H0> H0>"), SHARED[1], "deadlocks: stage 0 waits to send H0"),
        (SHARED[0], SHARED[1].replace("H1", "H1 H1>"), "stage 1 has no neighbour for send H1"),
        # Each receive just before the run that needs it: then F1 on its way up waits for what F0 has to say about the head.
        (SHARED[0], "<F0 F0 F0> <F1 F1 H1 B1 B1> <B0 B0 B0>", "deadlocks: stage 0 waits to send F1, stage 1 waits to send F0"),
    ],
)
def test_a_broken_program_with_a_shared_head_is_refused(first: str, second: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        prove(program(first, second, schedule=wavefront(2, 2, share_head=True, defer_weights=False)))


def test_a_backward_without_its_head_is_refused() -> None:
    schedule = swapped(wavefront(2, 2, share_head=True, defer_weights=False), 1, 2)
    with pytest.raises(PlanError, match="stage 1 runs B1 before H1, which it needs"):
        prove(program(SHARED[0], SHARED[1].replace("H1 B1 B1>", "B1 B1> H1"), schedule=schedule))


SPLIT = (GOOD[0] + " W", GOOD[1] + " W")


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (GOOD[0], SPLIT[1], "stage 0 runs nothing where the schedule has W"),
        (SPLIT[0] + " W", SPLIT[1], "stage 0 runs W where the schedule has nothing"),
        (SPLIT[0].replace("B0 W", "W B0"), SPLIT[1], "stage 0 runs W where the schedule has B0"),
        ("<W " + SPLIT[0], SPLIT[1], "stage 0 has no neighbour for receive W"),
        (SPLIT[0], SPLIT[1] + " W>", "stage 1 has no neighbour for send W"),
    ],
)
def test_weight_gradients_have_their_place_and_no_messages(first: str, second: str, message: str) -> None:
    prove(program(*SPLIT, schedule=wavefront(2, 2)))
    prove(program(SPLIT[0], SPLIT[1].replace("B0> W", "W B0>"), schedule=wavefront(2, 2)))  # late for stage 0, but it does not hang
    with pytest.raises(PlanError, match=message):
        prove(program(first, second, schedule=wavefront(2, 2)))


def test_weight_gradients_before_the_last_backward_are_refused() -> None:
    schedule = swapped(serial(2), 0, 3)
    with pytest.raises(PlanError, match="stage 0 runs W before B0, which it needs"):
        prove(program("F0 F1 B1 W B0", schedule=schedule))


@settings(max_examples=150)
@given(**CASES)
def test_what_others_wait_for_is_sent_before_weight_gradients(
    name: str, stages: int, counts: list[int], backward: bool, ahead: int
) -> None:
    made = with_messages(GENERATORS[name](stages, counts, backward), ahead)
    for steps in (*made.stages, *made.in_order.stages):
        for number, each in enumerate(steps):
            if each.kind == "run" and each.task.phase == "W":
                ran = {step.task for step in steps[:number] if step.kind == "run" and outgoing(step.task, made.schedule) is not None}
                assert ran <= {step.task for step in steps[:number] if step.kind == "send"}


def test_a_program_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked up in every pass."""
    hashed: list[object] = []
    monkeypatch.setattr(Schedule, "__hash__", lambda schedule: hashed.append(schedule) or 7)
    first, second = with_messages(wavefront(2, 3)), with_messages(wavefront(2, 3))
    known = {first: "rooms"}
    assert [known[first], known[first], known[second]] == ["rooms"] * 3
    assert len(hashed) == 2  # of two that are equal
    assert with_messages(wavefront(2, 4)) not in known


def test_neighbours_connect_and_with_a_shared_head_the_last_stage_and_every_other() -> None:
    assert pairs_of(channels_of(4, share_head=False)) == [(0, 1), (1, 2), (2, 3)]
    assert pairs_of(channels_of(4, share_head=True)) == [(0, 1), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert pairs_of(channels_of(2, share_head=True)) == [(0, 1)]


def test_sends_that_wait_for_each_other_are_refused() -> None:
    # One-forward-one-backward, each receive posted only just before the run that needs it.
    with pytest.raises(PlanError, match="deadlocks: stage 0 waits to send F0b, stage 1 waits to send B0a; post the receives"):
        prove(program("F0a F0a> F0b F0b> <B0a B0a <B0b B0b", "<F0a F0a B0a B0a> <F0b F0b B0b B0b>", schedule=wavefront(2, 1, 2)))


def test_a_step_of_another_stage_is_refused() -> None:
    made = with_messages(wavefront(2, 1))
    with pytest.raises(PlanError, match="stage 0 cannot receive F0 of stage 1"):
        prove(Program(made.schedule, (made.stages[1], made.stages[0])))
    with pytest.raises(PlanError, match="1 stages cannot run a schedule of 2"):
        prove(Program(made.schedule, made.stages[:1]))


def swapped(schedule: Schedule, stage: int, at: int) -> Schedule:
    row = list(schedule.stages[stage])
    row[at], row[at + 1] = row[at + 1], row[at]
    return Schedule((*schedule.stages[:stage], tuple(row), *schedule.stages[stage + 1 :]), schedule.chunks)


def test_a_broken_dependency_is_refused() -> None:
    schedule = swapped(serial(1), 0, 0)
    with pytest.raises(PlanError, match="stage 0 runs B0 before F0, which it needs"):
        prove(program("B0 F0", schedule=schedule))
    with pytest.raises(PlanError, match="deadlocks: B0 on stage 0 waits"):
        with_messages(schedule)
    schedule = swapped(wavefront(2, 2, defer_weights=False), 1, 2)
    with pytest.raises(PlanError, match="stage 1 runs B0 before B1, which it needs"):
        prove(program(GOOD[0], "<F0 F0 <F1 F1 B0 B0> B1 B1>", schedule=schedule))


def test_a_schedule_without_a_task_is_refused() -> None:
    schedule = wavefront(2, 2, defer_weights=False)
    lacking = Schedule((schedule.stages[0], schedule.stages[1][:-1]), schedule.chunks)
    with pytest.raises(PlanError, match="B0 is missing from stage 1"):
        with_messages(lacking)
    with pytest.raises(PlanError, match="B0 is missing from stage 1"):
        prove(program(GOOD[0], "<F0 F0 <F1 F1 B1 B1>", schedule=lacking))


def test_receives_cannot_be_late() -> None:
    with pytest.raises(PlanError, match="use ahead >= 0"):
        with_messages(serial(1), ahead=-1)
