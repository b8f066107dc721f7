"""Dates as text: the year first is read, the year last if the day can be told from the month; other forms and broken ones are refused,
and words are taken in the order of the file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from carrywave.data.python_inputs import from_python, series_of
from carrywave.data.tables.columns import ColumnChoice
from carrywave.data.tables.table import Table, arrange
from carrywave.errors import DataError
from carrywave.spec.spec import Spec

DAYS = pd.date_range("2024-01-01", periods=60)


def arranged(times: list[str], label: str = "ds", **choice: Any) -> Table:
    return arrange(pa.table({label: times, "y": np.arange(float(len(times)))}), "t.csv", ColumnChoice(**choice))


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", " %Y-%m-%d ", "%Y/%m/%d 00:00", "%Y/%-m/%-d"])
@pytest.mark.parametrize("label", ["ds", "when"])
def test_the_year_first_is_read(form: str, label: str) -> None:
    table = arranged(list(DAYS.strftime(form))[::-1], label)
    assert (table.frequency, table.values[:, 0].tolist()) == ("D", list(range(59, -1, -1)))
    assert str((table.ahead(0, 1) or [""])[0]).startswith("2024-03-01")


@pytest.mark.parametrize(
    ("form", "first"),
    [
        ("%d/%m/%Y", "day"),
        ("%m/%d/%Y", "month"),
        ("%d.%m.%Y", "day"),
        ("%-d.%-m.%Y", "day"),
        ("%d-%m-%Y", "day"),
        ("%d.%m.%Y 00:00", "day"),
    ],
)
@pytest.mark.parametrize("label", ["ds", "when"])
def test_the_year_last_is_read_if_a_day_above_12_tells_the_order(form: str, first: str, label: str) -> None:
    table = arranged(list(DAYS.strftime(form))[::-1], label)
    assert (table.frequency, table.values[:, 0].tolist()) == ("D", list(range(59, -1, -1)))
    assert str((table.ahead(0, 1) or [""])[0]).startswith("2024-03-01")
    assert table.notes[1].endswith(f"read with the {first} first")


@pytest.mark.parametrize(
    ("offset", "written"), [("+01:00", "+01:00"), ("-0330", "-03:30"), ("+05", "+05:00"), ("Z", "+00:00"), ("+00:00", "+00:00")]
)
def test_an_offset_from_utc_is_kept(offset: str, written: str) -> None:
    table = arranged([f"2024-01-01T{hour:02d}:00:00{offset}" for hour in range(20)], calendar=("hour",))
    assert table.ahead(0, 1) == [f"2024-01-01 20:00:00{written}"]
    assert table.values[:, 1].tolist() == pytest.approx(np.sin(2 * np.pi * np.arange(20) / 24).tolist())
    assert len(table.notes) == 1


def test_offsets_that_differ_are_read_in_utc_and_said() -> None:
    hours = pd.date_range("2024-03-30 12:00", periods=30, freq="h", tz="Europe/Berlin")
    table = arranged([hour.isoformat() for hour in hours])
    assert table.ahead(0, 1) == ["2024-03-31 17:00:00+00:00"]
    assert "different offsets from UTC (+01:00 and +02:00): data.calendar and forecasts are in UTC" in table.notes[1]
    days = pd.date_range("2024-03-20", periods=30, tz="Europe/Berlin")
    with pytest.raises(DataError, match=r"irregular: 2024-03-31T00.* is followed by .*; write local times without offsets"):
        arranged([day.isoformat() for day in days])


def test_a_calendar_that_was_read_in_utc_in_training_is_read_so_of_other_data() -> None:
    hours = pd.date_range("2024-10-26 20:00", periods=24, freq="h", tz="Europe/Berlin")  # clocks are set back in between
    zoned = pd.DataFrame({"ds": hours, "y": range(24)})
    spec = Spec.model_validate(
        {"task": "forecasting", "data": {"share": 0, "horizon": 1, "calendar": ["hour"]}, "batch": {"lanes": 1, "steps": 4}}
    )
    for train, utc in ((zoned.assign(ds=hours.map(str)), True), (zoned, False)):
        codec = from_python(train, spec).codec
        assert codec.utc is utc
        for part in (zoned[-9:], zoned[-9:].assign(ds=hours[-9:].map(str))):  # at +01:00 alone
            table = series_of(part, codec, spec)
            clock = hours[-9:].tz_convert("UTC") if utc else hours[-9:]
            sines = np.sin(2 * np.pi * clock.hour.to_numpy() / 24)
            np.testing.assert_allclose(table.values[:, codec.columns.index("hour_sin")], sines, atol=1e-12)  # of numbers up to 1
            said = "data: data.calendar and forecasts are in UTC, as in training, where times have different offsets from it"
            assert (said in table.notes) is utc
            assert table.ahead(0, 1) == ["2024-10-27 18:00:00+00:00" if utc else "2024-10-27 19:00:00+01:00"]


def test_times_of_several_offsets_are_read_by_the_clock_of_training() -> None:
    hours = pd.date_range("2024-10-20", periods=240, freq="h", tz="Europe/Berlin")  # clocks are set back on the 27th
    zoned = pd.DataFrame({"ds": hours, "y": range(240)})
    written = zoned.assign(ds=hours.map(str))
    spec = Spec.model_validate(
        {"task": "forecasting", "data": {"share": 0, "horizon": 1, "calendar": ["hour"]}, "batch": {"lanes": 1, "steps": 4}}
    )
    for train, zone in ((written[:100], "+02:00"), (zoned, "Europe/Berlin"), (zoned.assign(ds=hours.tz_convert("UTC")), "UTC")):
        codec = from_python(train, spec).codec
        assert (codec.zone, codec.utc) == (zone, False)
        table = series_of(written, codec, spec)
        clock = hours.tz_convert(zone)
        sines = np.sin(2 * np.pi * clock.hour.to_numpy() / 24)
        np.testing.assert_allclose(table.values[:, codec.columns.index("hour_sin")], sines, atol=1e-12)  # of numbers up to 1
        fact = "data: column ds has times with different offsets from UTC (+01:00 and +02:00)"
        assert f"{fact}: data.calendar and forecasts are in {zone}, as in training" in table.notes
        assert table.ahead(0, 1) == [str(clock[-1] + pd.Timedelta("1h"))]


def test_times_by_another_clock_than_that_of_training_are_told() -> None:
    hours = pd.date_range("2024-10-20", periods=240, freq="h", tz="Europe/Berlin")
    local, utc, naive = (pd.DataFrame({"ds": each, "y": range(240)}) for each in (hours, hours.tz_convert("UTC"), hours.tz_localize(None)))
    naive, mixed = naive[:100], local.assign(ds=hours.map(str))
    spec = Spec.model_validate(
        {"task": "forecasting", "data": {"share": 0, "horizon": 1, "calendar": ["hour"]}, "batch": {"lanes": 1, "steps": 4}}
    )
    taken = "column ds has times without an offset; data.calendar takes them for times in UTC, as those in training are"
    is_in = "data.calendar and forecasts are in {}, as the times in column ds; those in training are in {}".format
    for train, other, told in (
        (mixed, naive, taken),
        (utc, naive, taken),
        (utc, local, is_in("Europe/Berlin", "UTC")),
        (local, utc, is_in("UTC", "Europe/Berlin")),
        (local, naive, None),
        (naive, local, None),
        (local, mixed[-50:], None),
        (utc, utc, None),
    ):
        notes = series_of(other, from_python(train, spec).codec, spec).notes
        assert [note for note in notes if "data.calendar" in note] == ([] if told is None else [f"data: {told}"])


def test_days_and_months_that_may_be_either_are_refused_but_with_dots() -> None:
    months = pd.date_range("2024-01-01", periods=12, freq="MS")
    for form in ("%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y"):
        with pytest.raises(
            DataError, match=r"'01.01.2024', and it cannot be told whether the day or the month comes first; write dates as"
        ):
            arranged(list(months.strftime(form)))
    assert arranged(list(months.strftime("%d.%m.%Y"))).frequency == "M"
    with pytest.raises(DataError, match="it cannot be told whether the day or the month comes first"):
        arranged(["13/01/2024", "01/13/2024"])


@pytest.mark.parametrize("broken", ["30.02.2024", "n/a", "2024-02-10", "5.2"])
def test_a_broken_date_among_those_with_the_year_last_is_named_with_its_row(broken: str) -> None:
    texts = list(DAYS.strftime("%d.%m.%Y"))
    texts[40] = broken
    with pytest.raises(DataError, match=f"row 41, column ds is '{broken}', which is not a date, or not in the format of the others"):
        arranged(texts)


@pytest.mark.parametrize("label", ["ds", "when"])
@pytest.mark.parametrize("form", ["%d-%m-%y", "%d %B %Y", "%b %d, %Y", "%d-%b-%y", "%Y-%m-%d 01:00 AM"])
def test_other_forms_are_refused_even_where_they_are_in_order_as_text(form: str, label: str) -> None:
    texts = list(DAYS.strftime(form))
    for given in (texts, sorted(texts)):
        message = rf"column {label} contains '.*', a date in an unsupported format; write dates as 2024-01-31 "
        with pytest.raises(DataError, match=message) as refused:
            arranged(given, label)
        assert "\n" not in str(refused.value)


def test_other_forms_count_rows_as_they_stand_where_that_is_asked_for() -> None:
    texts = list(DAYS.strftime("%d %B %Y"))
    table = arranged(texts, frequency="none")
    assert table.values[:, 0].tolist() == list(range(60))
    assert table.notes[0] == "t.csv: reading y, in file order"
    assert "rows are kept in file order" in table.notes[1]


@pytest.mark.parametrize("text", ["Q1 2024", "Jan 2024", "2024/01", "20240131"])
def test_so_are_months_quarters_and_days_without_marks(text: str) -> None:
    with pytest.raises(DataError, match="a date in an unsupported format"):
        arranged([text])


@pytest.mark.parametrize("frequency", [None, "none"])
@pytest.mark.parametrize("row", [0, 30, 59])
@pytest.mark.parametrize("broken", ["2024-02-30", "n/a", "2024-1", "31/12/2024"])
def test_a_broken_date_among_good_ones_is_named_with_its_row(broken: str, row: int, frequency: str | None) -> None:
    texts = list(DAYS.strftime("%Y-%m-%d"))
    texts[row] = broken
    for label in ("ds", "when"):
        with pytest.raises(DataError, match=f"row {row + 1}, column {label} is '{broken}', which is not a date"):
            arranged(texts, label, frequency=frequency)


def test_a_month_that_there_is_not_is_named() -> None:
    with pytest.raises(DataError, match="row 3, column ds is '2024-13', which is not a date"):
        arranged(["2024-11", "2024-12", "2024-13"])


def test_words_in_order_are_taken_and_told() -> None:
    table = arranged(["t01", "t02", "t10"])
    assert table.notes[0] == "t.csv: reading y, in file order"
    assert "contains 't01', which is not a recognised date: rows are kept in file order" in table.notes[1]
    with pytest.raises(DataError, match="row 3, column ds is 't10', which cannot be ordered in time"):
        arranged(["t1", "t2", "t10"])
    assert arranged(["t1", "t2", "t10"], frequency="none").values[:, 0].tolist() == [0, 1, 2]


def test_an_order_that_is_known_from_other_dates_reads_those_that_may_be_either() -> None:
    days = [f"0{day}/03/2024" for day in range(1, 8)]
    assert arranged(days, date_order="day").ahead(0, 1) == ["2024-03-08"]
    with pytest.raises(DataError, match="it cannot be told"):
        arranged(days)
    told = arranged(list(DAYS.strftime("%m/%d/%Y")), date_order="day")  # what the dates themselves tell counts
    assert told.notes[1].endswith("read with the month first")
    with pytest.raises(DataError, match=r"row 3, column ds is '5\.3', which is not a date"):
        arranged([*days[:2], "5.3", *days[2:]], date_order="day")
