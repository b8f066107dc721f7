"""How a CSV file is written: the mark between columns, and the mark before decimals; found in the file, or asked for.

What fits in two ways is refused, with the setting that decides: a wrong guess would silently read 1,234 as 1.234.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from carrywave.data.tables.dates import is_text
from carrywave.errors import DataError

SEPARATORS = (",", ";", "\t", "|")
LOOKED_AT = 20  # first lines from which the separator is found
MOST = 0.5  # a text column with more numbers than this holds numbers
WITH_COMMA = r"^\s*[-+]?\d*,\d+([eE][-+]?\d+)?\s*$"
LIKE_THOUSANDS = r"^\s*[-+]?[1-9]\d{0,2},\d{3}\s*$"  # 1,234 is a thousand or so, or a little more than one
EMPTY = pa.array(pa_csv.ConvertOptions().null_values)  # what stands for an empty cell: NA, NaN, null, …
WITH_POINT = r"^\s*[-+]?\d+\.\d+([eE][-+]?\d+)?\s*$"


def written(mark: str) -> str:
    """A separator as messages name it."""
    return "tabs" if mark == "\t" else "commas" if mark == "," else f"`{mark}`"


def find_separator(lines: Sequence[str], name: str, usual: str) -> str:
    """Return the mark that separates the columns of some lines: `usual`, unless only another one is in all of them equally often."""
    whole = [_outside_quotes(line) for line in lines[:LOOKED_AT] if line.strip()]
    if not whole or any(line is None for line in whole[:1]):
        return usual
    # A line that ends within quotes goes on in the next, so neither is counted.
    counted = [line for line in whole if line is not None]
    even = {mark: counted[0].count(mark) for mark in SEPARATORS if len({line.count(mark) for line in counted}) == 1 and mark in counted[0]}
    others = {mark: count for mark, count in even.items() if mark != usual}
    if usual in even:
        rival = next((mark for mark, count in others.items() if count >= even[usual]), None)
        if rival is None:
            return usual
        raise _unclear(name, (usual, rival))
    if not others:
        if usual not in counted[0] and (present := [mark for mark in SEPARATORS if mark in counted[0]]):
            fact = f"columns seem to be separated by {written(present[0])}, but not equally many in every row"
            raise DataError(f"{name}: {fact}; correct the rows, or set data.separator")
        return usual
    best = max(others, key=lambda mark: others[mark])
    if any(count == others[best] for mark, count in others.items() if mark != best):
        raise _unclear(name, tuple(others))
    return best


def _unclear(name: str, marks: Sequence[str]) -> DataError:
    shown = " or by ".join(written(mark) for mark in marks)
    return DataError(f"{name}: columns may be separated by {shown}; set data.separator")


def _outside_quotes(line: str) -> str | None:
    """The line without its quoted cells; None if a quote stays open."""
    return None if line.count('"') % 2 else re.sub(r'"[^"]*"', "", line)


def first_lines(lines: Any) -> list[str]:
    """The first of numbered lines, as text."""
    return [line.decode(errors="replace").rstrip("\r") for _, line in islice(lines, LOOKED_AT)]


def with_points(table: Any, decimal: str, name: str, kept: Collection[str]) -> tuple[Any, tuple[str, ...]]:
    """Return an Arrow table in which decimals are written with a point, and a line on what was changed.

    `decimal` is `auto`, `.` or `,`. Columns in `kept`, such as the names of series, stay as they are.
    """
    if decimal == "." or len(set(table.column_names)) < len(table.column_names):
        return table, ()
    texts_of = {column: _texts(table[column]) for column in table.column_names if column not in kept and is_text(table[column].type)}
    numeric = {column: texts for column, texts in texts_of.items() if _mostly_numbers(texts)}
    with_commas = [column for column, texts in numeric.items() if pc.any(pc.match_substring_regex(texts, WITH_COMMA)).as_py()]
    if decimal == "auto" and with_commas:
        _refuse_unclear(table, with_commas, name)
    for column in numeric if decimal == "," else with_commas:
        points = pc.fill_null(pc.match_substring_regex(numeric[column], WITH_POINT), False)
        if pc.any(points).as_py():
            row = int(pc.index(points, True).as_py())
            shown = numeric[column][row].as_py()
            why = "data.decimal=," if decimal == "," else "other rows have a comma before the decimals"
            raise DataError(f"{name}: row {row + 1}, column {column} is {shown!r:.40}, but {why}; write all numbers alike")
    for column in with_commas:
        texts = numeric[column]
        commas = pc.match_substring_regex(texts, WITH_COMMA)
        changed = pc.if_else(pc.fill_null(commas, False), pc.replace_substring(texts, ",", "."), texts)
        # Arrow reads NA and its like as empty in a column of numbers, but this one was text to it.
        changed = pc.if_else(pc.fill_null(pc.is_in(pc.utf8_trim_whitespace(texts), EMPTY), False), None, changed)
        table = table.set_column(table.column_names.index(column), column, changed)
    shown = ", ".join(with_commas[:8]) + (f" and {len(with_commas) - 8} more" if len(with_commas) > 8 else "")
    return table, (f"{name}: decimals have a comma ({shown})",) if decimal == "auto" and with_commas else ()


def _texts(column: Any) -> Any:
    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return (flat.dictionary_decode() if pa.types.is_dictionary(flat.type) else flat).cast(pa.string())


def _mostly_numbers(texts: Any) -> bool:
    """True if most cells that are filled hold numbers, with a comma or a point before the decimals, or neither."""
    filled = pc.drop_null(texts)
    filled = filled.filter(pc.invert(pc.is_in(pc.utf8_trim_whitespace(filled), EMPTY)))
    numbers = pc.or_(pc.match_substring_regex(filled, WITH_COMMA), pc.match_substring_regex(filled, WITH_POINT))
    numbers = pc.or_(numbers, pc.match_substring_regex(filled, r"^\s*[-+]?\d+\s*$"))
    return float(pc.mean(numbers.cast(pa.float64())).as_py() or 0.0) > MOST


def _refuse_unclear(table: Any, with_commas: Sequence[str], name: str) -> None:
    """Refuse commas that may stand between thousands, and a file in which other columns have points."""
    choice = "set data.decimal=, or, if it stands between thousands, write the numbers without it"
    clear = False
    for column in with_commas:
        texts = _texts(table[column])
        commas = texts.filter(pc.match_substring_regex(texts, WITH_COMMA))
        clear = clear or not pc.all(pc.match_substring_regex(commas, LIKE_THOUSANDS)).as_py()
    if not clear:
        texts = _texts(table[with_commas[0]])
        shown = texts.filter(pc.match_substring_regex(texts, WITH_COMMA))[0].as_py()
        raise DataError(f"{name}: column {with_commas[0]} contains {shown!r:.40}, whose comma may stand before decimals; {choice}")
    pointed = next((column for column in table.column_names if pa.types.is_floating(table[column].type)), None)
    if pointed is not None:
        fact = f"column {with_commas[0]} has commas before its decimals, but column {pointed} has points"
        raise DataError(f"{name}: {fact}; write both alike")
