"""What a benchmark has measured so far, on stderr: those that take minutes print each row as soon as they have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import typer

R = TypeVar("R", bound=Mapping[str, object])


def printed(rows: Iterable[R]) -> list[R]:
    """The same rows, after printing each on a line, without what they leave empty."""
    kept = list(rows)
    for row in kept:
        typer.echo("  ".join(f"{name} {value}" for name, value in row.items() if value not in (None, "")), err=True)
    return kept
