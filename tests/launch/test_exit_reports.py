"""Of many ends, one: which cause is told, and with which exit code."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from carrywave.errors import DataError, PortError, ResourceError, UserError
from carrywave.launch import exit_reports
from carrywave.launch.exit_reports import Ended
from carrywave.parallel.liveness.failure_file import Cause, leave


def of(codes: list[int], *told: Cause, asked: int | None = None, killed: tuple[int, ...] = ()) -> Ended:
    left = {rank: code for rank, code in enumerate(codes) if rank not in killed}
    return exit_reports.ended(left, {cause.rank: cause for cause in told}, len(codes), asked)


def cause(rank: int, kind: Any, seconds: float = 1.0, **more: Any) -> Cause:
    code = {"user": 2, "fault": 1, "lost": 1, "silent": 1}[kind]
    return Cause(rank, kind, more.pop("code", code), more.pop("message", f"{kind} {rank}"), seconds=seconds, **more)


@pytest.mark.parametrize(("codes", "code"), [([0, 0], 0), ([75, 75], 75), ([130, 130], 130), ([75, 130], 130)])
def test_an_end_in_good_order_says_nothing(codes: list[int], code: int) -> None:
    assert of(codes) == Ended(code)


def test_the_first_cause_is_told_and_not_its_consequences() -> None:
    told = [cause(0, "lost", 1.0), cause(1, "fault", 3.0), cause(2, "user", 2.0, error="DataError")]
    assert of([1, 1, 2], *told) == Ended(2, "worker 2: user 2", "DataError")


def test_a_cause_of_all_names_no_worker() -> None:
    assert of([2, 2], cause(0, "user", message="no; do"), cause(1, "user", message="no; do")).message == "no; do"
    assert of([2, 2], cause(0, "user", message="rank 1: no", shared=True), cause(1, "lost")).message == "rank 1: no"
    assert of([1], cause(0, "fault")).message == "fault 0"


def test_a_killed_worker_is_named() -> None:
    end = of([1, -9, 1], cause(0, "lost"), cause(2, "fault"))
    assert end.code == 1
    assert end.message.startswith("worker 1 of 3 was killed (signal 9, SIGKILL); if memory ran out")


def test_an_abort_may_be_a_consequence() -> None:
    assert of([-signal.SIGABRT, 1], cause(1, "fault")).message == "worker 1: fault 1"
    assert "worker 0 of 2 was killed (signal 6, SIGABRT)" in of([-signal.SIGABRT, 1], cause(1, "lost")).message


def test_whom_we_ended_ourselves_is_no_cause() -> None:
    assert of([-15, 2], cause(1, "user"), killed=(0,)).message == "worker 1: user 1"


def test_a_worker_without_a_word_keeps_its_exit_code() -> None:
    assert of([0, 3]) == Ended(3, "worker 1 of 2 exited with code 3; see its output for the reason")


def test_lost_contact_alone() -> None:
    """What a worker says of it, and of two the one that knows whom."""
    end = of([1, 1], cause(0, "lost", 1.0), cause(1, "lost", 2.0, peer=2))
    assert (end.code, end.message, end.died, end.rank) == (1, "lost 1", True, 2)


def test_a_silent_worker_is_named_though_it_was_killed() -> None:
    end = of([1, -9, 1], cause(0, "silent", 2.0, peer=1), cause(2, "lost", 1.0))
    assert (end.message, end.died, end.rank) == ("silent 0", True, 1)


def test_a_signal_before_the_first_step_of_one_is_no_lost_contact() -> None:
    """The one that had begun only misses the one that the signal ended."""
    assert of([1, -15], cause(0, "lost"), asked=15) == Ended(143)


def test_a_signal_that_was_passed_on() -> None:
    assert of([-15, -15], asked=15) == Ended(143)
    assert of([130, 130], cause(0, "user", code=130, message="interrupted"), cause(1, "lost"), asked=2) == Ended(130, "interrupted")
    assert of([1, 1], asked=2) == of([1, 130], asked=2) == Ended(130, "interrupted")  # Python itself ends so while it starts
    assert of([1, 1], asked=15).code == 1


def test_a_cause_travels_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    error = DataError("no; do")
    error.reported_by = 0
    leave(tmp_path, "fault", 1, "no; do", error, with_trace=True)
    found = exit_reports.read(tmp_path)[3]
    assert (found.kind, found.code, found.message, found.error, found.shared) == ("fault", 1, "no; do", "DataError", True)
    assert found.trace.strip().endswith("DataError: no; do")
    assert [path.name for path in tmp_path.iterdir()] == ["3.json"]


def test_an_end_as_an_error() -> None:
    Ended(0).check()
    Ended(75).check()
    with pytest.raises(DataError, match=r"^no; do$"):
        Ended(2, "no; do", "DataError").check()
    with pytest.raises(UserError, match=r"^no; do$"):
        Ended(2, "no; do", "OutOfMemoryError").check()
    with pytest.raises(RuntimeError, match=r"(?s)worker 1: ValueError.*Traceback"):
        Ended(1, "worker 1: ValueError", trace="Traceback").check()
    with pytest.raises(RuntimeError, match=r"^the workers exited with code 143 and did not report why$"):
        Ended(143).check()
    with pytest.raises(KeyboardInterrupt):
        Ended(130).check()


def test_what_the_machine_lacks_has_a_code_of_its_own() -> None:
    lack = cause(1, "user", code=74, message="no room; free some", error="ResourceError")
    end = of([1, 74], cause(0, "lost"), lack)
    assert (end.code, end.message, end.died) == (74, "worker 1: no room; free some", False)
    with pytest.raises(ResourceError, match="no room; free some"):
        end.check()
    assert [exit_reports.code_of(kind("x")) for kind in (DataError, ResourceError, PortError)] == [2, 74, 74]
