"""A file as a pandas frame: text tables in any usual form, Parquet, Feather and JSON records.

What pandas needs to be told is looked up in the first lines (separator, first line, header, decimal mark), unless
`data.decimal` or `data.read` say it; the rest is pandas' own. Each thing that was found rather than told is said in a
line.
"""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pyarrow as pa

from carrywave.data.files.frames import with_index
from carrywave.data.files.numbers import CODE, DATE, MISSING, NUMBER, as_numbers, is_code
from carrywave.data.files.rows import json_rows
from carrywave.data.files.source import Source
from carrywave.errors import DataError, UserError, one_line
from carrywave.spec.data_spec import DataSpec

SEPARATORS = ("\t", ";", ",", "|")
SPACES = r"\s+"
MOST_LABELS = 20  # a column with no more different numbers holds labels
LOOKED_AT = 200  # first lines
HEAD_BYTES = 1 << 20
ALIKE = 0.9  # of the lines have the usual number of cells
COMMENTS = re.compile(rb"(?:sep=(?P<sep>.)\r?\n)?(?:(?:[#%][^\n]*|[ \t]*)\r?\n)*")
WRAPPED = re.compile(rb'(?:"(?:[^"\n]|"")*[,;\t](?:[^"\n]|"")*"\r?(?:\n|$))+')
SINGLE = re.compile(rb"(?:^|[,;\t])'[^']*'(?=[,;\t]|$)")  # around cells
YEAR = re.compile(r"\s*(1[5-9]|20|21)\d\d\s*")
MOST_WORDS = 8  # of a name; with more it is a text, as in AG News

Lines = list[str]


def read_frame(source: Source, data: DataSpec, *, as_text: bool = False) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Return the table in a file, with lines on what was found in it; `as_text`: every cell stays as it is written, empty ones as ""."""
    notes: tuple[str, ...] = ()
    try:
        if source.format == "parquet":
            frame = _columnar(source)
        elif source.format == "jsonl":
            frame = pd.DataFrame.from_records([row for _, row in json_rows(source)])
        else:
            frame, notes = _text_table(source, data, as_text=as_text)
    except UserError:
        raise
    except (ValueError, TypeError, LookupError, OSError, pa.ArrowException) as error:  # pandas' own are ValueErrors
        remedy = "correct it, or tell pandas how in data.read, as in data.read={skiprows: 3}"
        raise DataError(f"{source.name} cannot be read as a table ({one_line(error, 200)}); {remedy}") from error
    if not len(frame.columns) or not len(frame):
        raise DataError(f"{source.name} is empty; use a table with at least one row")
    return frame, notes


def _columnar(source: Source) -> pd.DataFrame:
    read = pd.read_parquet if source.head().startswith(b"PAR1") else pd.read_feather
    return with_index(source.guard(lambda: read(source.path)))


def _text_table(source: Source, data: DataSpec, *, as_text: bool) -> tuple[pd.DataFrame, tuple[str, ...]]:
    content = source.content
    if not content[:HEAD_BYTES].strip():
        return pd.DataFrame(), ()
    told = {name: value for name, value in data.told.items() if name != "encoding"}
    if WRAPPED.fullmatch(content[:HEAD_BYTES].rpartition(b"\n")[0] or content):  # a spreadsheet took each line for one cell
        content = re.sub(rb'(?m)^"(?:\xef\xbb\xbf)?|"(?=\r?$)', b"", content).replace(b'""', b'"')
    first_lines = content[:HEAD_BYTES].splitlines()[:LOOKED_AT]
    if b'"' not in content and sum(bool(SINGLE.search(line)) for line in first_lines) > ALIKE * (len(first_lines) - 1) > 0:
        content = content.replace(b"'", b'"')
    comments = COMMENTS.match(content)
    assert comments is not None  # it matches nothing, too
    content = content if "skiprows" in told else content[comments.end() :]
    head = content[:HEAD_BYTES].decode(errors="ignore").split("\n", LOOKED_AT)
    lines = [line.rstrip("\r") for line in (head if len(head) <= LOOKED_AT and len(content) <= HEAD_BYTES else head[:-1])]
    separator = told.get("sep") or told.get("delimiter") or (comments["sep"] or b"").decode() or separator_of(lines)
    rows = _cells(lines, separator)
    first = 0 if told.keys() & {"skiprows", "header", "names"} else _first_row(rows)
    rows, filled = rows[first:], [row for row in rows[first:] if row]
    header = has_header(filled)
    decimal = told.get("decimal") or decimal_of(filled[1:], separator)
    options: dict[str, Any] = {
        "sep": separator,
        "header": 0 if header else None,
        "skiprows": first,
        "quoting": csv.QUOTE_NONE if separator == "\t" and not _quoted(content) else csv.QUOTE_MINIMAL,
        "skipinitialspace": any(f"{separator} " in line for line in lines),
        "index_col": False,
        "engine": "c",
    }
    if as_text or decimal == ",":
        options |= {"dtype": str, "keep_default_na": not as_text}
    else:
        options |= {"low_memory": False, "dtype": _codes(filled, header)}
    names = filled[0] if header else list(map(str, range(len(filled[0]))))
    longer = [row for row in filled[1:] if len(row) == len(names) + 1]
    if header and len(longer) > ALIKE * len(filled[1:]) and [row[0].strip() for row in longer[:2]] == ["1", "2"]:
        options["names"] = ["Unnamed: 0", *names]  # as R writes tables: the names of rows have no name of their own
    elif separator == SPACES and (widest := max(len(line.split()) for line in content.split(b"\n"))) > len(names):
        options["names"] = [*names, *(f"Unnamed: {place}" for place in range(len(names), widest))]  # remarks at the ends of some rows
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pd.errors.ParserWarning)  # of further cells at the ends of rows, which have no name
        frame = pd.read_csv(io.BytesIO(content), **{name: value for name, value in options.items() if name not in told} | told)
    frame.columns = [str(name).strip() for name in frame.columns]
    frame = frame.mask(frame == "") if as_text else frame
    empty = [name for name in frame.columns if name.startswith("Unnamed") and frame[name].isna().all()]
    frame = frame.drop(columns=empty).dropna(how="all")
    notes = _remarks(source, separator, data, header=header, skipped=first, decimal=decimal)
    if header and any(any(row[len(names) :]) for row in filled[1:]) and "names" not in options:
        notes.append(f"{source.name}: rows have more cells than there are names; those after the last name are not read")
    for name, column in () if as_text else frame.items():
        if isinstance(column.dtype, pd.StringDtype) or column.dtype == object:
            numbers, words = as_numbers(column, decimal=decimal)
            if numbers is not None and not is_code(column):
                frame[name] = numbers
            if numbers is not None and words:
                notes.append(f"{source.name}: column {name}: {', '.join(map(repr, words[:3]))} and empty cells are missing values")
    return (frame.fillna("") if as_text else frame).reset_index(drop=True), tuple(notes)


def _remarks(source: Source, separator: str, data: DataSpec, *, header: bool, skipped: int, decimal: str) -> list[str]:
    lines = list(source.notes())
    if not {"sep", "delimiter"} & data.told.keys() and separator not in (",", "\t"):
        lines.append(f"{source.name}: columns are separated by {'spaces' if separator == SPACES else repr(separator)}")
    if skipped:
        lines.append(f"{source.name}: the table begins after {skipped} other line{'s' * (skipped > 1)}")
    if not header and not data.told.get("names"):
        lines.append(f"{source.name}: there is no line of names, so columns are numbered from 0")
    if decimal == "," and "decimal" not in data.told:
        lines.append(f"{source.name}: decimals have a comma")
    return lines


def separator_of(lines: Sequence[str]) -> str:
    """The separator that splits most of the first lines into as many cells, and into the most of them."""
    kept = [line for line in lines if line.strip()]
    best, most, alike = ",", 1, 0
    for separator in SEPARATORS:
        sizes = Counter(len(row) for row in _cells(kept, separator))
        usual, many = sizes.most_common(1)[0] if sizes else (1, 0)
        # Lines before the table, and after it, may differ. Decimal commas split all lines alike, too, but for that of the names.
        if usual > 1 and (many, usual) > (alike, most) and many >= ALIKE * len(kept) - 8:
            best, most, alike = separator, usual, many
    if most == 1 and kept:
        first, *rest = [len(row) for row in _cells(kept, SPACES)]
        if first > 1 and len(set(rest)) <= 1 and set(rest) <= {first, first + 1}:  # rows may have names, and their column none
            return SPACES
        words = [word for line in kept for word in line.split()]
        usual, many = Counter([first, *rest]).most_common(1)[0]
        if usual > 2 and many >= ALIKE * len(kept) - 8 and sum(bool(NUMBER.fullmatch(word)) for word in words) > len(words) / 2:
            return SPACES
    return best


def _cells(lines: Sequence[str], separator: str) -> list[list[str]]:
    if separator == SPACES:
        return list(csv.reader((" ".join(line.split()) + "\n" for line in lines), delimiter=" "))
    if len(separator) > 1:
        return [re.split(separator, line.strip()) if line.strip() else [] for line in lines]
    if separator == "\t":
        return [[cell.strip('"') for cell in line.split(separator)] if line.strip() else [] for line in lines]
    return list(csv.reader((f"{line}\n" for line in lines), delimiter=separator, skipinitialspace=True))


def _first_row(rows: Sequence[Sequence[str]]) -> int:
    """How many lines come before the table: those at the top with other than the usual number of cells."""
    sizes = Counter(len(row) for row in rows if row)
    usual = sizes.most_common(1)[0][0] if sizes else 0
    if usual < 2:
        return 0

    def begins(place: int) -> bool:
        """True for the line of names, which may lack the separator at its end that rows have, or the name of an index."""
        short = len(rows[place]) == usual - 1
        title = short and usual == 2 and has_header([row for row in rows[place + 1 :] if row])
        return len(rows[place]) in (usual, usual + 1) or (short and not title)

    first = next((place for place in range(len(rows)) if begins(place)), 0)
    return first if first < len(rows) - 1 else 0


def has_header(rows: Sequence[Sequence[str]]) -> bool:
    """True if the first row has names: hardly a number in it, and no cell that stands further down in its column as well."""
    if len(rows) < 2:
        return True
    head = [cell.strip() for cell in rows[0]]
    later = [[row[place].strip() for row in rows[1:] if place < len(row)] for place in range(len(head))]
    filled = [cell for cell in head if cell]
    valued = sum(bool(NUMBER.fullmatch(cell) or DATE.fullmatch(cell)) for cell in filled)
    if len(head) > 8 and valued > len(head) - 7 and not (head[0] and (NUMBER.fullmatch(head[0]) or DATE.fullmatch(head[0]))):
        return True  # times, a column each
    if any(not cell and all(column) for cell, column in zip(head, later, strict=True)):
        return True  # the column without a name has those of the rows
    above = _above_values(head, later)
    if sum(above) > len(above) / 2:
        return True
    if above and not any(above) and not all(YEAR.fullmatch(cell) for cell in filled if NUMBER.fullmatch(cell)):
        return False  # numbers above numbers
    if 2 * valued > len(filled) or any(len(cell.split()) > MOST_WORDS for cell in head):
        return False
    return not any(
        cell and cell in column and (not NUMBER.fullmatch(cell) or len(set(column)) <= MOST_LABELS)
        for cell, column in zip(head, later, strict=True)
    )


def _above_values(head: Sequence[str], later: Sequence[Sequence[str]]) -> list[bool]:
    """Of each column that holds numbers or dates, whether something else stands above them."""
    return [
        not (NUMBER.fullmatch(cell) or DATE.fullmatch(cell))
        for cell, column in zip(head, later, strict=True)
        if any(column) and all(_is_value(each) for each in column if each)
    ]


def _is_value(cell: str) -> bool:
    return bool(re.fullmatch(r"[-+$€£]?[\d.,]*\d[\d.,]*\s?%?", cell) or DATE.fullmatch(cell)) or cell.lower() in MISSING


def decimal_of(rows: Sequence[Sequence[str]], separator: str) -> str:
    """The mark before decimals in the first rows: a comma if commas cannot stand between thousands, or if columns are separated by `;`."""
    cells = [cell.strip() for row in rows for cell in row]
    with_commas = [cell for cell in cells if re.fullmatch(r"[-+]?[\d.]*\d,\d+ ?%?", cell)]
    if not with_commas:
        return "."
    grouped = all(re.fullmatch(r"[-+]?[1-9]\d{0,2}(,\d{3})+ ?%?", cell) for cell in with_commas)
    pointed = any(re.fullmatch(r"[-+]?\d+\.\d+", cell) and not re.fullmatch(r"[-+]?\d{1,3}(\.\d{3})+", cell) for cell in cells)
    return "," if not grouped or (separator == ";" and not pointed) else "."


def _quoted(content: bytes) -> bool:
    """True if quotes are around whole cells between tabs, so that they are not part of the text."""
    cells = (cell for line in content.splitlines() if b'"' in line for cell in line.split(b"\t"))
    return all(not cell.startswith(b'"') or (len(cell) > 1 and cell.endswith(b'"')) for cell in cells)


def _codes(rows: Sequence[Sequence[str]], header: bool) -> dict[Any, type]:
    """Columns of digits that begin with a zero, which are codes and no numbers."""
    width = len(rows[0]) if rows else 0
    columns = range(width)
    texts = [place for place in columns if any(place < len(row) and CODE.fullmatch(row[place].strip()) for row in rows[1:])]
    names = [cell.strip() for cell in rows[0]] if header else list(map(str, columns))
    unique = [place for place in texts if names.count(names[place]) == 1 and names[place]]
    return {(rows[0][place] if header else place): str for place in unique}
