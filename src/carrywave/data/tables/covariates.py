"""What a table holds besides the columns that are measured: categories, static columns, and rows ahead with what is known of them.

Shapes: N rows, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from carrywave.data.sequences import Ints
from carrywave.data.tables.dates import is_text
from carrywave.data.tables.filling import Values, fill
from carrywave.errors import DataError


def categories_of(column: Any, name: str, label: str) -> tuple[Values, tuple[str, ...]]:
    """Return the place of each row's value among the values of a column, NaN where it is empty, and these values, sorted."""
    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    flat = flat.dictionary_decode() if pa.types.is_dictionary(flat.type) else flat
    if pa.types.is_floating(flat.type):
        whole = flat.drop_null().filter(pc.is_finite(flat.drop_null()))
        if not pc.all(pc.equal(whole, pc.floor(whole))).as_py():
            raise DataError(f"{name}: column {label} (data.categorical) contains fractions; remove it from data.categorical")
        flat = pc.if_else(pc.is_finite(flat), flat, None).cast(pa.int64())  # pandas turns whole numbers beside an empty cell into floats
    if not (is_text(flat.type) or pa.types.is_integer(flat.type) or pa.types.is_boolean(flat.type) or pa.types.is_null(flat.type)):
        raise DataError(f"{name}: column {label} (data.categorical) contains {flat.type}; use text, whole numbers or booleans")
    texts = pc.utf8_trim_whitespace(flat.cast(pa.string()))
    coded = pc.if_else(pc.equal(texts, ""), None, texts).dictionary_encode()
    values = [str(value) for value in coded.dictionary.to_pylist()]
    order = np.argsort(np.array(values, dtype=object), kind="stable") if values else np.empty(0, np.int64)
    place: NDArray[np.float64] = np.empty(len(values))
    place[order] = np.arange(len(values))
    indices = pc.fill_null(coded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    places = np.where(indices >= 0, place[indices] if len(values) else np.nan, np.nan)
    return places, tuple(values[at] for at in order)


def rows_ahead(measured_NC: Values, codes: Ints) -> NDArray[np.bool_]:
    """Return a mask of the rows at the end of each series in which nothing is measured."""
    last = np.flatnonzero(~np.isnan(measured_NC).all(axis=1))
    # The last measured row of each series; -1 if there is none.
    ends = np.full(int(codes.max(initial=0)) + 1, -1, np.int64)
    ends[codes[last]] = last  # later rows overwrite earlier ones
    mask: NDArray[np.bool_] = np.arange(len(codes)) > ends[codes]
    return mask


def constant(values_NC: Values, codes: Ints, columns: Sequence[str], name: str, names: Sequence[str]) -> Values:
    """Return static columns with the value of their series in every row; refuse one that changes within a series."""
    filled = fill(values_NC, codes, "forward")
    first = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(np.diff(codes)) + 1])
    counts = np.diff(np.concatenate([first, [len(codes)]]))
    expected = np.repeat(filled[first], counts, axis=0)
    changed = (filled != expected) & ~np.isnan(filled)
    if changed.any():
        row, column = (int(at) for at in np.argwhere(changed)[0])
        fact = f"column {columns[column]} (data.static) changes within series {names[int(codes[row])]}"
        raise DataError(f"{name}: {fact}; write one value for each series, or remove it from data.static")
    return expected
