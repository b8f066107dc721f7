"""What a person sees, as text."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from carrywave.runs.display import (
    PlainWatcher,
    RichWatcher,
    duration,
    figure,
    lasting_console,
    row_line,
    step_line,
    watcher_for,
    watcher_of_call,
)
from carrywave.runs.watcher import Logged, StepInfo

INFO = StepInfo(epoch=2, epochs=10, step=30, steps=120, loss=2.34567, tokens_per_second=12345.6, waste=0.0123, lr=0.002, eta_seconds=83.4)
ROW = {"split": "valid", "epoch": 2, "step": 300, "loss": 1.23456, "perplexity": 3.4369}


class Hand:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def console(*, terminal: bool = False, width: int = 160) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None, legacy_windows=False)


def written(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


def test_a_step_on_one_line() -> None:
    assert step_line(INFO) == "epoch 2/10 step 30/120 loss 2.3457  12,346 tokens/s  padding 1.2%  lr 0.002  ETA 1:23"
    assert "padding" not in step_line(replace(INFO, waste=0.0))
    assert step_line(replace(INFO, phase="valid", loss=None)) == "epoch 2/10 valid step 30/120 12,346 tokens/s"
    assert "  12,346 steps/s  " in step_line(replace(INFO, unit="steps"))


def test_an_evaluation_on_one_line() -> None:
    assert row_line(ROW) == "valid epoch 2 step 300: loss 1.2346  perplexity 3.4369"
    assert row_line({"split": "test", "epoch": 2, "step": 300, "weights_step": 200, "loss": 1.5}) == (
        "test epoch 2 step 300 (weights of step 200): loss 1.5000"
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (90061, "25:01:01")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0000"), (1.5, "1.5000"), (-2e-5, "-2e-05"), (123456.0, "1.235e+05"), (7, "7"), ("a", "a"), (float("nan"), "nan")],
)
def test_figures(value: object, text: str) -> None:
    assert figure(value) == text


def test_plain_lines_come_every_five_seconds_and_evaluations_always() -> None:
    on, clock = console(width=20), Hand()
    with PlainWatcher(on, clock=clock) as watch:
        watch.begin("2 layers [of 8]")
        watch.step(INFO)
        clock.seconds += 4.9
        watch.step(replace(INFO, step=31))
        watch.evaluated(ROW)
        clock.seconds += 0.2
        watch.step(replace(INFO, step=32))
        watch.step(replace(INFO, step=33))
        watch.say("a line that is longer than the console is wide")
        watch.end("reached [1]")
    assert written(on).splitlines() == [
        "2 layers [of 8]",
        step_line(INFO),
        row_line(ROW),
        step_line(replace(INFO, step=32)),
        "a line that is longer than the console is wide",
        "reached [1]",
    ]


def test_the_live_display_shows_the_figures_and_ends_with_the_last_line() -> None:
    on = console(terminal=True)
    with RichWatcher(on) as watch:
        watch.begin("summary")
        watch.step(INFO)
        watch.step(replace(INFO, step=120))
        watch.evaluated(ROW)
        watch.step(replace(INFO, phase="valid", loss=None, step=1))
        watch.end("runs/a: loss 1.2")
    text = written(on)
    for part in (
        "summary",
        "epoch 2/10",
        "120/120",
        "loss 2.3457 12,346 tokens/s padding 1.2% lr 0.002 ETA 1:23",
        row_line(ROW),
        "epoch 2/10 valid",
    ):
        assert part in text
    assert text.rstrip().endswith("runs/a: loss 1.2")


def test_the_live_display_is_drawn_at_most_ten_times_a_second() -> None:
    on, clock = console(terminal=True), Hand()
    with RichWatcher(on, clock=clock) as watch:
        watch.begin("")
        watch.step(INFO)
        watch.step(replace(INFO, loss=7.7777))
        clock.seconds += 0.2
        watch.step(replace(INFO, loss=8.8888))
    assert "7.7777" not in written(on)
    assert "8.8888" in written(on)


def test_a_display_that_is_left_early_gives_the_cursor_back() -> None:
    on = console(terminal=True)

    def fail() -> None:
        with RichWatcher(on) as watch:
            watch.begin("")
            watch.step(INFO)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert written(on).count("\x1b[?25l") == written(on).count("\x1b[?25h") == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "progress", "shown"),
    [
        (io.StringIO, None, Logged),  # a pipe
        (io.StringIO, True, PlainWatcher),
        (Terminal, None, RichWatcher),
        (Terminal, False, Logged),
    ],
)
def test_a_call_shows_its_progress_to_people(
    stream: type[io.StringIO], progress: bool | None, shown: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", stream())
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    with watcher_of_call(progress) as watch:
        assert type(watch) is shown


def test_a_notebook_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with watcher_of_call(None) as watch:
        assert isinstance(watch, PlainWatcher)


@pytest.mark.parametrize("where", ["full disk", "closed pipe", "closed stream"])
def test_a_display_that_cannot_be_written_is_given_up(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    raw = os.open("/dev/full", os.O_WRONLY) if where == "full disk" else os.dup(writing)
    os.close(writing)
    stream = io.TextIOWrapper(io.FileIO(raw, "w"), encoding="utf-8")  # a line is written at once
    if where == "closed stream":
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    told: list[Exception] = []
    with watcher_for(lasting_console(told.append)) as watch:
        watch.begin("a model")
        watch.step(INFO)
        watch.evaluated(ROW)
        watch.end("the end")
    assert len(told) == 1
    with watcher_of_call(progress=True) as watch:
        watch.say("a line")
    monkeypatch.undo()
    if where != "closed stream":
        os.dup2(os.open(os.devnull, os.O_WRONLY), raw)
        stream.close()
