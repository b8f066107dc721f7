from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from _schedules import peak

from carrywave.errors import PlanError
from carrywave.plan.cost.memory import loads, most_held, one_micro_batch
from carrywave.plan.cost.profile import Link
from carrywave.plan.cost.simulation import TaskTimes, simulate
from carrywave.plan.schedule.messages import Program, ProgramStep, with_messages
from carrywave.plan.schedule.schedule import Schedule, StageTask, bubble, durations, gpipe, sequential, serial, start_times, wavefront

UNIT = TaskTimes(run=lambda task: 1.0)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    stages = draw(st.integers(1, 4))
    chunks = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    return draw(
        st.sampled_from(
            [
                wavefront(stages, chunks),
                wavefront(stages, chunks, share_head=True),
                wavefront(stages, chunks, defer_weights=False),
                wavefront(stages, chunks, backward=False),
                gpipe(stages, len(chunks)),
                sequential(stages, chunks),
                serial(chunks),
            ]
        )
    )


@given(schedules(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sampled_from([0.25, 0.5, 0.75]))
def test_without_links_it_agrees_with_the_picture(schedule: Schedule, forward: int, backward: int, head: int, weights: float) -> None:
    times = {"forward": forward, "backward": backward, "head": head, "weights": weights}
    seconds = durations(schedule, **times)
    found = simulate(with_messages(schedule), TaskTimes(run=seconds))
    moments = start_times(schedule, **times)
    assert {span.task: span.start for row in found.rows for span in row} == moments
    assert found.seconds == max(moment + seconds(task) for task, moment in moments.items())
    assert found.bubble == pytest.approx(bubble(schedule, **times))


def test_messages_take_their_time_one_after_the_other() -> None:
    # A message of 4 bytes takes 2 seconds on the line and arrives one later; the second waits until the first is off the line.
    times = TaskTimes(run=lambda task: 1.0, num_bytes=lambda task: 4, link=lambda line: Link(1.0, 2.0))
    found = simulate(with_messages(wavefront(2, 2, defer_weights=False)), times)
    starts = {(span.label, span.task.stage, span.task.chunk): span.start for row in found.rows for span in row if span.task}
    assert starts == {
        ("F", 0, 0): 0,
        ("F", 0, 1): 1,
        ("F", 1, 0): 4,  # 1 + 2 + 1
        ("F", 1, 1): 6,  # sent at 2, on the line from 3
        ("B", 1, 1): 7,
        ("B", 1, 0): 8,
        ("B", 0, 1): 11,
        ("B", 0, 0): 13,
    }
    assert found.sent_bytes == (8, 8)
    assert found.ends == (14, 9)


def test_weight_gradients_come_after_what_is_sent_and_each_message_costs_time() -> None:
    times = TaskTimes(run=lambda task: 5.0 if task.phase == "W" else 1.0, message_seconds=0.25)
    found = simulate(with_messages(wavefront(2, 2)), times)
    assert [(span.label, span.start, span.end) for span in found.rows[1]][2:] == [("B", 4.0, 5.0), ("B", 5.25, 6.25), ("W", 6.5, 11.5)]
    assert [(span.label, span.start, span.end) for span in found.rows[0]][2:] == [("B", 5.25, 6.25), ("B", 6.5, 7.5), ("W", 7.5, 12.5)]
    assert found.busy == (9.0, 9.0)


def test_a_sender_that_copies_its_messages_itself_is_busy_meanwhile_and_waits_for_no_receive() -> None:
    link = Link(0.125, 8.0)
    carried, copied = (
        simulate(
            with_messages(wavefront(2, 2), ahead=0), TaskTimes(lambda task: 1.0, lambda task: 4, lambda line: link, 0.25, copied=copied)
        )
        for copied in (False, True)
    )
    assert [span.start for span in carried.rows[0]][:2] == [0.0, 1.25]
    assert [span.start for span in copied.rows[0]][:2] == [0.0, 1.75]  # a send takes 0.25 and its copy 0.5
    assert copied.rows[1][0].start == 1.75 + 0.125
    assert copied.sent_bytes == carried.sent_bytes == (8, 8)


def test_what_follows_the_tasks_is_put_behind_them() -> None:
    found = simulate(with_messages(wavefront(2, 1)), UNIT).then("reduce", [(4.0, 6.0), (3.0, 3.0)]).then("update", [(6.0, 7.0), (6.0, 8.0)])
    assert [span.label for span in found.rows[0]] == ["F", "B", "reduce", "update"]
    assert [span.label for span in found.rows[1]] == ["F", "B", "update"]
    assert found.seconds == 8
    assert found.busy == (3.0, 4.0)


def test_a_program_that_cannot_go_on_is_refused_by_what_it_waits_for() -> None:
    whole = with_messages(wavefront(2, 1))
    deaf = tuple(step for step in whole.stages[1] if step.kind != "receive")
    with pytest.raises(PlanError, match="stage 0 waits for the message of B0, stage 1 waits for the message of F0"):
        simulate(Program(whole.schedule, (whole.stages[0], deaf)), UNIT)
    mute = tuple(step for step in whole.stages[1] if step.kind != "send")
    with pytest.raises(PlanError, match="deadlocks: stage 0 waits for the message of B0; send"):
        simulate(Program(whole.schedule, (whole.stages[0], mute)), UNIT)
    alone = with_messages(wavefront(1, 1))
    with pytest.raises(PlanError, match="stage 0 has no neighbour for send F0"):
        simulate(Program(alone.schedule, ((*alone.stages[0], ProgramStep("send", StageTask("F", 0, 0))),)), UNIT)


@given(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_what_stages_hold_is_what_the_schedule_says(stages: int, chunks: list[int], put_off: bool, share_head: bool) -> None:
    schedule = wavefront(stages, chunks, share_head=share_head, defer_weights=put_off)
    found = loads(schedule)
    assert tuple(load.held for load in found) == peak(schedule)
    for stage, load in enumerate(found):
        for weight in (0.0, 0.3, 0.5, 1.0, 2.0, 5.0):
            # Task by task.
            held, pending, worst = 0, dict.fromkeys(range(len(chunks)), 0), 0.0
            for task in schedule.stages[stage]:
                held += task.phase == "F"
                worst = max(worst, held + weight * sum(pending.values()))
                if task.phase == "B":
                    held -= 1
                    pending[task.micro_batch] += put_off and chunks[task.micro_batch] > 1
                if task.phase == "W":
                    pending[task.micro_batch] = 0
            assert not any(pending.values())
            assert max(held + weight * deferred for held, deferred in load.pairs) == pytest.approx(worst)
    if len(chunks) == 1:
        assert all(set(load.pairs) == set(one_micro_batch(chunks[0], defer_weights=put_off).pairs) for load in found)
    elif len(set(chunks)) == 1:
        for stage, load in enumerate(found):
            [(held, deferred)] = most_held(chunks[0], len(chunks), stages - 1 - stage, defer_weights=put_off).pairs
            assert all(pair[0] <= held and pair[1] <= deferred for pair in load.pairs)
