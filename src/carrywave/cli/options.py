"""What several commands share: options, runs and files as the command line names them, and rows of results, shown or written as JSON."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from carrywave.data.files import cache
from carrywave.data.files.remote import fetch, is_address
from carrywave.errors import UserError
from carrywave.parallel.startup.launcher_env import is_first
from carrywave.runs import output_file
from carrywave.runs.display import lasting_console
from carrywave.runs.watcher import printable


class Device(StrEnum):
    """Where to compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class InputFormat(StrEnum):
    """How a file is read."""

    auto = "auto"
    jsonl = "jsonl"
    csv = "csv"
    parquet = "parquet"
    text = "text"


class _Flags:
    """Help shows no metavar for flags, since they take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_Flags, TyperCommand):
    """A command."""


class Group(_Flags, TyperGroup):
    """The top-level command group. Usage errors are reported like any user error: one line and exit code 2."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command given by `args` and exit the process with its code."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.Abort:
            sys.exit(1)
        except Exception as error:
            if not hasattr(error, "format_message"):  # not one of the parser's errors, whose classes are not public
                raise
            context = getattr(error, "ctx", None)
            message = " ".join(error.format_message().split())
            if context is None or not message or "Usage:" in message:  # no arguments at all: the error is the help text
                error.show()  # type: ignore[attr-defined]
            else:
                ends = "" if message.endswith("?") else ";"  # a question, as in: Did you mean 'train'?
                note(f"{message.rstrip('.')}{ends} see {context.command_path} --help")
            sys.exit(2)
        sys.exit(code or 0)


def note(message: str) -> None:
    """Print one line to stderr."""
    if sys.stderr is None:
        return
    try:
        print(f"carrywave: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)
    except OSError:  # a full disk, or a closed pipe: a message never ends the work
        output_file.hang_up(sys.stderr)


def display_console() -> Console:
    """Where progress is shown; if that cannot be written any more, a line says so on stderr, and the command goes on without it."""

    def gone(error: Exception) -> None:
        output_file.hang_up(sys.stdout)
        why = getattr(error, "strerror", None) or error
        note(f"standard output cannot be written ({why}); the run goes on, and its progress is no longer shown")

    return lasting_console(gone)


def plain_warnings() -> None:
    """Print our own warnings as one line, like everything else that people should know; others keep their form."""
    before, package = warnings.showwarning, Path(__file__).parents[1]

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: str | None = None) -> None:
        if category is UserWarning and file is None and Path(filename).is_relative_to(package):
            note(f"warning: {message}")
        else:
            before(message, category, filename, lineno, file, line)

    warnings.showwarning = show


DeviceOption = Annotated[Device, typer.Option(help="Where to compute; auto uses CUDA if available.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to FILE as JSON.")]


def spec_and_overrides(words: list[str]) -> tuple[Path | None, list[str]]:
    """Split the arguments into a spec file, if any, and its `key=value` overrides."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise UserError(f"{files[1]} is a second spec file, after {files[0]}; pass one SPEC.yaml, and the rest as key=value")
    return (Path(files[0]) if files else None), [word for word in words if "=" in word]


def plain(value: object) -> object:
    """The value as JSON can represent it: NaN and infinity become None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def runs_and_data(words: Sequence[str], *, only_files: bool = False) -> tuple[list[str], str | None]:
    """The runs that a command is given, and after them the data, if the last word is no run; with `only_files`, only if it is a file."""
    last = words[-1]
    is_run = (Path(last) / "spec.yaml").is_file() or (only_files and last != "-" and not Path(last).is_file())
    return (list(words), None) if len(words) == 1 or is_run else (list(words[:-1]), last)


def file_of(name: str) -> Path:
    """A data file that a command is given; one in an object store is fetched."""
    return fetch(name, cache.folder(None)) if is_address(name) else Path(name)


def wide_console() -> Console:
    """Where tables are printed: a file or pipe has no width, so it gets one in which rows are not wrapped."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


def show(table: Table) -> None:
    """Print a table."""
    wide_console().print(table)


def write_rows(path: Path | None, rows: list[dict[str, object]]) -> None:
    """Write a JSON array with one row per line if the name ends in .json, else just the lines; NaN and infinity become null, since JSON has
    neither.
    """
    if path is not None and is_first():
        lines = [json.dumps({name: plain(value) for name, value in row.items()}, ensure_ascii=False) for row in rows]
        output_file.write(path, "[\n" + ",\n".join(lines) + "\n]\n" if path.suffix == ".json" else "".join(f"{line}\n" for line in lines))
