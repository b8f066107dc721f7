"""Displays the progress of a run: live on a terminal, plain lines every few seconds anywhere else.

A display that cannot be written, because the disk is full or the reader of a pipe is gone, is given up, and the run goes on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import IO, Any, Protocol, Self, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from carrywave.runs.watcher import Logged, StepInfo, Watcher, printable
from carrywave.tasks.baselines import PREFIXES

Clock = Callable[[], float]

PLAIN_SECONDS = 5.0  # between plain lines
MOST_SHOWN = 4  # metrics of single columns on a line
LIVE_SECONDS = 0.1  # between updates of the live display: a step may take less time than drawing it


class Display(Watcher, Protocol):
    """A watcher that owns the screen while its context is open."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class LastingStream:
    """A text stream that falls silent once it cannot be written; `gone` is then called once, with the reason."""

    def __init__(self, stream: IO[str], gone: Callable[[Exception], None]) -> None:
        self._stream = stream
        self._gone = gone
        self._silent = False

    def write(self, text: str) -> int:
        """Write the text, unless that is no longer possible."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream, unless that is no longer possible."""
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        if self._silent:
            return
        try:
            act()
        except UnicodeError:
            raise
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self._silent = True
            self._gone(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting_console(gone: Callable[[Exception], None] = lambda _: None) -> Console:
    """Standard output as a console that falls silent once it cannot be written."""
    return Console() if sys.stdout is None else Console(file=cast("IO[str]", LastingStream(sys.stdout, gone)))


class PlainWatcher:
    """One line every few seconds of wall time, and one for each evaluation."""

    def __init__(self, console: Console, *, every_seconds: float = PLAIN_SECONDS, clock: Clock = time.monotonic, before: str = "") -> None:
        self._console = console
        self._before = before  # prefix of every line
        self._every_seconds = every_seconds
        self._clock = clock
        self._next_seconds = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, info: StepInfo) -> None:
        """Print the current progress, if the last progress line is old enough."""
        now = self._clock()
        if now >= self._next_seconds:
            self._next_seconds = now + self._every_seconds
            self.say(step_line(info))

    def evaluated(self, row: Mapping[str, object]) -> None:
        """Print every evaluation."""
        self.say(row_line(row))

    def say(self, line: str) -> None:
        """Print the line."""
        # Not wrapped, so that a log entry stays on one line; flushed, because people follow logs live.
        lines = "\n".join(f"{self._before}{line}" for line in printable(line).split("\n"))
        self._console.print(lines, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()

    begin = end = say


class RichWatcher:
    """A progress bar with loss, speed, padding, learning rate and time left; evaluations scroll by above it."""

    def __init__(self, console: Console, *, clock: Clock = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._next_seconds = float("-inf")
        self._shown: tuple[str, int] | None = None  # phase and epoch the bar stands for
        self._bar: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[figures]}", markup=False),
            console=console,
            transient=True,
            auto_refresh=False,  # steps come often enough, and a refresh thread would compete with training
            expand=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Restore the cursor however the run ends.
        self._progress.stop()

    def begin(self, summary: str) -> None:
        """Print the summary and start the live display."""
        self.say(summary)
        self._progress.start()

    def step(self, info: StepInfo) -> None:
        """Update the bar, at most every `LIVE_SECONDS` within an epoch."""
        now = self._clock()
        shown = (info.phase, info.epoch)
        if now < self._next_seconds and shown == self._shown and info.step < info.steps:
            return
        self._next_seconds = now + LIVE_SECONDS
        if shown != self._shown:
            if self._bar is not None:
                self._progress.remove_task(self._bar)
            self._bar = self._progress.add_task(place(info), total=info.steps, figures="")
            self._shown = shown
        if self._bar is not None:
            self._progress.update(self._bar, completed=info.step, total=info.steps, figures=figures(info, " "), refresh=True)

    def evaluated(self, row: Mapping[str, object]) -> None:
        """Print the row above the bar."""
        self.say(row_line(row))

    def say(self, line: str) -> None:
        """Print the line above the bar."""
        self._console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def end(self, line: str) -> None:
        """Remove the bar and print the line."""
        self._progress.stop()
        self.say(line)


def watcher_for(console: Console) -> Display:
    """A live display on a terminal, plain lines elsewhere."""
    return RichWatcher(console) if console.is_terminal else PlainWatcher(console)


def watcher_of_call(progress: bool | None) -> AbstractContextManager[Watcher]:
    """What a call from Python shows, on standard output: by default a live display on a terminal, lines in a notebook, nothing in a pipe.

    What a person should know, such as a warning about the data, is logged even where nothing is shown.
    """
    if progress is False:
        return nullcontext(Logged())
    console = lasting_console()
    if console.is_jupyter:
        return PlainWatcher(Console(force_jupyter=False))  # a live display would need widgets
    if console.is_interactive and console.file.isatty():
        return RichWatcher(console)
    return PlainWatcher(console) if progress else nullcontext(Logged())


def step_line(info: StepInfo) -> str:
    """The progress of a run on one line."""
    return f"{place(info)} step {info.step}/{info.steps} {figures(info)}"


def place(info: StepInfo) -> str:
    """The epoch, with the split unless it is train."""
    epoch = f"epoch {info.epoch}/{info.epochs}"
    return epoch if info.phase == "train" else f"{epoch} {info.phase}"


def figures(info: StepInfo, between: str = "  ") -> str:
    """The figures of a step; padding, learning rate and time left only while training."""
    parts = [] if info.loss is None else [f"loss {info.loss:.4f}"]
    parts += [f"{info.tokens_per_second:,.0f} {info.unit}/s"]
    if info.phase == "train":
        parts += [f"padding {info.waste:.1%}"] * (info.waste > 0)  # streams have none
        parts += [f"lr {info.lr:.3g}", f"ETA {duration(info.eta_seconds)}"]
    return between.join(parts)


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds as h:mm:ss, or m:ss below an hour."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def row_line(row: Mapping[str, object]) -> str:
    """An evaluation on one line: `valid epoch 2 step 300: loss 1.2345  perplexity 3.437`."""
    rest = dict(row)
    head = [str(rest.pop("split", "evaluated"))]
    head += [f"{name} {rest.pop(name)}" for name in ("epoch", "step") if name in rest]
    if "weights_step" in rest:
        head.append(f"(weights of step {rest.pop('weights_step')})")
    # Metrics of single columns, as in mae[load], are many if there are many columns; they are in the rows that programs read.
    by_column = [name for name in rest if name.endswith("]")]
    if len(by_column) > MOST_SHOWN:
        rest = {name: value for name, value in rest.items() if name not in by_column}
    # The naive forecast stands for the others, which a line at the end of a run compares with.
    rest = {name: value for name, value in rest.items() if not name.startswith(PREFIXES) or name.startswith(("naive_", "linear_"))}
    return f"{' '.join(head)}: {'  '.join(f'{name} {figure(value)}' for name, value in rest.items())}"


def figure(value: object) -> str:
    """Format a number with a readable precision."""
    if isinstance(value, float):
        return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"
    return str(value)


def table_of(title: str, rows: list[dict[str, object]]) -> Table:
    """Rows as a table, with the columns in the order in which they first appear."""
    table = Table(title=title)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        number = all(isinstance(row.get(name, 0), (int, float)) for row in rows)
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        # As text, not markup: a name from the data may have brackets.
        table.add_row(*(Text(printable(figure(row[name]))) if name in row else "" for name in columns))
    return table


def confusion_table(confusion: object) -> Table:
    """A confusion matrix: a row and a column for each label that occurs, as a target or as a prediction."""
    if not isinstance(confusion, dict):
        raise TypeError(f"a confusion matrix has labels and counts, got {type(confusion).__name__}")
    labels, counts = confusion["labels"], confusion["counts"]
    occurring = [place for place in range(len(labels)) if any(counts[place]) or any(row[place] for row in counts)]
    table = Table(title="confusion")
    table.add_column("target \\ predicted")
    for place in occurring:
        table.add_column(escape(printable(labels[place])), justify="right", overflow="fold")
    for target in occurring:
        table.add_row(escape(printable(labels[target])), *(str(counts[target][place]) for place in occurring))
    return table
