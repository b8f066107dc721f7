"""Rows of results: shown as a table, written as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from carrywave.cli.options import plain
from carrywave.parallel.startup.launcher_env import is_first
from carrywave.runs import output_file


def wide_console() -> Console:
    """Where tables are printed: a file or pipe has no width, so it gets one in which rows are not wrapped."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


def show(table: Table) -> None:
    """Print a table."""
    wide_console().print(table)


def write_rows(path: Path | None, rows: list[dict[str, object]]) -> None:
    """Write a JSON array with one row per line; NaN and infinity become null, since JSON has neither."""
    if path is not None and is_first():
        lines = (json.dumps({name: plain(value) for name, value in row.items()}, ensure_ascii=False) for row in rows)
        output_file.write(path, "[\n" + ",\n".join(lines) + "\n]\n")
