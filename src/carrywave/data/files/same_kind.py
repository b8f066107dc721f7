"""Makes a frame of the kind that a user gave, pandas, polars or Arrow, from rows; columns that both have get the type they had there.

Only Arrow is imported: whoever gave a frame of another kind has imported its library.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from carrywave.data.files.frames import as_table
from carrywave.errors import DataError, one_line

KINDS = ("pandas", "polars", "pyarrow")


def kind_of(frame: Any) -> str | None:
    """The library of a frame; None if it is no frame that can be made again."""
    library = type(frame).__module__.partition(".")[0]
    is_frame = library in KINDS and type(frame).__name__ in ("DataFrame", "Table")
    return library if is_frame else None


def frame_like(frame: Any, rows: Sequence[Mapping[str, Any]], *, alike: Mapping[str, str] | None = None) -> Any:
    """The rows as a frame of the kind of `frame`; `alike` names columns that have the type of another one there."""
    columns = list(rows[0]) if rows else []
    read = as_table(frame, "the frame")
    types = {} if read is None else {field.name: field.type for field in read.schema}
    table = pa.table({name: _column([row[name] for row in rows], types.get((alike or {}).get(name, name))) for name in columns})
    kind = kind_of(frame)
    if kind == "pandas":
        return _as_pandas(frame, table)
    if kind == "polars":
        return _as_polars(frame, table)
    return table


def appended(first_frame: Any, more: Any, name: str) -> Any:
    """The rows of a frame and, after them, those of another, as an Arrow table; a column that one of them lacks is empty there."""
    frames = [as_table(first_frame, "the frame"), as_table(more, name)]
    tables = [_with_texts(frame) for frame in frames if frame is not None]
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        first, second = (dict(zip(table.column_names, table.schema.types, strict=True)) for table in tables)
        other = next((column for column in second if column in first and first[column] != second[column]), None)
        what = f"column {other} of {name} is {second[other]}, but {first[other]} in the frame" if other else one_line(error)
        raise DataError(f"{what}; give both the same type") from error


def _with_texts(table: Any) -> Any:
    """The table with every column of text, also of categories, in one type: libraries, and even columns of one, differ in theirs."""
    for place, field in enumerate(table.schema):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            flat = table.column(place)
            flat = flat.combine_chunks().dictionary_decode() if pa.types.is_dictionary(field.type) else flat
            table = table.set_column(place, field.name, flat.cast(pa.large_string()))
    return table


def _column(values: list[Any], like: Any) -> Any:
    """The values in the type that the column has in the user's frame, if they can have it: a date is still a date, a time has its zone."""
    column = pa.array(values)
    if like is None or pa.types.is_floating(column.type) or column.type == like:
        return column
    if pa.types.is_dictionary(like):
        return column
    try:
        if pa.types.is_timestamp(like) and like.tz is not None:
            # Written with its offset, as in 2026-03-29 03:00:00+02:00; which is the same moment in any zone.
            return column.cast(pa.timestamp(like.unit, "UTC")).cast(like)
        return column.cast(like)
    except pa.ArrowException as error:
        raise DataError(
            f"forecasts have values such as {values[0]!r:.40}, which do not fit a column of {like}; use a wider type"
        ) from error


def _as_pandas(original: Any, table: Any) -> Any:
    frame = table.to_pandas()
    indexed = {} if original.index.nlevels > 1 or original.index.name is None else {original.index.name: original.index.dtype}
    types = indexed | {name: original.dtypes[name] for name in original.columns}
    # A period is written as its start.
    shared = {name: types[name] for name in frame.columns if name in types and not str(types[name]).startswith("period[")}
    kept = {name: dtype for name, dtype in shared.items() if str(frame.dtypes[name]) != str(dtype) and frame.dtypes[name].kind != "f"}
    return frame.astype(kept) if kept else frame


def _as_polars(original: Any, table: Any) -> Any:
    polars: Any = sys.modules["polars"]
    frame = polars.from_arrow(table)
    schema = original.schema
    return frame.with_columns(
        [polars.col(name).cast(schema[name]) for name in frame.columns if name in schema and not frame.schema[name].is_float()]
    )
