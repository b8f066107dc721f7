"""Schedules are pictures."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from _schedules import COUNTS, peak

from carrywave.errors import PlanError
from carrywave.plan.schedule.schedule import (
    Schedule,
    StageTask,
    bubble,
    durations,
    gpipe,
    needs,
    reader,
    serial,
    show,
    source,
    start_times,
    wavefront,
)


def end(schedule: Schedule, **times: float) -> float:
    moments, seconds = start_times(schedule, **times), durations(schedule, **times)
    return max(moment + seconds(task) for task, moment in moments.items())


def head_on_the_last(schedule: Schedule) -> Schedule:
    """The same with the head as a task of the last stage, each right before the backward that needs it."""
    *rows, row = schedule.stages
    with_heads = [each for task in row for each in ((task._replace(phase="H"), task) if task.phase == "B" else (task,))]
    return Schedule((*rows, tuple(with_heads)), schedule.chunks)


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        (serial(), ["F0 B0"]),
        (serial(chunks=3), ["F0 F1 F2 B2 B1 B0 W"]),
        (serial([2, 1]), ["F0a F1a B1a B0a Wa  F0b B0b"]),
        (serial(chunks=3, backward=False), ["F0 F1 F2"]),
        (wavefront(2, [2, 1], backward=False), ["F0a F1a F0b .", ".   F0a F1a F0b"]),
        (gpipe(2, 2, backward=False), ["F0a F0b .", ".   F0a F0b"]),
        (gpipe(2, 1), ["F0 .  .  B0", ".  F0 B0 ."]),  # one stage at a time
        (gpipe(2, 3), ["F0a F0b F0c .   .   B0c B0b B0a", ".   F0a F0b F0c B0c B0b B0a ."]),
        (wavefront(2, 4), ["F0 F1 F2 F3 .  .  B3 B2 B1 B0 W", ".  F0 F1 F2 F3 B3 B2 B1 B0 W  ."]),
        (
            wavefront(3, 2),
            ["F0 F1 .  .  .  .  B1 B0 W", ".  F0 F1 .  .  B1 B0 W  .", ".  .  F0 F1 B1 B0 W  .  ."],
        ),
        # Several micro-batches fill the wait; of one chunk each they are one forward, one backward.
        (
            wavefront(2, 4, micro_batches=2),
            [
                "F0a F1a F2a F3a F0b F1b F2b B3a B2a B1a B0a F3b Wa  .   B3b B2b B1b B0b Wb",
                ".   F0a F1a F2a F3a B3a B2a B1a B0a F0b F1b F2b F3b B3b B2b B1b B0b Wa  Wb",
            ],
        ),
        (wavefront(2, 1, micro_batches=3), ["F0a F0b .   B0a F0c B0b .   B0c", ".   F0a B0a F0b B0b F0c B0c ."]),
        (wavefront(2, [1, 3]), ["F0a F0b F1b F2b B0a .   .   B2b B1b B0b Wb", ".   F0a B0a F0b F1b F2b B2b B1b B0b Wb  ."]),
        (
            wavefront(2, 4, share_head=True),
            ["F0 F1 F2 F3 H2 H1 H0 B3 B2 B1 B0 W", ".  F0 F1 F2 F3 H3 B3 B2 B1 B0 W  ."],
        ),
        (
            wavefront(3, 2, 2, share_head=True),
            [
                "F0a F1a F0b F1b H0a .   .   B1a B0a Wa  .   .   B1b B0b Wb",
                ".   F0a F1a F0b F1b .   B1a B0a H0b Wa  .   B1b B0b Wb  .",
                ".   .   F0a F1a H1a B1a B0a F0b F1b H1b B1b B0b Wa  Wb  .",
            ],
        ),
    ],
)
def test_pictures(schedule: Schedule, rows: list[str]) -> None:
    assert show(schedule).splitlines() == rows


HEADS = st.sampled_from([0.5, 1.0, 1.5, 2.0, 4.0, 6.0])


@given(st.integers(2, 6), COUNTS, HEADS, st.booleans())
def test_a_shared_head_ends_no_later_than_one_on_the_last_stage(stages: int, counts: list[int], head: float, weights: bool) -> None:
    shared = wavefront(stages, counts, share_head=True, head=head, defer_weights=weights)
    assert end(shared, head=head) <= end(head_on_the_last(wavefront(stages, counts, defer_weights=weights)), head=head)


@given(st.integers(2, 8), st.integers(4, 32), HEADS, st.booleans())
def test_a_shared_head_ends_near_the_soonest_possible(stages: int, chunks: int, head: float, weights: bool) -> None:
    """Also where a head takes another time than the schedule was made for."""
    # Either there and back with the last chunk, and its head; or all work shared evenly, and no stage idle but before and after it.
    there = (2.5 if weights else 3) * (stages - 1)
    soonest = 3 * chunks + max(there + head, chunks * head / stages + there / 2)
    assert end(wavefront(stages, chunks, share_head=True, head=head, defer_weights=weights), head=head) <= 1.1 * soonest
    assert end(wavefront(stages, chunks, share_head=True, defer_weights=weights), head=head) <= 1.2 * soonest


@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 6))
def test_no_order_is_faster_than_the_wavefront(stages: int, chunks: int, micro_batches: int) -> None:
    # The first stage has all its work to do; its first forward goes to the last stage, and its last backward comes from there.
    assert end(wavefront(stages, chunks, micro_batches, defer_weights=False)) == 3 * chunks * micro_batches + 3 * (stages - 1)
    # Without weight gradients the way back is shorter.
    assert end(wavefront(stages, chunks)) == 3 * chunks + (2.5 if chunks > 1 else 3) * (stages - 1)


@given(st.integers(1, 6), COUNTS, st.booleans())
def test_at_most_two_micro_batches_wait_for_their_weight_gradients(stages: int, counts: list[int], share_head: bool) -> None:
    for row in wavefront(stages, counts, share_head=share_head).stages:
        waiting = 0
        for task in row:
            assert waiting < min(2, stages) or task.phase == "W"
            waiting += (task.phase == "B" and task.chunk == 0 and counts[task.micro_batch] > 1) - (task.phase == "W")


def test_peaks() -> None:
    assert peak(serial(4, 3)) == (4,)
    assert peak(gpipe(3, 5)) == (5, 5, 5)
    assert peak(wavefront(3, 4, 8)) == (10, 7, 4)
    assert peak(wavefront(4, 1, 8)) == (4, 3, 2, 1)  # as one-forward-one-backward holds
    assert peak(wavefront(3, 4, 8, backward=False)) == (1, 1, 1)


def test_bubbles() -> None:
    assert bubble(serial(3)) == 0
    assert bubble(gpipe(2, 3)) == pytest.approx(1 / 4)  # (stages - 1) / (micro-batches + stages - 1)
    assert bubble(wavefront(2, 3, defer_weights=False)) == pytest.approx(1 / 4)
    assert bubble(wavefront(2, 3)) == pytest.approx(2.5 / 11.5)
    assert bubble(wavefront(2, 3), weights=1) == pytest.approx(2 / 11)
    assert bubble(wavefront(2, 3, backward=False), forward=5) == pytest.approx(1 / 4)
    assert bubble(wavefront(2, 1, 2), forward=1, backward=1) == pytest.approx(1 / 3)
    # Of 18 moments each stage waits one at its end and one at its beginning, and the first two more.
    assert bubble(wavefront(2, 4, share_head=True, defer_weights=False)) == pytest.approx(1 / 9)
    assert bubble(head_on_the_last(wavefront(2, 4))) > 1 / 4


def test_what_a_task_needs() -> None:
    schedule = wavefront(2, [2, 3])
    assert needs(StageTask("F", 1, 1, 1), schedule) == [StageTask("F", 0, 1, 1), StageTask("F", 1, 0, 1)]
    assert needs(StageTask("B", 0, 1, 1), schedule) == [StageTask("B", 1, 1, 1), StageTask("F", 0, 1, 1), StageTask("B", 0, 2, 1)]
    assert needs(StageTask("B", 1, 1, 0), schedule) == [StageTask("F", 1, 1, 0)]
    shared = wavefront(2, 4, share_head=True)  # the last stage scores chunk 3 alone
    assert needs(StageTask("H", 0, 2), shared) == [StageTask("F", 1, 2)]
    assert needs(StageTask("H", 1, 3), shared) == [StageTask("F", 1, 3)]
    assert needs(StageTask("B", 1, 2), shared) == [StageTask("H", 0, 2), StageTask("F", 1, 2), StageTask("B", 1, 3)]
    assert needs(StageTask("B", 1, 3), shared) == [StageTask("F", 1, 3), StageTask("H", 1, 3)]
    assert needs(StageTask("W", 0, 0, 1), schedule) == [StageTask("B", 0, 0, 1)]
    assert source(StageTask("W", 0, 0), shared) is None
    assert reader(StageTask("W", 1, 0), shared) is None


def broken(*rows: Sequence[StageTask], chunks: int) -> Schedule:
    return Schedule(tuple(tuple(row) for row in rows), (chunks,))


F0, F1, B0, H0, W = (StageTask(phase, 0, chunk) for phase, chunk in (("F", 0), ("F", 1), ("B", 0), ("H", 0), ("W", 0)))
UP, BACK = StageTask("F", 1, 0), StageTask("B", 1, 0)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (broken([B0, F0], chunks=1), "deadlocks: B0 on stage 0 waits"),
        (broken([F1], chunks=2), "F0 is 0 times on stage 0, not 1"),
        (broken([F0, B0, B0], chunks=1), "B0 is 2 times on stage 0, not 1"),
        (broken([F0, StageTask("F", 1, 0)], [], chunks=1), "F0 is 1 times on stage 0, not 0"),
        (broken([F0, B0, H0], [UP, BACK], chunks=1), "deadlocks: B0 on stage 0, B0 on stage 1 wait"),
        (broken([F0, H0, B0], [UP, StageTask("H", 1, 0), BACK], chunks=1), "H0 is 2 times in the schedule, not 1"),
        (broken([F0, F1, H0, StageTask("B", 0, 1), B0], chunks=2), "H1 is 0 times in the schedule, not 1"),
        (broken([F0, H0, StageTask("H", 0, 1), B0], chunks=1), "H1 is 1 times in the schedule, not 0"),
        (broken([F0, W, B0], chunks=1), "deadlocks: W on stage 0 waits"),
        (broken([F0, B0, W], [UP, BACK], chunks=1), "W is 0 times on stage 1, not 1"),
        (
            # Stage 0 wants micro-batch a back first, stage 1 gives it b first but only once stage 0 has sent it.
            Schedule(
                (
                    (StageTask("F", 0, 0, 0), StageTask("B", 0, 0, 0), StageTask("F", 0, 0, 1), StageTask("B", 0, 0, 1)),
                    (StageTask("F", 1, 0, 0), StageTask("F", 1, 0, 1), StageTask("B", 1, 0, 1), StageTask("B", 1, 0, 0)),
                ),
                (1, 1),
            ),
            "deadlocks: B0a on stage 0, F0b on stage 1 wait",
        ),
    ],
)
def test_a_broken_schedule_is_refused_by_the_task(schedule: Schedule, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        start_times(schedule)


def test_impossible_numbers_are_refused() -> None:
    for wrong in (
        lambda: serial(chunks=0),
        lambda: serial(micro_batches=0),
        lambda: serial([]),
        lambda: wavefront(2, [3, 0]),
        lambda: gpipe(2, 0),
    ):
        with pytest.raises(PlanError, match="at least one chunk"):
            wrong()
    with pytest.raises(PlanError, match="at least one stage, got 0"):
        wavefront(0, 1)
    with pytest.raises(PlanError, match="2 numbers of chunks do not match 3 micro-batches"):
        wavefront(2, [1, 2], 3)


def test_the_pictures_in_the_documentation_are_those_printed() -> None:
    page = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
    [text] = [part for part in re.split(r"^## ", page, flags=re.MULTILINE) if part.startswith("Schedules\n")]
    pictures = re.findall(r"^`([a-z]+)\((.*)\)`.*\n\n((?:    .*\n)+)", text, re.MULTILINE)
    generators = {"serial": serial, "gpipe": gpipe, "wavefront": wavefront}
    assert {generator for generator, _, _ in pictures} == set(generators)
    assert text.count("\n\n    ") == len(pictures)  # none stands without its call
    for generator, arguments, drawn in pictures:
        numbers = {key: value == "True" or (value != "False" and int(value)) for key, value in re.findall(r"(\w+)=(\w+)", arguments)}
        assert show(generators[generator](**numbers)) == "\n".join(row[4:] for row in drawn.splitlines())
