"""Chunks of a recorded window are timed by graphs that stop at different points of a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from carrywave.measure import recorded
from carrywave.measure.recorded import chunks_of, enough_chunks, recorded_task, time_chunk, time_recorded
from carrywave.measure.rig import Part, Rig
from carrywave.plan.cost.sample_requests import Ask
from carrywave.step.passes.task_clock import TaskClock

CPU = torch.device("cpu")
FORWARD, BACKWARD, WEIGHTS = 3e-3, 5e-3, 7e-3  # of a task, as the fake graphs below take them


@pytest.mark.parametrize(("part", "labels"), [("begun", "FFFFB"), ("returned", "FFFFBBBB"), ("all", "FFFFBBBBW")])
def test_a_step_can_stop_after_a_part(part: Part, labels: str) -> None:
    clock = TaskClock(CPU)
    rig = Rig(Ask("lstm", 6, 8, 3, 8), CPU)
    rig.run(4, clock, part)
    assert "".join(lap.label for lap in clock.laps if lap.label in "FBW") == labels
    weights = [parameter.grad for name, parameter in rig.stage.lstm.named_parameters() if "weight" in name]
    assert all((grad is not None) == (part == "all") for grad in weights)


@pytest.mark.parametrize("kind", ["lstm", "embedding", "softmax", "linear"])
def test_every_kind_of_unit_can_stop_there(kind: str) -> None:
    rig = Rig(Ask(kind, 8, 8, 3, 8), CPU)  # type: ignore[arg-type]
    for part in ("begun", "returned", "all"):
        rig.run(2, None, part)  # type: ignore[arg-type]


def test_tasks_follow_from_the_parts_of_a_step() -> None:
    parts: dict[Part, float] = {"begun": 4 * 3.0 + 5.0, "returned": 4 * (3.0 + 5.0), "all": 4 * (3.0 + 5.0) + 7.0}
    assert chunks_of(4, lambda part: parts[part]) == pytest.approx((3.0, 5.0, 7.0))
    assert chunks_of(4, lambda part: 1.0) == (0.25, 0.0, 0.0)  # noise gives no negative times


def test_windows_of_large_chunks_are_timed_in_part() -> None:
    assert enough_chunks(Ask("lstm", 256, 256, 64, 8, chunks=16)) == 16
    assert enough_chunks(Ask("lstm", 3584, 3584, 64, 8, chunks=16)) == 6
    assert enough_chunks(Ask("lstm", 8192, 8192, 64, 32, chunks=4)) == 4
    assert enough_chunks(Ask("lstm", 8192, 8192, 64, 64, chunks=2)) == 2


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Graphs that take the time of the tasks in them; how often workers met before one was timed."""
    met: list[int] = []

    def seconds(work: Callable[[], object], together: Callable[[], None] = lambda: None, times: int | None = None) -> float:
        clock = TaskClock(CPU)
        before = Rig.run

        def run(rig: Rig, chunks: int, given: TaskClock | None, part: Part = "all") -> None:
            before(rig, chunks, clock, part)

        monkeypatch.setattr(Rig, "run", run)
        work()
        monkeypatch.setattr(Rig, "run", before)
        together()
        found = {label: sum(lap.label == label for lap in clock.laps) for label in "FBW"}
        return FORWARD * found["F"] + BACKWARD * found["B"] + WEIGHTS * found["W"]

    monkeypatch.setattr(recorded, "replay_seconds", seconds)
    return met


def test_a_chunk_has_its_part_of_the_windows_weight_gradients(replayed: list[int]) -> None:
    sample = time_chunk(Ask("lstm", 6, 8, 3, 4, chunks=4), CPU, 1e-3, lambda: replayed.append(1))
    assert (sample.piped, sample.steps, sample.lanes) == ("recorded", 4, 3)
    assert sample.forward_seconds == pytest.approx(FORWARD - 1e-3)  # less what any task takes
    assert sample.deferred_seconds == pytest.approx(WEIGHTS / 4)
    assert sample.backward_seconds == pytest.approx(BACKWARD - 1e-3 + WEIGHTS / 4)
    assert len(replayed) == 3  # all workers time each graph at the same moment


def test_a_task_without_a_unit_is_timed_as_a_chunk(replayed: list[int]) -> None:
    assert recorded_task(CPU, "fp32") == pytest.approx((FORWARD + BACKWARD) / 2)


def test_a_window_of_one_chunk_puts_nothing_off(replayed: list[int]) -> None:
    sample = time_recorded(Ask("lstm", 6, 8, 3, 4), CPU, 0.0)
    assert (sample.piped, sample.deferred_seconds) == ("", 0.0)
