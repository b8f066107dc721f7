"""What follows when workers die."""

from __future__ import annotations

import pytest

from carrywave.launch.exit_reports import Ended
from carrywave.launch.launcher import Patience, Restarts

KILLED = Ended(1, "worker 1 of 3 was killed (signal 9, SIGKILL); if memory ran out, …", rank=1, died=True)
FAULT = Ended(1, "worker 1: ValueError: oops", trace="Traceback", rank=1, died=True)


def test_restarts_are_counted_from_the_newest_snapshot_on() -> None:
    restarts = Restarts(3, Patience(2))
    said = [restarts.after(KILLED, step) for step in (None, 5, 5, 5)]
    assert said[0] == "worker 1 of 3 was killed (signal 9, SIGKILL); restarting from the beginning (restart 1 of 2)"
    assert [line and line.rpartition("; ")[2] for line in said[1:]] == [
        "restarting from step 5 (restart 1 of 2)",
        "restarting from step 5 (restart 2 of 2)",
        None,
    ]
    assert restarts.given_up == "; gave up after 2 restarts without progress"


@pytest.mark.parametrize(("steps", "ends"), [([None], [None]), ([5, 5], ["restarting from step 5 (restart 1 of 3)", None])])
def test_an_error_without_progress_is_final(steps: list[int | None], ends: list[str | None]) -> None:
    restarts = Restarts(2, Patience())
    assert [(line := restarts.after(FAULT, step)) and line.rpartition("; ")[2] for step in steps] == ends


def test_a_device_whose_worker_keeps_dying_is_left_out() -> None:
    restarts = Restarts(3, Patience(3, least=2))
    assert restarts.after(KILLED, None) is not None
    said = restarts.after(KILLED, None)
    assert said == "worker 1 of 3 was killed (signal 9, SIGKILL); continuing with 2 of 3 workers from the beginning"
    assert restarts.devices == [0, 2]
    assert [restarts.after(KILLED, None) is None for _ in range(4)] == [False, False, False, True]


def test_never() -> None:
    assert Restarts(2, Patience(0)).after(KILLED, 5) is None
