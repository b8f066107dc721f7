"""Messages one after the other, as on a device: programs in order are proved, those that post ahead are not; and where pairs of stages
have queues of their own, no task waits for a message that is not its own."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import _serial_proof
from _message_proof import prove, spell
from _schedules import GENERATORS
from _serial_proof import IssueQueue, MessageEnd, issue_queues, prove_in_order

from carrywave.errors import PlanError
from carrywave.plan.schedule.messages import Program, ProgramStep, with_messages
from carrywave.plan.schedule.schedule import Schedule, StageTask, durations, start_times, wavefront

CASES = {
    "name": st.sampled_from(sorted(GENERATORS)),
    "stages": st.integers(1, 6),
    "counts": st.one_of(
        st.lists(st.integers(1, 6), min_size=1, max_size=5),
        st.tuples(st.integers(1, 6), st.integers(1, 5)).map(lambda shape: [shape[0]] * shape[1]),
    ),
    "backward": st.booleans(),
}


@settings(max_examples=300)
@given(**CASES)
def test_every_generated_schedule_is_proved_in_order(name: str, stages: int, counts: list[int], backward: bool) -> None:
    schedule = GENERATORS[name](stages, counts, backward)
    made = with_messages(schedule).in_order
    prove_in_order(made)
    prove(made)  # under the host's rules too
    for steps, tasks in zip(made.stages, schedule.stages, strict=True):
        assert tuple(step.task for step in steps if step.kind == "run") == tasks
    # Nothing is left out: the same steps as with receives posted ahead.
    assert [sorted(steps) for steps in made.stages] == [sorted(steps) for steps in with_messages(schedule).stages]


def test_one_stage_after_the_other() -> None:
    assert spell(with_messages(wavefront(2, 2)).in_order).splitlines() == [
        "F0 F0> F1 F1> <B1 B1 <B0 B0 W",
        "<F0 <F1 F0 F1 B1 B1> B0 B0> W",
    ]


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("schedule", [wavefront(2, 3), wavefront(3, 4, 2), wavefront(3, 4, share_head=True)])
def test_receives_posted_ahead_would_hold_up_the_sends_behind_them(schedule: Schedule, ahead: int) -> None:
    made = with_messages(schedule, ahead)
    prove(made)  # with channels of their own, and a host that waits, they run
    with pytest.raises(PlanError, match=r"messages in order deadlock: stage 0 waits for messages with stage|is sent for"):
        prove_in_order(made)


@settings(max_examples=100)
@given(**CASES, data=st.data())
def test_a_program_that_lacks_a_message_is_refused(name: str, stages: int, counts: list[int], backward: bool, data: st.DataObject) -> None:
    made = with_messages(GENERATORS[name](stages, counts, backward)).in_order
    messages = [(stage, at) for stage, steps in enumerate(made.stages) for at, step in enumerate(steps) if step.kind != "run"]
    if not messages:
        return
    stage, at = data.draw(st.sampled_from(messages))
    with pytest.raises(PlanError, match=r"is sent for|messages to stage|deadlock"):
        prove_in_order(with_stage(made, stage, [*made.stages[stage][:at], *made.stages[stage][at + 1 :]]))


def test_a_receive_after_its_task_is_refused() -> None:
    made = with_messages(wavefront(2, 2)).in_order
    steps = list(made.stages[1])
    at = next(at for at, step in enumerate(steps) if step.kind == "run")
    steps.insert(at - 1, steps.pop(at))  # F0 before the receive that F1 needs: fine
    prove_in_order(with_stage(made, 1, steps))
    steps.insert(0, steps.pop(1))  # F0 before its own receive
    with pytest.raises(PlanError, match=r"deadlock: .*stage 1 waits to run F0"):
        prove_in_order(with_stage(made, 1, steps))


@settings(max_examples=300)
@given(**CASES)
def test_with_a_queue_for_each_pair_tasks_start_as_in_the_picture(name: str, stages: int, counts: list[int], backward: bool) -> None:
    schedule = GENERATORS[name](stages, counts, backward)
    assert starts(schedule) == start_times(schedule)


def test_batches_of_several_receives_would_hold_up_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage would start one chunk late, because the receive of the next chunk is posted beside the first."""
    schedule = wavefront(4, 8, defer_weights=False)
    assert max(starts(schedule).values()) == 31
    monkeypatch.setattr(_serial_proof, "joins", lambda before, after: before.peer == after.peer)
    assert max(starts(schedule).values()) == 34


def test_batches_over_several_pairs_would_hold_up_their_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with one communicator for all stages: what comes for a later task from one stage holds up what comes now from another."""
    schedule = wavefront(4, 8, share_head=True, defer_weights=False)
    assert max(starts(schedule).values()) == 33
    monkeypatch.setattr(_serial_proof, "joins", lambda before, after: True)
    assert max(starts(schedule, apart=False).values()) == 38


def test_what_goes_into_one_batch() -> None:
    send, receive = MessageEnd(1, receives=False), MessageEnd(1, receives=True)
    assert _serial_proof.joins(send, send)
    assert _serial_proof.joins(send, receive)
    assert not _serial_proof.joins(receive, receive)
    assert not _serial_proof.joins(receive, send)
    assert not _serial_proof.joins(send, receive._replace(peer=2))


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


def starts(schedule: Schedule, *, apart: bool = True) -> dict[StageTask, float]:
    """When each task starts on a device with a queue for tasks and one for each pair of stages, if messages themselves take no time.

    A batch starts when the tasks issued before it and the earlier batches of its pair have ended, and ends when both ends of all its
    messages have started; a task starts when the one before it and the batch that brings its message have ended. Not `apart`: all pairs
    share one queue.
    """
    seconds = durations(schedule)
    queues = issue_queues(with_messages(schedule).in_order)
    began: list[list[float | None]] = [[None] * len(queue.items) for queue in queues]
    ended: list[list[float | None]] = [[None] * len(queue.items) for queue in queues]
    batches = {
        (message, stage): at
        for stage, queue in enumerate(queues)
        for at, item in enumerate(queue.items)
        if not isinstance(item, StageTask)
        for message in item.messages
    }
    moved = True
    while moved:
        moved = False
        for stage, queue in enumerate(queues):
            for at, item in enumerate(queue.items):
                if ended[stage][at] is not None:
                    continue
                before = [ended[stage][each] for each in waited_for(queue, at, apart=apart)]
                if None in before:
                    continue
                moved = moved or began[stage][at] is None
                began[stage][at] = max((each for each in before if each is not None), default=0)
                if isinstance(item, StageTask):
                    ended[stage][at] = began[stage][at] + seconds(item)
                else:
                    ends = [began[end][batches[message, end]] for message in item.messages for end in message[:2]]
                    ended[stage][at] = None if None in ends else max(each for each in ends if each is not None)
                moved = moved or ended[stage][at] is not None
    return {
        item: began[stage][at] for stage, queue in enumerate(queues) for at, item in enumerate(queue.items) if isinstance(item, StageTask)
    }


def waited_for(queue: IssueQueue, at: int, *, apart: bool) -> list[int]:
    """The items of a stage that must have ended before this one starts."""
    item = queue.items[at]
    tasks, batches = [], []
    for number, each in enumerate(queue.items[:at]):
        if isinstance(each, StageTask):
            tasks.append(number)
        elif not isinstance(item, StageTask) and (not apart or each.last.peer == item.last.peer):
            batches.append(number)
    needed = [queue.waits[item]] if isinstance(item, StageTask) and item in queue.waits else []
    return tasks[-1:] + batches[-1:] + needed
