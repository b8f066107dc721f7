"""Schedules are pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.errors import PlanError
from carrywave.plan.schedule import Schedule, Task, bubble, gpipe, needs, peak, place, sequential, serial, show, wavefront

COUNTS = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def picture(*rows: str) -> str:
    return "\n".join(rows)


def end(schedule: Schedule, forward: float = 1, backward: float = 2) -> float:
    moments = place(schedule, forward=forward, backward=backward)
    return max(moment + (forward if task.phase == "F" else backward) for task, moment in moments.items())


def test_one_chunk_goes_forward_and_back() -> None:
    assert show(serial()) == "F0 B0"


def test_chunks_come_back_in_reverse() -> None:
    assert show(serial(chunks=3)) == "F0 F1 F2 B2 B1 B0"


def test_a_slice_ends_before_the_next_starts() -> None:
    assert show(serial(chunks=2, slices=2)) == "F0a F1a B1a B0a F0b F1b B1b B0b"


def test_slices_may_differ_in_chunks() -> None:
    assert show(serial([2, 1])) == "F0a F1a B1a B0a F0b B0b"
    assert serial([2, 1]).slices == 2


def test_evaluation_has_no_backward() -> None:
    assert show(serial(chunks=3, backward=False)) == "F0 F1 F2"
    assert show(wavefront(2, 3, backward=False)) == picture("F0 F1 F2 .", ".  F0 F1 F2")
    assert show(wavefront(2, [2, 1], backward=False)) == picture("F0a F1a F0b .", ".   F0a F1a F0b")
    assert show(gpipe(2, 2, backward=False)) == picture("F0a F0b .", ".   F0a F0b")
    assert show(sequential(2, 2, backward=False)) == picture("F0 F1 .  .", ".  .  F0 F1")


def test_wavefront_of_one_slice() -> None:
    assert show(wavefront(stages=2, chunks=4)) == picture(
        "F0 F1 F2 F3 .  .  B3 B2 B1 B0",
        ".  F0 F1 F2 F3 B3 B2 B1 B0 .",
    )
    assert show(wavefront(stages=3, chunks=2)) == picture(
        "F0 F1 .  .  .  .  B1 B0",
        ".  F0 F1 .  .  B1 B0 .",
        ".  .  F0 F1 B1 B0 .  .",
    )


def test_wavefront_of_slices_fills_the_wait_with_the_next_slice() -> None:
    assert show(wavefront(stages=2, chunks=4, slices=2)) == picture(
        "F0a F1a F2a F3a F0b F1b F2b B3a B2a B1a B0a F3b .   .   B3b B2b B1b B0b",
        ".   F0a F1a F2a F3a B3a B2a B1a B0a F0b F1b F2b F3b B3b B2b B1b B0b .",
    )


def test_wavefront_of_one_chunk_is_one_forward_one_backward() -> None:
    assert show(wavefront(stages=2, chunks=1, slices=3)) == picture(
        "F0a F0b .   B0a F0c B0b .   B0c",
        ".   F0a B0a F0b B0b F0c B0c .",
    )


def test_wavefront_of_unequal_slices() -> None:
    assert show(wavefront(2, [1, 3])) == picture(
        "F0a F0b F1b F2b B0a .   .   B2b B1b B0b",
        ".   F0a B0a F0b F1b F2b B2b B1b B0b .",
    )


def test_gpipe_comes_back_in_reverse() -> None:
    assert show(gpipe(stages=2, slices=3)) == picture(
        "F0a F0b F0c .   .   B0c B0b B0a",
        ".   F0a F0b F0c B0c B0b B0a .",
    )


def test_sequential_has_one_stage_at_work() -> None:
    assert show(sequential(stages=2, chunks=2, slices=2)) == picture(
        "F0a F1a .   .   .   .   B1a B0a F0b F1b .   .   .   .   B1b B0b",
        ".   .   F0a F1a B1a B0a .   .   .   .   F0b F1b B1b B0b .   .",
    )


@given(st.integers(1, 6), COUNTS)
def test_sequential_never_overlaps(stages: int, counts: list[int]) -> None:
    assert end(sequential(stages, counts)) == 3 * stages * sum(counts)


@given(COUNTS)
def test_a_wavefront_of_one_stage_is_serial(counts: list[int]) -> None:
    assert wavefront(1, counts) == serial(counts)
    assert wavefront(1, counts, backward=False) == serial(counts, backward=False)


@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 6))
def test_no_order_is_faster_than_the_wavefront(stages: int, chunks: int, slices: int) -> None:
    # The first stage has all its work to do; its first forward goes to the last stage, and its last backward comes from there.
    assert end(wavefront(stages, chunks, slices)) == 3 * chunks * slices + 3 * (stages - 1)


@given(st.integers(1, 6), COUNTS)
def test_a_stage_holds_one_slice_and_what_fills_its_wait(stages: int, counts: list[int]) -> None:
    held = peak(wavefront(stages, counts))
    assert held[-1] == max(counts)
    assert all(count <= max(counts) + 3 * (stages - 1 - stage) for stage, count in enumerate(held))


@given(st.integers(1, 5), COUNTS, st.booleans())
def test_slices_go_in_order_both_ways(stages: int, counts: list[int], backward: bool) -> None:
    for row in wavefront(stages, counts, backward=backward).stages:
        assert [(task.slice, task.chunk) for task in row if task.phase == "F"] == sorted(
            (s, c) for s, n in enumerate(counts) for c in range(n)
        )
        back = [(task.slice, -task.chunk) for task in row if task.phase == "B"]
        assert back == (sorted((s, -c) for s, n in enumerate(counts) for c in range(n)) if backward else [])


def test_peaks() -> None:
    assert peak(serial(4, 3)) == (4,)
    assert peak(gpipe(3, 5)) == (5, 5, 5)
    assert peak(sequential(2, 3, 2)) == (3, 3)
    assert peak(wavefront(3, 4, 8)) == (10, 7, 4)
    assert peak(wavefront(4, 1, 8)) == (4, 3, 2, 1)  # as one-forward-one-backward holds
    assert peak(wavefront(3, 4, 8, backward=False)) == (1, 1, 1)


def test_bubbles() -> None:
    assert bubble(serial(3)) == 0
    assert bubble(sequential(4, 2)) == pytest.approx(3 / 4)
    assert bubble(gpipe(2, 3)) == pytest.approx(1 / 4)  # (stages - 1) / (slices + stages - 1)
    assert bubble(wavefront(2, 3)) == pytest.approx(1 / 4)
    assert bubble(wavefront(2, 3, backward=False), forward=5) == pytest.approx(1 / 4)
    assert bubble(wavefront(2, 1, 2), forward=1, backward=1) == pytest.approx(1 / 3)


def test_moments_follow_the_costs() -> None:
    moments = place(wavefront(2, 1), forward=1.5, backward=4)
    assert [moments[task] for task in (Task("F", 1, 0), Task("B", 1, 0), Task("B", 0, 0))] == [1.5, 3, 7]


def test_what_a_task_needs() -> None:
    schedule = wavefront(2, [2, 3])
    assert needs(Task("F", 1, 1, 1), schedule) == [Task("F", 0, 1, 1), Task("F", 1, 0, 1)]
    assert needs(Task("B", 0, 1, 1), schedule) == [Task("B", 1, 1, 1), Task("F", 0, 1, 1), Task("B", 0, 2, 1)]
    assert needs(Task("B", 1, 1, 0), schedule) == [Task("F", 1, 1, 0)]
    assert needs(Task("B", 0, 1, 0), replace(schedule, in_turn=True))[0] == Task("B", 1, 0, 0)


def test_many_slices_stay_distinct() -> None:
    names = show(serial(1, 1000)).split()
    assert " ".join(names[2 * part] for part in (0, 25, 26, 27, 51, 52, 701, 702)) == "F0a F0z F0aa F0ab F0az F0ba F0zz F0aaa"
    assert len(set(names)) == 2000


def broken(*rows: Sequence[Task], chunks: int) -> Schedule:
    return Schedule(tuple(tuple(row) for row in rows), (chunks,))


F0, F1, B0 = Task("F", 0, 0), Task("F", 0, 1), Task("B", 0, 0)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (broken([B0, F0], chunks=1), "cannot go on: B0 on stage 0 waits"),
        (broken([F1, F0], chunks=2), "cannot go on: F1 on stage 0 waits"),
        (broken([F1], chunks=2), "F0 is missing from stage 0"),
        (broken([F0, F1, B0], chunks=2), "B1 is missing from stage 0"),
        (broken([F0, B0, B0], chunks=1), "B0 stands 2 times on stage 0"),
        (broken([F0, F1], chunks=1), "F1 of stage 0 does not belong on stage 0"),
        (broken([F0, Task("F", 1, 0)], [], chunks=1), "F0 of stage 1 does not belong on stage 0"),
        (broken([F0], [], chunks=1), "F0 is missing from stage 1"),
        (broken(chunks=1), "nothing to run"),
        (
            Schedule(((Task("F", 0, 0, 0), Task("F", 0, 0, 1)), (Task("F", 1, 0, 0),)), (1, 1)),
            "F0b is missing from stage 1",
        ),
        (
            # Stage 0 wants slice a back first, stage 1 gives it b first but only once stage 0 has sent it.
            Schedule(
                (
                    (Task("F", 0, 0, 0), Task("B", 0, 0, 0), Task("F", 0, 0, 1), Task("B", 0, 0, 1)),
                    (Task("F", 1, 0, 0), Task("F", 1, 0, 1), Task("B", 1, 0, 1), Task("B", 1, 0, 0)),
                ),
                (1, 1),
            ),
            "cannot go on: B0a on stage 0, F0b on stage 1 wait",
        ),
    ],
)
def test_a_broken_schedule_is_refused_by_the_task(schedule: Schedule, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        place(schedule)


def test_impossible_numbers_are_refused() -> None:
    for wrong in (
        lambda: serial(chunks=0),
        lambda: serial(slices=0),
        lambda: serial([]),
        lambda: wavefront(2, [3, 0]),
        lambda: gpipe(2, 0),
    ):
        with pytest.raises(PlanError, match="at least one chunk"):
            wrong()
    with pytest.raises(PlanError, match="at least one stage, got 0"):
        wavefront(0, 1)
    with pytest.raises(PlanError, match="2 numbers of chunks cannot describe 3 slices"):
        wavefront(2, [1, 2], 3)
    with pytest.raises(PlanError, match="one slice forward at a time"):
        sequential(2, 1, 2, backward=False)


def test_the_pictures_in_the_documentation_are_those_printed() -> None:
    text = (Path(__file__).parents[2] / "docs/schedules.md").read_text()
    pictures = re.findall(r"^`([a-z]+)\((.*)\)`.*\n\n((?:    .*\n)+)", text, re.MULTILINE)
    generators = {"serial": serial, "sequential": sequential, "gpipe": gpipe, "wavefront": wavefront}
    assert {generator for generator, _, _ in pictures} == set(generators)
    assert text.count("\n\n    ") == len(pictures)  # none stands without its call
    for generator, arguments, drawn in pictures:
        numbers = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", arguments)}
        assert show(generators[generator](**numbers)) == "\n".join(row[4:] for row in drawn.splitlines())
