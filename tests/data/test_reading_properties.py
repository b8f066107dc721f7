"""Any panel that is written as CSV is read back: series, times, frequency, values and empty cells, however the file is written."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carrywave.data.files.frame_file import read_frame
from carrywave.data.files.source import find
from carrywave.data.tables.choice import ColumnChoice
from carrywave.data.tables.table import Table, arrange
from carrywave.spec.data_spec import DataSpec

# Frequencies, and the layouts that tell their times apart; of those in which day and month could be mistaken for each other, regularity
# tells which it is.
CLOCK = ("%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S", "%d.%m.%Y %H:%M", "%m/%d/%Y %I:%M %p", "%Y%m%d%H%M")
DATED = ("%Y-%m-%d", "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%Y%m%d", "%d-%b-%Y", "%B %d, %Y")
LAYOUTS = {
    "15min": CLOCK[:2],  # of one day alone, any order of day and month is as regular
    **dict.fromkeys(("h", "6h"), CLOCK),
    **dict.fromkeys(("D", "B", "W-MON", "W-FRI", "ME", "BME", "QE-DEC", "YE-JUN"), DATED),
    "MS": (*DATED, "%Y-%m", "%Y%m"),
    "QS-JAN": (*DATED, "%Y-%m"),
    "YS-JAN": (*DATED, "%Y"),
}
NAMES = (["a", "b"], ["north", "málaga, old town"], ["1", "22"])  # of up to three columns that name series
LEAST, MOST = 40, 60  # rows of a series: so many that no other reading of the dates is as regular


@dataclass
class Panel:
    """Series, each a label of one value for each column that names it, with values of columns x and y, NaN where empty."""

    columns: tuple[str, ...]
    frequency: str
    layout: str
    series: dict[tuple[str, ...], pd.DataFrame]


@st.composite
def panels(draw: st.DrawFn) -> Panel:
    frequency = draw(st.sampled_from(sorted(LAYOUTS)))
    names = NAMES[: draw(st.integers(0, 3))]
    labels = list(itertools.product(*names))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    many, empty, gaps = draw(st.integers(LEAST, MOST)), draw(st.sampled_from([0.0, 0.1])), draw(st.sampled_from([0, 1, 3]))
    first = pd.Timestamp("2001-01-01") + pd.Timedelta(days=draw(st.integers(0, 2000)))
    series = {}
    for label in labels:
        times = pd.date_range(first, periods=many, freq=frequency)
        values = np.round(random.normal(50, 2000, (many, 2)), draw(st.integers(0, 3)))
        values[random.random(values.shape) < empty] = np.nan
        values[[0, -1]] = 1.5, 2.5  # an empty row at an end would be none of the series
        kept = np.sort(random.permutation(np.arange(1, many - 1))[: many - 2 - gaps])
        rows = [0, *kept.tolist(), many - 1] if label != labels[0] else range(many)  # the first has all of its rows
        series[label] = pd.DataFrame(values[list(rows)], times[list(rows)], columns=["x", "y"])
    return Panel(tuple(f"name{place}" for place in range(len(names))), frequency, draw(st.sampled_from(LAYOUTS[frequency])), series)


@dataclass
class Writing:
    """How a file is written."""

    separator: str
    decimal: str
    quoting: int
    empty: str
    ends: str
    encoding: str
    time_first: bool  # or the columns that name series
    seed: int  # of the order of its rows

    def __call__(self, panel: Panel) -> bytes:
        """The file of a panel."""
        made = io.StringIO()
        writer = csv.writer(made, delimiter=self.separator, quoting=self.quoting, lineterminator=self.ends)  # type: ignore[arg-type]
        order = slice(None, None, 1 if self.time_first else -1)
        writer.writerow([*["ds", *panel.columns][order], "x", "y"])
        lines = [
            [
                *[time.strftime(panel.layout), *label][order],
                *(self.empty if np.isnan(cell) else str(cell).replace(".", self.decimal) for cell in cells),
            ]
            for label, frame in panel.series.items()
            for time, *cells in frame.itertuples()
        ]
        np.random.default_rng(self.seed).shuffle(lines)
        writer.writerows(lines)
        return made.getvalue().encode(self.encoding)


WRITINGS = st.builds(
    Writing,
    separator=st.sampled_from([",", ";", "\t", "|"]),
    decimal=st.sampled_from([".", ","]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    empty=st.sampled_from(["", "NA", "-"]),
    ends=st.sampled_from(["\n", "\r\n"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "cp1252"]),
    time_first=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)


def series_of(table: Table, columns: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], pd.DataFrame]]:
    """The label, times and cells of each series, NaN where nothing was in the file."""
    cells = table.values if table.unfilled is None else table.unfilled
    assert table.times is not None
    for number, (start, length) in enumerate(zip(table.starts, table.lengths, strict=True)):
        rows, fields = slice(start, start + length), table.fields(number)
        frame = pd.DataFrame(cells[rows], pd.DatetimeIndex(table.times.keys[rows]), columns=list(table.columns))
        yield tuple(str(fields[column]) for column in columns), frame


@settings(max_examples=40)
@given(panel=panels(), writing=WRITINGS)
def test_a_panel_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, panel: Panel, writing: Writing) -> None:
    path = tmp_path_factory.getbasetemp() / "panel.csv"
    path.write_bytes(writing(panel))
    data = DataSpec()
    frame, notes = read_frame(find(str(path), field="data.train"), data)
    table = arrange(frame, "panel.csv", ColumnChoice.of(data, None), notes=notes)
    assert (table.time, set(table.series), table.frequency, table.columns) == ("ds", set(panel.columns), panel.frequency, ("x", "y"))
    found = dict(series_of(table, panel.columns))
    assert set(found) == set(panel.series)
    for label, written in panel.series.items():
        expected = written.reindex(pd.date_range(written.index[0], written.index[-1], freq=panel.frequency))
        assert found[label].index.tolist() == expected.index.tolist()
        np.testing.assert_array_equal(found[label].to_numpy(), expected.to_numpy())
    empty = {name: sum(int(each[name].isna().sum()) for each in panel.series.values()) for name in ("x", "y")}
    assert table.about["missing"] == {name: count for name, count in empty.items() if count}
    assert table.about["rows"] == sum(map(len, panel.series.values()))
