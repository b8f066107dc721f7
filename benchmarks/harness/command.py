"""`python -m benchmarks.NAME`: the command line of every benchmark, made from the parameters of its `run`.

A benchmark module defines `run(*, quick, …) -> list of rows`; `shown(rows)` may arrange them for the screen, and `conclusions(rows)` says
what follows from them in lines below the table. Parameters are options of the same names: flags, numbers, paths, words; lists of numbers
are written as 2,4, and lists of words are repeated.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from carrywave.errors import UserError

Row = Mapping[str, object]


def main(name: str, words: Sequence[str] | None = None) -> None:
    """Run the benchmark in this module with the words of a command line, by default this process's."""
    module = importlib.import_module(name)  # by its name, under which workers import it too
    options = vars(_parser(name, module).parse_args(words))
    file = options.pop("json")
    try:
        rows = module.run(**{option: value for option, value in options.items() if value is not None})
    except UserError as error:
        sys.exit(f"{name}: {error}")
    print(table(module.shown(rows) if hasattr(module, "shown") else rows))
    for line in module.conclusions(rows) if hasattr(module, "conclusions") else ():
        print(line)
    if file is not None:
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _parser(name: str, module: Any) -> argparse.ArgumentParser:
    about, _, rest = (module.__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}", description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    for option, parameter in inspect.signature(module.run).parameters.items():
        flag, kind = f"--{option.replace('_', '-')}", str(parameter.annotation)
        if kind == "bool":
            parser.add_argument(flag, action="store_true", help="small sizes: does it work?" if option == "quick" else None)
        elif kind.startswith("Sequence[int]"):
            parser.add_argument(flag, type=lambda text: [int(part) for part in text.split(",")], metavar="N,N")
        elif kind.startswith("Sequence[str]"):
            parser.add_argument(flag, action="append", metavar="WORDS")
        else:
            parser.add_argument(flag, type=int if kind.startswith("int") else Path if kind.startswith("Path") else str)
    return parser


def table(rows: Sequence[Row]) -> str:
    """Rows as columns of text; a column that is empty everywhere is left out."""
    names = [name for name in (rows[0] if rows else {}) if any(row.get(name) not in (None, "") for row in rows)]
    lines = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
