"""How far apart times are, told from all of them: every rhythm goes on as it was, gaps are told, and what is irregular is refused."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from carrywave.data.python_inputs import from_python, series_of
from carrywave.data.tables.frequency import parse
from carrywave.errors import DataError, SpecError
from carrywave.spec.load import parse as parse_spec
from carrywave.spec.spec import Spec


def spec(**data: Any) -> Spec:
    return Spec.model_validate({"task": "forecasting", "data": {"share": 0, "horizon": 1, **data}, "batch": {"lanes": 1, "steps": 4}})


def ahead(times: Any, count: int = 2, **data: Any) -> tuple[str | None, Any, tuple[str, ...]]:
    """The frequency, the times ahead of the end, and what is said of gaps."""
    frame = pd.DataFrame({"date": times, "a": np.arange(len(times), dtype=float)})
    found = from_python(frame, spec(**data))
    return found.codec.frequency, series_of(frame, found.codec, spec(**data)).ahead(0, count), found.notes[1:]


def days(*texts: str) -> list[dt.date]:
    return [dt.date.fromisoformat(text) for text in texts]


RHYTHMS: dict[str, tuple[Any, str, list[Any]]] = {
    "numbers": ([1, 3, 5], "2", [7, 9]),
    "decimals": (np.arange(30) * 0.1, "0.1", [3.0, 3.1]),
    "hours": (pd.date_range("2024-02-28 20:00", periods=4, freq="h"), "h", ["2024-02-29 00:00:00", "2024-02-29 01:00:00"]),
    "quarters of an hour": (pd.date_range("2024-01-01", periods=9, freq="15min"), "15min", ["2024-01-01 02:15:00", "2024-01-01 02:30:00"]),
    "days": (days("2024-02-27", "2024-02-28"), "D", ["2024-02-29", "2024-03-01"]),
    "weeks": (days("2024-01-01", "2024-01-08", "2024-01-15"), "W", ["2024-01-22", "2024-01-29"]),
    "a day of the month": (days("2023-11-15", "2023-12-15", "2024-01-15"), "M", ["2024-02-15", "2024-03-15"]),
    "ends of months": (days("2023-11-30", "2023-12-31", "2024-01-31"), "M", ["2024-02-29", "2024-03-31"]),
    "the 30th, or the last": (days("2023-12-30", "2024-01-30", "2024-02-29"), "M", ["2024-03-30", "2024-04-30"]),
    "ends of February": (days("2022-02-28", "2023-02-28", "2024-02-29"), "Y", ["2025-02-28", "2026-02-28"]),
    "quarters": (days("2023-07-01", "2023-10-01", "2024-01-01"), "Q", ["2024-04-01", "2024-07-01"]),
    "months as text": (["2023-11", "2023-12", "2024-01"], "M", ["2024-02", "2024-03"]),
    "dates as text": (["2024-02-27", "2024-02-28"], "D", ["2024-02-29", "2024-03-01"]),
    "moments as text": (["2024-02-28 22:00", "2024-02-28 23:00"], "h", ["2024-02-29 00:00:00", "2024-02-29 01:00:00"]),
    "business days": (pd.bdate_range("2024-01-01", periods=12).date, "B", ["2024-01-17", "2024-01-18"]),
    "business days, to a Friday": (pd.bdate_range("2024-01-01", periods=10).date, "B", ["2024-01-15", "2024-01-16"]),
    "every second business day": (pd.bdate_range("2024-01-01", periods=20, freq="2B").date, "2B", ["2024-02-26", "2024-02-28"]),
    "Sunday to Thursday": (
        pd.bdate_range("2024-01-01", periods=24, freq="C", weekmask="Sun Mon Tue Wed Thu").date,
        "Mon Tue Wed Thu Sun",
        ["2024-02-04", "2024-02-05"],
    ),
    # The night of 2024-03-31 is an hour short in Berlin: days are even by its clocks, hours by the sun.
    "days of a zone": (
        pd.date_range("2024-03-28", periods=3, freq="D", tz="Europe/Berlin"),
        "D",
        ["2024-03-31 00:00:00+01:00", "2024-04-01 00:00:00+02:00"],
    ),
    # Noon by UTC is an hour later on the clocks of Berlin from 2024-03-31 on.
    "days of UTC in a zone": (
        pd.date_range("2024-03-29 12:00", periods=4, freq="D", tz="UTC").tz_convert("Europe/Berlin"),
        "D",
        ["2024-04-02 14:00:00+02:00", "2024-04-03 14:00:00+02:00"],
    ),
    "hours of a zone": (
        pd.date_range("2024-03-30 22:00", periods=4, freq="h", tz="Europe/Berlin"),
        "h",
        ["2024-03-31 03:00:00+02:00", "2024-03-31 04:00:00+02:00"],
    ),
}


@pytest.mark.parametrize("kind", RHYTHMS)
def test_times_go_on_as_they_were(kind: str) -> None:
    times, frequency, expected = RHYTHMS[kind]
    assert ahead(times) == (frequency, expected, ())
    assert parse(frequency).text == frequency


def test_gaps_are_told_with_their_place_and_change_nothing() -> None:
    every = pd.date_range("2024-01-01", periods=20).date
    frequency, times, [said] = ahead(np.delete(every, [16, 18]))  # the last rows are two days apart
    assert (frequency, times) == ("D", ["2024-01-21", "2024-01-22"])
    assert "2 rows are missing in column date (frequency D), in 2 places, the first between 2024-01-16 and 2024-01-18 (row 17)" in said
    business = np.delete(pd.bdate_range("2024-01-01", periods=30).date, 5)
    frequency, times, [said] = ahead(business)
    assert (frequency, times) == ("B", ["2024-02-12", "2024-02-13"])
    assert "1 row is missing in column date (frequency B), between 2024-01-05 and 2024-01-09 (row 6)" in said


def test_gaps_of_a_series_among_several() -> None:
    rows = [("p", day, 1.0) for day in (1, 2, 3, 4)] + [("q", day, 1.0) for day in (1, 2, 4)]
    frame = pd.DataFrame(rows, columns=["unique_id", "ds", "y"])
    found = from_python(frame, spec())
    assert found.codec.frequency == "1"
    assert "between 2 and 4 in series q (row 7)" in found.notes[1]


@pytest.mark.parametrize("times", [days("2024-01-01", "2024-01-02", "2024-01-05", "2024-01-11", "2024-01-13"), [1, 2, 5, 11, 13]])
def test_irregular_times_are_refused_unless_rows_are_counted(times: list[Any]) -> None:
    with pytest.raises(DataError, match=r"the times in column date are irregular: .* is followed by .* \(row 3\); .* data.frequency=none"):
        ahead(times)
    assert ahead(times, frequency="none") == ("none", None, ())


def hours_of(keep: Any) -> Any:
    every = pd.date_range("2024-01-01", periods=24 * 40, freq="h")
    return every[keep(every)]


@pytest.mark.parametrize(
    "times",
    [
        hours_of(lambda t: (t.hour >= 9) & (t.hour < 17)),
        hours_of(lambda t: t.day_of_week < 5),
        pd.date_range("2024-01-01", periods=80, freq="bh"),
    ],
    ids=["by day", "on weekdays", "business hours"],
)
def test_gaps_at_the_same_time_of_every_day_or_week_are_no_gaps(times: Any) -> None:
    with pytest.raises(DataError, match=r"the times in column date are irregular: .* is followed by "):
        ahead(times)
    frequency, following, [said] = ahead(times, frequency="h")
    assert (frequency, following[0]) == ("h", str(times[-1] + pd.Timedelta(hours=1)))
    assert "rows are missing" in said


def test_a_gap_that_several_series_share_is_one() -> None:
    def found(times: Any) -> tuple[str | None, str]:
        rows = [(series, time, 1.0) for series in "abcd" for time in times]
        found = from_python(pd.DataFrame(rows, columns=["unique_id", "ds", "y"]), spec())
        return found.codec.frequency, found.notes[1]

    hourly = pd.date_range("2024-01-01", periods=24 * 6, freq="h")
    frequency, said = found(np.delete(hourly, [50, 51]))  # an outage of all four
    assert (frequency, "8 rows are missing" in said) == ("h", True)
    frequency, said = found(np.delete(pd.date_range("2024-01-01", periods=12), 6))  # one Sunday
    assert (frequency, "4 rows are missing" in said) == ("D", True)
    with pytest.raises(DataError, match="are irregular"):
        found(hours_of(lambda t: (t.hour >= 9) & (t.hour < 17))[: 8 * 4])  # three nights


def test_gaps_that_come_by_chance_are_gaps() -> None:
    chance = np.random.default_rng(1)
    for every in (pd.date_range("2024-01-01", periods=3 * 1440, freq="min"), pd.date_range("2024-01-01", periods=24 * 30, freq="h")):
        frequency, following, _ = ahead(every[chance.random(len(every)) < 0.9].union(every[-1:]))
        assert (frequency, following[0]) == (every.freqstr, str(every[-1] + every.freq))


def test_a_frequency_that_is_set_is_checked_and_used() -> None:
    monday_to_friday = days("2024-01-01", "2024-01-02", "2024-01-03", "2024-01-04", "2024-01-05")
    assert ahead(monday_to_friday, frequency="B")[1] == ["2024-01-08", "2024-01-09"]
    assert ahead(monday_to_friday)[1] == ["2024-01-06", "2024-01-07"]
    with pytest.raises(DataError, match="row 3, column date is 2024-01-06 after 2024-01-05, which is not a whole number of B steps"):
        ahead(days("2024-01-04", "2024-01-05", "2024-01-06"), frequency="B")
    with pytest.raises(DataError, match="not a whole number of MS steps"):
        ahead(days("2024-01-31", "2024-02-29"), frequency="MS")
    assert ahead([0.0, 1.0, 2.0], frequency=0.5)[1] == [2.5, 3.0]
    with pytest.raises(DataError, match=r"column date contains numbers, which data\.frequency=D does not fit"):
        ahead([1, 2, 3], frequency="D")


@pytest.mark.parametrize("text", ["fortnight", "0D", "D5", "", "Mon Foo"])
def test_an_unknown_frequency_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"frequency .* is unknown; use for example 15min"):
        parse_spec({"task": "forecasting", "data": {"frequency": text}})


@pytest.mark.parametrize(
    ("written", "text"),
    [("W-MON", "W"), ("H", "h"), ("30T", "30min"), ("QS-JAN", "QS"), ("A", "Y"), ("24h", "D"), ("90s", "90s"), ("5", "5")],
)
def test_names_as_pandas_has_them(written: str, text: str) -> None:
    assert parse(written).text == text


def test_new_data_must_follow_the_rhythm_of_the_training_data(tmp_path: Path) -> None:
    frame = pd.DataFrame({"date": pd.bdate_range("2024-01-01", periods=12), "a": np.arange(12.0)})
    codec = from_python(frame, spec()).codec
    two = pd.DataFrame({"date": pd.to_datetime(["2024-03-07", "2024-03-08"]), "a": [1.0, 2.0]})
    assert series_of(two, codec, spec()).ahead(0, 1) == ["2024-03-11 00:00:00"]  # two rows tell nothing of weekends, train does
    weekend = two.assign(date=pd.to_datetime(["2024-03-08", "2024-03-09"]))
    with pytest.raises(DataError, match=r"space rows as in the training data \(B\)"):
        series_of(weekend, codec, spec())


def test_text_that_is_no_date_has_no_times_ahead_and_that_is_said() -> None:
    frequency, times, [said] = ahead(["day 1", "day 2", "day 3"])
    assert (frequency, times) == (None, None)
    assert "column date contains 'day 1', which is not a recognised date: rows are kept in file order" in said


def test_times_that_can_only_be_put_in_order_say_so() -> None:
    fine = pd.to_datetime([f"2024-01-01 00:00:00.{number:09}" for number in (1, 2, 3)])
    clocks = [dt.time(0), dt.time(1), dt.time(2)]
    for column, what in ((fine, "times finer than a microsecond"), (clocks, "times of day without dates")):
        frequency, times, [said] = ahead(column)
        assert (frequency, times) == (None, None)
        assert said.endswith(f"column date contains {what}, so forecasts have no times; write dates as 2024-01-31 or 2024-01-31 23:00:00")


@pytest.mark.parametrize(
    "times",
    [
        days("9999-12-26", "9999-12-27", "9999-12-28"),
        ["9999-09", "9999-10", "9999-11"],
        days("9995-01-01", "9996-01-01", "9997-01-01"),
        days("9999-12-21", "9999-12-22", "9999-12-23", "9999-12-24", "9999-12-27"),
        ["9999-12-30 20:00Z", "9999-12-30 21:00Z", "9999-12-30 22:00Z"],
    ],
)
def test_times_beyond_the_year_9999_are_refused(times: list[Any]) -> None:
    assert ahead(times, 1)[1] is not None
    with pytest.raises(DataError, match=r"forecasting 40 steps of \w+ goes beyond the year 9999; check the dates, reduce data\.horizon"):
        ahead(times, 40)


MONTHLY = [pd.Timestamp("2015-01-28") + pd.DateOffset(months=month) for month in range(40)]
QUARTERLY = [pd.Timestamp("2000-03-30") + pd.DateOffset(months=3 * quarter) for quarter in range(40)]
ENDS = list(pd.date_range("2015-01-31", periods=40, freq="ME"))


@pytest.mark.parametrize(
    ("trained", "given", "wanted"),
    [
        (MONTHLY, ["2025-02-28"], ["2025-03-28", "2025-04-28"]),
        (QUARTERLY, ["2009-06-30", "2009-09-30"], ["2009-12-30", "2010-03-30"]),
        (QUARTERLY, ["2009-12-30"], ["2010-03-30", "2010-06-30"]),
        (ENDS, ["2025-02-28"], ["2025-03-31", "2025-04-30"]),
        (MONTHLY, ["2025-03-31"], ["2025-04-30", "2025-05-31"]),  # not on the day of the training data
    ],
)
def test_the_day_of_the_month_is_that_of_the_training_data(trained: list[Any], given: list[str], wanted: list[str]) -> None:
    codec = from_python(pd.DataFrame({"date": trained, "a": np.arange(40.0)}), spec()).codec
    frame = pd.DataFrame({"date": pd.to_datetime(given), "a": np.arange(float(len(given)))})
    assert series_of(frame, type(codec).from_json(codec.to_json()), spec()).ahead(0, 2) == [f"{day} 00:00:00" for day in wanted]
    assert ("month_days" in codec.to_json()) == (trained is not ENDS)  # what is hashed stays as it was


def test_a_day_of_the_month_that_cannot_be_known_is_refused() -> None:
    both = pd.DataFrame({"unique_id": ["a"] * 40 + ["b"] * 40, "date": [*MONTHLY, *ENDS], "y": np.arange(80.0)})
    codec = from_python(both, spec()).codec
    given = pd.DataFrame({"unique_id": "a", "date": pd.to_datetime(["2025-01-28", "2025-02-28"]), "y": 1.0})
    assert series_of(given, codec, spec()).ahead(0, 1) == ["2025-03-28 00:00:00"]
    with pytest.raises(DataError, match=r"2025-02-28 is the last day of its month.*on day 28 and the last day of each; give more rows"):
        series_of(given[1:], codec, spec()).ahead(0, 1)


def test_a_missing_month_after_the_end_of_february() -> None:
    times = ["2023-02-28", "2023-04-28", *pd.date_range("2023-05-28", periods=9, freq=pd.DateOffset(months=1)).strftime("%Y-%m-%d")]
    frame = pd.DataFrame({"date": times, "a": np.arange(11.0)})
    table = series_of(frame, from_python(frame, spec(missing="forward")).codec, spec(missing="forward"))
    assert table.times is not None
    assert table.times.written(slice(0, 3)) == ["2023-02-28", "2023-03-28", "2023-04-28"]


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint64])
def test_whole_numbers_of_any_size_are_times(kind: Any) -> None:
    low = -100 if np.issubdtype(kind, np.signedinteger) else 0
    assert ahead(np.arange(low, 120, 20, dtype=kind)) == ("20", [120, 140], ())


@pytest.mark.parametrize("first", [np.uint64(2**63), np.int64(2**63 - 50), np.int64(-(2**63) + 1)])
def test_times_that_would_not_fit_in_64_bits_are_refused(first: Any) -> None:
    with pytest.raises(DataError, match=rf"row 1, column date is {first}, beyond 2\*\*62; subtract a common offset"):
        ahead(np.arange(40, dtype=first.dtype) + first)
