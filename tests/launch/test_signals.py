"""Signals that ask for an end: one is noted, its echo is not a second one, and a second one leaves."""

from __future__ import annotations

import os
import signal

import pytest

from carrywave.launch import signals
from carrywave.launch.signals import Stop, let_go_of_terminal


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    return now


class Left(Exception):
    """What the handler does that was there before."""


@pytest.fixture
def _before() -> object:
    def leave(number: int, frame: object) -> None:
        raise Left(number)

    kept = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_before")
@pytest.mark.parametrize(("number", "reason"), [(signal.SIGTERM, "terminated"), (signal.SIGUSR1, "terminated")])
def test_an_echo_is_no_second_request(number: signal.Signals, reason: str, clock: list[float]) -> None:
    with Stop() as asked:
        signal.raise_signal(number)
        assert asked.asked == reason
        clock[0] += 0.3  # a launcher passes on what the cluster has sent to every process
        signal.raise_signal(number)
        clock[0] += 1.0
        with pytest.raises(Left):
            signal.raise_signal(number)


@pytest.mark.usefixtures("_before")
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_another_signal_or_a_second_ctrl_c_leaves(first: signal.Signals, second: signal.Signals) -> None:
    with Stop() as asked:
        signal.raise_signal(first)
        assert asked.asked is not None
        with pytest.raises(Left):
            signal.raise_signal(second)


@pytest.mark.usefixtures("_before")
def test_a_closed_terminal_asks_once_and_never_harder(clock: list[float]) -> None:
    with Stop() as asked:
        signal.raise_signal(signal.SIGHUP)
        assert asked.asked == "terminated"
        clock[0] += 10.0
        signal.raise_signal(signal.SIGHUP)
    with Stop() as asked:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)  # systemd sends both
        assert asked.asked == "terminated"
    with Stop() as asked:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGHUP)  # the terminal is closed after Ctrl-C
        assert asked.asked == "interrupted"


@pytest.mark.usefixtures("_before")
def test_under_nohup_a_closed_terminal_is_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Stop() as asked:
        signal.raise_signal(signal.SIGHUP)
        assert asked.asked is None


def test_what_is_written_to_a_terminal_that_is_gone_goes_nowhere() -> None:
    master, terminal = os.openpty()
    kept = os.dup(1)
    try:
        os.dup2(terminal, 1)
        let_go_of_terminal()
        assert os.write(1, b"x") == 1
        assert os.read(master, 1) == b"x"  # it is there, and stays
        os.close(master)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(1, b"x")
        let_go_of_terminal()
        assert os.write(1, b"x") == 1
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(terminal)
