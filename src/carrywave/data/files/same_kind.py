"""Makes a frame of the kind that a user gave, pandas, polars or Arrow, from rows; columns that both have get the type they had there."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa

from carrywave.data.files.frames import as_table, to_pandas, with_index

KINDS = ("pandas", "polars", "pyarrow")


def kind_of(frame: Any) -> str | None:
    """The library of a frame; None if it is no frame that can be made again."""
    library = type(frame).__module__.partition(".")[0]
    return library if library in KINDS and type(frame).__name__ in ("DataFrame", "Table") else None


def frame_like(frame: Any, rows: Sequence[Mapping[str, Any]], *, alike: Mapping[str, str] | None = None) -> Any:
    """The rows as a frame of the kind of `frame`; `alike` names columns that have the type of another one there."""
    given = as_table(frame, "the frame")
    types = {} if given is None else {field.name: field.type for field in given.schema}
    names = list(rows[0]) if rows else []
    table = pa.table({name: _column([row[name] for row in rows], types.get((alike or {}).get(name, name))) for name in names})
    if kind_of(frame) == "polars":
        made = sys.modules["polars"].from_arrow(table)
        return made.cast({name: frame.schema[name] for name in names if name in frame.schema and not made.schema[name].is_float()})
    if kind_of(frame) == "pandas":
        found, dtypes = table.to_pandas(), with_index(frame).dtypes
        shared = [name for name in names if name in dtypes and found.dtypes[name].kind != "f"]
        # A period is written as its start.
        return found.astype({name: dtypes[name] for name in shared if not isinstance(dtypes[name], pd.PeriodDtype)})
    return table


def appended(first: Any, more: Any, name: str) -> pd.DataFrame:
    """The rows of a frame and, after them, those of another, in pandas; a column that one of them lacks is empty there."""
    return pd.concat([to_pandas(first, "the frame"), to_pandas(more, name)], ignore_index=True)


def _column(values: list[Any], like: Any) -> Any:
    """The values in the type that the column has in the user's frame: a date is still a date, a time has its zone."""
    column = pa.array(values)
    if like is None or pa.types.is_floating(column.type) or pa.types.is_dictionary(like) or isinstance(like, pa.BaseExtensionType):
        return column
    if pa.types.is_timestamp(like) and like.tz is not None:
        # Written with its offset, as in 2026-03-29 03:00:00+02:00; which is the same moment in any zone.
        column = column.cast(pa.timestamp(like.unit, "UTC"))
    return column.cast(like)
