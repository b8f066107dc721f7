"""What follows when workers die, decided without any."""

from __future__ import annotations

import pytest

from carrywave.launch.exit_reports import Ended
from carrywave.launch.restart_policy import Place, RestartPolicy

KILLED = Ended(1, "worker 1 of 2 was killed", rank=1, died=True)
RAISED = Ended(1, "worker 1: ValueError: oops", "ValueError", "Traceback …", rank=1)
OTHER = Ended(1, "worker 0: KeyError: 'x'", "KeyError", "Traceback …", rank=0)


def policy(restarts: int = 2, least: int | None = None) -> RestartPolicy:
    return RestartPolicy([Place(0, 0), Place(0, 1)], restarts, least)


def test_restarts_are_counted_until_a_newer_snapshot() -> None:
    ours = policy()
    assert ours.after(KILLED, 5, None) == "worker 1 of 2 was killed; restarting from the beginning (restart 1 of 2)"
    assert ours.after(KILLED, 5, 10) == "worker 1 of 2 was killed; restarting from step 10 (restart 1 of 2)"
    assert ours.after(KILLED, 5, 10) == "worker 1 of 2 was killed; restarting from step 10 (restart 2 of 2)"
    assert ours.after(KILLED, 5, 10) is None
    assert ours.given_up == "; gave up after 2 restarts without progress"


def test_none_where_none_are_wanted() -> None:
    ours = policy(restarts=0)
    assert ours.after(KILLED, 5, 10) is None
    assert ours.given_up == ""


@pytest.mark.parametrize("steps", [0, 3])  # whether its steps were heard of before it died is a matter of timing
def test_an_error_that_comes_again_at_the_same_point(steps: int) -> None:
    ours = policy()
    assert ours.after(RAISED, 8, 4) is not None
    assert ours.after(RAISED, steps, 4) is None
    assert ours.given_up == "; it failed again at the same point"


def test_an_error_before_the_first_step_is_not_tried_again() -> None:
    ours = policy()
    assert ours.after(RAISED, 0, None) is None
    assert ours.given_up == ""


def test_another_error_is_another_try() -> None:
    ours = policy()
    assert ours.after(RAISED, 8, 4) is not None
    assert ours.after(OTHER, 3, 4) == "worker 0: KeyError: 'x'; restarting from step 4 (restart 2 of 2)"


def test_a_device_whose_worker_dies_twice_at_its_start_is_left_out() -> None:
    ours = policy(least=1)
    assert ours.after(KILLED, 0, None) is not None
    assert not ours.fewer
    assert ours.after(KILLED, 0, None) == "worker 1 of 2 was killed; continuing with 1 of 2 workers from the beginning"
    assert ours.fewer
    assert ours.places == [Place(0, 0)]
    ours.take_back([Place(0, 1)])
    assert ours.places == [Place(0, 0), Place(0, 1)]
    assert not ours.fewer
