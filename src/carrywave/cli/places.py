"""Runs and data files as the command line names them: paths, or addresses in an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carrywave.data.files import cache
from carrywave.data.files.remote import fetch, is_address

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its address in an object store.")]


def place_of(run: str) -> Path | str:
    """A run as the other modules take it: an address is text, which a path would not keep as it is."""
    return run if is_address(run) else Path(run)


def file_of(name: str) -> Path:
    """A data file that a command is given; one in an object store is fetched."""
    return fetch(name, cache.folder(None)) if is_address(name) else Path(name)
