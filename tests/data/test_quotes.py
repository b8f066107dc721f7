"""A quote that is left open in a CSV file is refused with its row; every other use of quotes is read as Arrow reads it."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.data.files.quotes import check_quotes
from carrywave.data.files.rows import CsvRows
from carrywave.data.files.source import Source
from carrywave.data.tables.table import read_table
from carrywave.errors import DataError


def written(folder: Path, text: str, block_bytes: int = 1 << 20) -> Source:
    (folder / "a.csv").write_text(text, newline="")
    return Source("a.csv", folder / "a.csv", "csv", block_bytes=block_bytes)


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 1 << 20])
def test_a_quote_that_is_never_closed_is_refused_with_its_row(tmp_path: Path, block_bytes: int) -> None:
    lines = [f"2024-01-{day:02},{day}.0,{chr(34) + '5 inch' if day == 20 else 'ok'}" for day in range(1, 31)]
    source = written(tmp_path, "ds,y,note\n" + "\n".join(lines) + "\n", block_bytes)
    for read in (lambda: read_table(source), lambda: list(CsvRows(source, False))):
        with pytest.raises(DataError, match=r"row 20 \(line 21\) opens a quote that is never closed: '\"5 inch'; close it") as refused:
            read()
        assert "\n" not in str(refused.value)


def test_two_open_quotes_do_not_hide_the_rows_between_them(tmp_path: Path) -> None:
    rows = [f"{n},{chr(34) + '5 inch' if n in (4, 8) else 'ok'}" for n in range(12)]
    with pytest.raises(DataError, match=r"row 5 .* is closed only in a later row"):
        read_table(written(tmp_path, "y,note\n" + "\n".join(rows) + "\n"))


@pytest.mark.parametrize("block_bytes", [1, 2, 5, 1 << 20])
@pytest.mark.parametrize(
    ("text", "rows", "lines"),
    [
        ('y,note\n1,"a\nb"\n2,c\n', 2, True),
        ('y,note\n1,"a ""quoted"" word"\n2,""\n', 2, False),
        ('y,note\n1,5" pipe\n2,c\n', 2, False),
        ('y,note\n1,"a"', 1, False),
        ('"y","note"\r\n1,"x, z"\r\n', 1, False),
        ('\ufeff"y",note\n1,"a\r\n"\n', 1, True),
        ('y,note\n1,"a""\n"\n2,b\n', 2, True),
    ],
)
def test_other_quotes_are_read(tmp_path: Path, text: str, rows: int, lines: bool, block_bytes: int) -> None:
    source = written(tmp_path, text, block_bytes)
    assert check_quotes(source, ",") is lines
    assert read_table(source)[0].num_rows == rows


@given(
    cells=st.lists(st.lists(st.text('a," \n', max_size=5), min_size=2, max_size=2), min_size=1, max_size=6), block_bytes=st.integers(1, 40)
)
def test_what_csv_writes_is_never_refused(tmp_path_factory: pytest.TempPathFactory, cells: list[list[str]], block_bytes: int) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([["one", "two"], *cells])
    source = written(tmp_path_factory.getbasetemp(), text.getvalue(), block_bytes)
    assert check_quotes(source, ",") == any("\n" in cell for row in cells for cell in row)


def test_a_cell_with_line_ends_may_lie_across_the_blocks_of_the_parser(tmp_path: Path) -> None:
    long = "word\n" * 400_000  # more than the block that Arrow parses at a time
    table, _ = read_table(written(tmp_path, f'y,note\n1,"{long}"\n2,b\n'))
    assert table["note"].to_pylist() == [long, "b"]
