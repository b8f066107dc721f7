"""Convert columns and frames of pandas, polars, Arrow and other libraries to plain values, always by position: an index is a label.

narwhals knows the other libraries; a frame of series becomes pandas', one of rows Arrow's, in which a cell may hold a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import narwhals as nw
import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from carrywave.data.files import hub_datasets
from carrywave.data.tables.instants import readings
from carrywave.errors import DataError, one_line

NUMBERS = "iufb"  # NumPy dtype kinds that hold numbers


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
    if isinstance(frame, pa.Table | pa.RecordBatch):
        yield from zip(frame.column_names, frame.columns, strict=True)
        return
    for place, name in enumerate(frame.columns):
        yield str(name), frame.iloc[:, place] if hasattr(frame, "iloc") else frame.get_column(name)


def plain_column(column: Any) -> NDArray[Any] | list[Any]:
    """Return a column's values in order: numbers as an array, anything else as a list with None for missing values."""
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return list(column.to_pylist())
    if hasattr(column, "null_count") and hasattr(column, "to_list"):  # polars
        return list(column.to_list()) if column.null_count() or not column.dtype.is_numeric() else np.asarray(column.to_numpy())
    series = pd.Series(column)
    missing = series.isna()
    if missing.any() and series.dtype.kind != "f":
        return list(series.astype(object).where(~missing, None))
    values: NDArray[Any] = series.to_numpy()
    return values if values.dtype.kind not in "OUT" else list(values.tolist())


def plain_frame(frame: Any) -> NDArray[Any] | list[Any]:
    """Return the rows of a frame: a matrix if all columns are numeric, else a list of lists."""
    columns = [plain_column(column) for _, column in columns_of(frame)]
    if columns and all(isinstance(column, np.ndarray) and column.dtype.kind in NUMBERS for column in columns):
        return np.stack(columns, axis=1)
    return [list(row) for row in zip(*columns, strict=True)]


def different_names(frame: pd.DataFrame) -> list[str]:
    """Return the names of the columns; those of a frame that occur again are numbered as pandas numbers those of a file."""
    names = pd.Series(frame.columns, dtype=object).astype(str)
    again = names.groupby(names).cumcount()
    return list(names.where(again == 0, names + "." + again.astype(str)))


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a pandas frame, without Arrow, which cannot represent a cell that holds a matrix."""
    names, columns = different_names(frame), [plain_column(column) for _, column in columns_of(frame)]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def as_table(data: Any, name: str) -> Any | None:
    """Convert a frame, or a single column of one, to an Arrow table; None for anything else."""
    if isinstance(data, pa.Table):
        return data
    if hub_datasets.is_dataset(data):
        return pa.concat_tables(list(hub_datasets.tables_of(data)))  # series are read as a whole
    data = _column_as_frame(data)
    try:
        if isinstance(data, pd.DataFrame):
            return pa.Table.from_pandas(with_index(data), preserve_index=False)
        if is_frame(data) or (hasattr(data, "__arrow_c_stream__") and not is_column(data)):
            frame = nw.from_native(data, eager_only=True, pass_through=True)
            return frame.to_arrow() if isinstance(frame, nw.DataFrame) else pa.table(frame)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(f"{name}: the frame cannot be read ({one_line(error)}); use numeric columns and one time column") from error
    return None


def to_pandas(data: Any, name: str) -> pd.DataFrame | None:
    """Convert a frame, or a single column of one, to a pandas frame whose index only numbers the rows; None for anything else."""
    data = _column_as_frame(data)
    if isinstance(data, pd.DataFrame):
        return with_index(data)
    table = as_table(data, name)
    return None if table is None else table.to_pandas()


def _column_as_frame(data: Any) -> Any:
    if is_column(data) and hasattr(data, "to_frame"):
        return data.to_frame() if getattr(data, "name", None) != "" else data.to_frame("value")
    return data


def with_index(frame: pd.DataFrame) -> pd.DataFrame:
    """Turn the frame's index into a column unless it only numbers the rows: one of unnamed numbers, in any order, is dropped, and one of
    unnamed times becomes the column `time`.
    """
    index = frame.index
    if isinstance(index, pd.PeriodIndex):  # periods become their start time
        frame = frame.set_axis(index.to_timestamp().rename(index.name), axis=0)
        index = frame.index
    if index.nlevels > 1 or index.name is not None:
        return frame.reset_index()
    if getattr(index.dtype, "kind", "O") in NUMBERS:
        return frame.reset_index(drop=True)
    wanted = ("time", "index", "index of the frame") if readings(pd.Series(index, name="index")) else ("index", "index of the frame")
    return frame.rename_axis(next(name for name in wanted if name not in frame.columns)).reset_index()
