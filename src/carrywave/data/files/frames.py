"""Convert pandas, polars and Arrow columns and frames to plain values, always by position: an index is a label, not a position.

Only Arrow is imported; other libraries' objects are recognised by duck typing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from carrywave.data.files import hub_datasets
from carrywave.data.tables.dates import is_dates
from carrywave.errors import DataError, one_line

NUMBERS = "iufb"  # NumPy dtype kinds that hold numbers


@dataclass(frozen=True)
class Frame:
    """A frame as an Arrow table, and the column that holds its former index."""

    table: Any
    index: str | None = None  # column that holds the frame's index; None if the index only numbers the rows


def is_frame(value: Any) -> bool:
    """True if the value has named columns."""
    return isinstance(value, pa.Table | pa.RecordBatch) or (
        hasattr(value, "columns") and hasattr(value, "to_numpy") and not isinstance(value, Mapping)
    )


def is_column(value: Any) -> bool:
    """True if the value is a single column of a frame, or a pandas index or array."""
    if is_frame(value) or isinstance(value, np.ndarray):
        return False
    return isinstance(value, pa.Array | pa.ChunkedArray) or (hasattr(value, "to_numpy") and hasattr(value, "__len__"))


def columns_of(frame: Any) -> Iterator[tuple[str, Any]]:
    """Yield each column with its name, by position: names may be numbers, or occur twice."""
    names = frame.column_names if isinstance(frame, pa.Table | pa.RecordBatch) else frame.columns
    for place, name in enumerate(names):
        if hasattr(frame, "iloc"):
            yield str(name), frame.iloc[:, place]
        else:
            yield str(name), frame.columns[place] if isinstance(frame, pa.Table | pa.RecordBatch) else frame.get_column(name)


def plain_column(column: Any) -> NDArray[Any] | list[Any]:
    """Return a column's values in order: numbers as an array, anything else as a list with None for missing values."""
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return list(column.to_pylist())
    if hasattr(column, "null_count") and hasattr(column, "to_list"):  # polars
        return _numeric(column.to_numpy()) if not column.null_count() and column.dtype.is_numeric() else list(column.to_list())
    values: NDArray[Any] = np.asarray(column.to_numpy())
    # pandas represents missing values as NaN, NaT, NA or None.
    missing: NDArray[Any] = np.flatnonzero(np.asarray(column.isna())) if hasattr(column, "isna") else np.empty(0, np.int64)
    if len(missing) and getattr(column.dtype, "kind", "") in "iub":
        values = np.asarray(column.to_numpy(dtype=object))  # otherwise integers next to a missing value would become floats
    if values.dtype.kind not in "OUT":
        return values
    items: list[Any] = values.tolist()
    for place in missing:
        items[int(place)] = None
    return items


def _numeric(values: Any) -> NDArray[Any] | list[Any]:
    array: NDArray[Any] = np.asarray(values)
    return array if array.dtype.kind in NUMBERS else array.tolist()


def plain_frame(frame: Any) -> NDArray[Any] | list[Any]:
    """Return the rows of a frame: a matrix if all columns are numeric, else a list of lists."""
    columns = [plain_column(column) for _, column in columns_of(frame)]
    if columns and all(isinstance(column, np.ndarray) and column.dtype.kind in NUMBERS for column in columns):
        return np.stack(columns, axis=1)
    return [list(row) for row in zip(*columns, strict=True)]


def rows_of(frame: Any) -> list[dict[str, Any]] | None:
    """Return the rows of a pandas frame; None for frames that are Arrow tables, or convert to one without loss.

    pandas frames do not go through Arrow, which cannot represent a cell that holds a matrix.
    """
    if not hasattr(frame, "iloc"):
        return None
    columns = {name: plain_column(column) for name, column in columns_of(frame)}
    if len(columns) < len(frame.columns):
        raise DataError("the frame has duplicate column names; give every column a unique name")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def as_table(data: Any, name: str) -> Frame | None:
    """Convert a frame, or a single column of one, to an Arrow table; None for anything else."""
    if isinstance(data, pa.Table):
        return Frame(data)
    if hub_datasets.is_dataset(data):
        return Frame(hub_datasets.table_of(data))
    if is_column(data) and hasattr(data, "to_frame"):
        data = data.to_frame() if getattr(data, "name", None) != "" else data.to_frame("value")
    if not is_frame(data):
        return Frame(pa.table(data)) if hasattr(data, "__arrow_c_stream__") and not is_column(data) else None
    try:
        if not hasattr(data, "iloc"):
            return Frame(_with_plain_texts(data))
        data, index = _with_index(data)
        return Frame(pa.Table.from_pandas(_without_periods(data), preserve_index=False), index)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(f"{name}: the frame cannot be read ({one_line(error)}); use numeric columns and one time column") from error


def _with_plain_texts(data: Any) -> Any:
    """Convert a frame that is not pandas' to an Arrow table; polars' own kinds of text become Arrow's usual one, which has all kernels."""
    polars = sys.modules.get("polars")
    if polars is None or not isinstance(data, polars.DataFrame):
        return pa.table(data)
    return data.to_arrow(compat_level=polars.CompatLevel.oldest())


def _with_index(frame: Any) -> tuple[Any, str | None]:
    """Turn the frame's index into a column unless it only numbers the rows; return the frame and the column's name.

    An unnamed index of times becomes the column `time`. An unnamed numeric index only numbers rows, in any order, and is dropped.
    """
    index = frame.index
    if index.nlevels > 1:
        return frame.reset_index(), None  # one column per level: one may name the series, another the time
    if hasattr(index, "to_timestamp"):  # periods become their start time
        frame = frame.set_axis(index.to_timestamp().rename(index.name), axis=0)
        index = frame.index
    if index.name is not None:
        return frame.reset_index(), str(index.name)
    if getattr(index.dtype, "kind", "O") in NUMBERS:
        return frame.reset_index(drop=True), None
    dates = getattr(index.dtype, "kind", "O") == "M" or is_dates(pa.array(index.astype(str)))
    name = next(name for name in ("time", "index", "index of the frame")[not dates :] if name not in frame.columns)
    return frame.rename_axis(name).reset_index(), name


def _without_periods(frame: Any) -> Any:
    """Convert period columns to their start times: Arrow has no period type."""
    periods = [name for name in frame.columns if str(frame.dtypes[name]).startswith("period[")]
    return frame.assign(**{name: frame[name].dt.to_timestamp() for name in periods}) if periods else frame
