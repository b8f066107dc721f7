"""Tables as people publish them, a few made-up lines of each kind: which columns are times, series and values, and what is missing.

The rule that the cases stand for: the reading under which series and time name each row, and the times are regular, is the right one.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from carrywave.data.files.frame_file import read_frame
from carrywave.data.files.source import find
from carrywave.data.prepare import prepare, series_of
from carrywave.data.tables.choice import ColumnChoice
from carrywave.data.tables.table import Table, arrange
from carrywave.errors import DataError
from carrywave.spec.spec import Spec


def read(path: Path, content: str | bytes, **data: Any) -> Table:
    """The table in a file with this content."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    settings = Spec.model_validate({"task": "forecasting", "data": {"horizon": 1, **data}}).data
    frame, notes = read_frame(find(str(path), field="data.train"), settings)
    return arrange(frame, path.name, ColumnChoice.of(settings, None), notes=notes)


def in_words(about: dict[str, Any]) -> str:
    """What is said of a table for programs, as a sentence; midnight is left out of times."""
    first, last = (None if about[name] is None else about[name].replace(" 00:00:00", "") for name in ("first", "last"))
    parts = [
        f"{about['rows']} rows of {', '.join(about['values'])}",
        f" by {about['time']}" if about["time"] is not None else "",
        f" every {about['frequency']}" if about["frequency"] is not None else "",
        f" from {first} to {last}" if first is not None else "",
        f", {about['number']} series by {' and '.join(about['series'])}" if about["series"] else "",
        f", without {', '.join(f'{count} {name}' for name, count in about['missing'].items())}" if about["missing"] else "",
    ]
    return "".join(parts)


@dataclass
class Case:
    """The content of a file, and what is read of it."""

    content: str | bytes
    about: str
    cells: list[float] = field(default_factory=list)  # the first values of the first column
    told: str = ""  # what a note contains
    data: dict[str, Any] = field(default_factory=dict)


def rows(head: str, form: str, times: Iterable[Any], names: Iterable[Any] = ("",)) -> str:
    """A header, and for each name s, time t and number n a line with a value y."""
    made = [form.format(s=name, t=time, n=n, y=100.5 + 7.25 * (n * n % 11)) for name in names for n, time in enumerate(times)]
    return "\n".join([head, *made, ""])


def wide(head: str, names: str, heads: Iterable[str], end: str = "") -> str:
    """A row for each of three countries, with its values under headers that are times."""
    times = list(heads)
    return rows(f"{head},{','.join(times)}{end}", names + ",{t}" + end, [",".join(f"{n}.5" for n in range(len(times)))], COUNTRIES)


DAYS = [datetime(2021, 3, 1) + timedelta(days=place) for place in range(10)]
LATER = [day + timedelta(days=10) for day in DAYS]  # the day of the month cannot be a month
HOURS = [datetime(2021, 3, 1) + timedelta(hours=place) for place in range(48)]
MONTHS = [datetime(2021 + place // 12, place % 12 + 1, 1) for place in range(14)]
YEARS, COUNTRIES = range(1949, 1959), ("Chile", "Ghana", "Nepal")
CLOCKS = pd.date_range("2021-10-30 22:00", periods=10, freq="h", tz="UTC").tz_convert("Europe/Berlin")
OPEN = pd.bdate_range("2021-03-01", periods=24).drop(["2021-03-17", "2021-03-29"])
DAILY = "10 rows of y by ds every D from 2021-03-01 to 2021-03-10"
LATE = "10 rows of y by ds every D from 2021-03-11 to 2021-03-20"
HOURLY = "48 rows of y by ds every h from 2021-03-01 to 2021-03-02 23:00:00"
AT = "every h from 2021-03-01 to 2021-03-02 23:00:00"
MONTHLY = "every MS from 2021-01-01 to 2022-02-01"
YEARLY = "every YS-JAN from 1949-01-01 to 1958-01-01"
ISO = "{t:%Y-%m-%d},{y}"
M4 = rows("V1," + ",".join(f"V{n}" for n in range(2, 27)), "{t}", ['"H1",' + ",".join(map(str, range(25))), '"H2",1,2,3' + "," * 22])
WORLD_BANK = '"Data Source","World Development Indicators",\n\n"Last Updated Date","2021-05-01",\n\n'

CASES: dict[str, Case] = {
    # As programs for statistics write tables.
    "Rdatasets with rownames and decimal years": Case(
        rows('"rownames","time","value"', '"{n}",{t},{y}', [1949 + round(place / 12, 12) for place in range(24)]),
        "24 rows of value by time every MS from 1949-01-01 to 1950-12-01",
    ),
    "years of two digits, from before 1969": Case(
        rows("date,y", "{t},{y}", [f"{month:02d}/01/{year:02d}" for year in [*range(58, 100), *range(16)] for month in range(1, 13)]),
        "696 rows of y by date every MS from 1958-01-01 to 2015-12-01",
    ),
    "prices, the first of which is of today, with its time alone": Case(
        rows("date,y", "{t},{y}", ["11:34", *(f"{day:%Y/%m/%d}" for day in pd.date_range("2016-01-01", periods=300)[::-1])]),
        "300 rows of y by date every D from 2016-01-01 to 2016-10-26",
    ),
    "decimal quarters": Case(
        rows("rownames,time,value", "{n},{t},{y}", [1960 + place / 4 for place in range(10)]),
        "10 rows of value by time every QS-JAN from 1960-01-01 to 1962-04-01",
    ),
    "write.table of R, whose names of rows have no header": Case(
        "ds y\n" + "".join(f'"{place + 1}" {day:%Y-%m-%d} {place}\n' for place, day in enumerate(DAYS)), DAILY
    ),
    "panel of countries by year": Case(
        rows("Country,year,gdp,pop", "{s},{t},{y},{n}", YEARS, COUNTRIES), f"30 rows of gdp, pop by year {YEARLY}, 3 series by Country"
    ),
    "panel every five years, with names of groups": Case(
        rows("country,continent,year,pop", "{s},{t},{y}", range(1952, 2008, 5), ("Chile,Americas", "Peru,Americas", "Nepal,Asia")),
        "36 rows of pop by year every 5YS-JAN from 1952-01-01 to 2007-01-01, 3 series by country",
    ),
    "shops and items by number": Case(
        rows("date,store,item,sales", "{t:%Y-%m-%d},{s},{n}", DAYS, ("1,1", "1,2", "2,1", "2,2")),
        "40 rows of sales by date every D from 2021-03-01 to 2021-03-10, 4 series by store and item",
    ),
    "a column of measures": Case(
        rows("date,variable,value", "{t:%Y-%m-%d},{s},{y}", MONTHS, ("pce", "pop")),
        f"28 rows of value by date {MONTHLY}, 2 series by variable",
    ),
    "M4: a series a row with V1…, of unequal length": Case(M4, "28 rows of value by time every 1, 2 series by V1"),
    "World Bank: years as headers after a preamble": Case(
        WORLD_BANK + wide("Country Name,Country Code", "{s},{s}", map(str, YEARS), ","),
        f"30 rows of value by time {YEARLY}, 3 series by Country Name",
    ),
    "months as headers": Case(
        wide("region", "{s}", (f"{month:%Y-%m}" for month in MONTHS)), f"42 rows of value by time {MONTHLY}, 3 series by region"
    ),
    "stallion sales: the people of a town are no values of its series": Case(
        rows("agency,sku,volume,date,population", "{s},{y},{t:%Y-%m-%d},{s[1]}2110", MONTHS, ("A1,S1", "A1,S2", "A2,S1", "A2,S2")),
        f"56 rows of volume by date {MONTHLY}, 4 series by agency and sku",
        told="population (one value in each series; data.static)",
    ),
    "alcohol since 1890 of Our World in Data: countries tell years apart that are not regular": Case(
        rows("Entity,Year,Wine (%),Beer (%)", "{s},{t},{y},{n}", (1890, 1929, 1964, 1984, 2014), COUNTRIES),
        "15 rows of Wine (%), Beer (%) by Year from 1890-01-01 to 2014-01-01, 3 series by Entity",
        told="irregular",
    ),
    "chicken weights: days that are not regular, and chickens by number one after the other": Case(
        rows("weight,Time,Chick,Diet", "{y},{t},{s}", [0, 2, 4, 9, 20, 21], ("1,1", "2,1", "3,2")),
        "18 rows of weight by Time, 3 series by Chick",
        told="Diet (one value in each series; data.static)",
    ),
    "excess deaths: the ends of weeks name no series": Case(
        rows("country,start,end,week,deaths", "{s},{t:%Y-%m-%d,%Y-%m-}28,{n},{y}", DAYS, COUNTRIES),
        "30 rows of week, deaths by start every D from 2021-03-01 to 2021-03-10, 3 series by country",
    ),
    "births in Australia: months beside years as headers": Case(
        rows(f"State,Month of occurence,{','.join(map(str, YEARS))}", "{s},{t}" + ",{y}" * 10, ("Total", "January", "March"), COUNTRIES),
        f"90 rows of value by time {YEARLY}, 9 series by State and Month of occurence",
    ),
    # How times are written.
    "tree rings: years from the first on, latest first": Case(
        rows("year,n_tree", "{t},{y}", range(2000, 0, -1)), "2000 rows of n_tree by year every 1", cells=[100.5 + 7.25 * (1999**2 % 11)]
    ),
    "colonies of bees: from a month to another": Case(
        rows(
            "year,months,state,lost", "2021,{t},{s},{y}", ("January-March", "April-June", "July-September", "October-December"), COUNTRIES
        ),
        "12 rows of lost by time every QS-JAN from 2021-01-01 to 2021-10-01, 3 series by state",
    ),
    "CO2 of the globe: more cells than names, one of them the decimal year": Case(
        rows(
            "Date,Decimal Date,Average",  # and numbers that never change
            "{t},{y},0.11,{n},0.09",
            [f"{1979 + place // 12}-{place % 12 + 1:02},{1979 + (place + 0.5) / 12:.3f}" for place in range(14)],
        ),
        "14 rows of 2, 4 by 0 every MS from 1979-01-01 to 1980-02-01",
        told="1 (the same times)",
    ),
    "births in the US: days that are not known are null or 99": Case(
        rows("year,month,day,gender,births", "{t},{s},{n}", [*(f"{day:%Y,%-m,%-d}" for day in DAYS), "2021,3,99"], "FM"),
        "20 rows of births by time every D from 2021-03-01 to 2021-03-10, 2 series by gender",
        told="2 rows without a time are left out",
    ),
    "temperatures of New South Wales: days as spreadsheets count them, 48 periods each": Case(
        rows('"Date","Period","Temp"', "{t},{s},{y}", range(36526, 36536), range(1, 4)),
        "30 rows of Temp by Date every D from 2000-01-01 to 2000-01-10, 3 series by Period",
    ),
    "year and month columns": Case(
        rows("year,month,y", "{t.year},{t.month},{y}", MONTHS), f"14 rows of y by time {MONTHLY}", told="put together from year and month"
    ),
    "ebola: countries, months and years of two digits": Case(
        rows("Country,Code,Month,Year,Value", "{s},{t:%-m,%y},{y}", MONTHS, ("Chile,1", "Ghana,2", "Nepal,3")),
        f"42 rows of Value by time {MONTHLY}, 3 series by Country",
    ),
    "years and names of months": Case(rows("year,month,n", "{t:%Y,%b},{y}", MONTHS), f"14 rows of n by time {MONTHLY}"),
    "year, month, day and hour columns": Case(
        rows("No,year,month,day,hour,y", "{n},{t:%Y,%m,%d,%H},{y}", HOURS), f"48 rows of y by time {AT}"
    ),
    "date and hour columns": Case(rows("dteday,hr,cnt", "{t:%Y-%m-%d},{t.hour},{y}", HOURS), f"48 rows of cnt by time {AT}"),
    "Date + Time with dots": Case(
        rows("Date;Time;CO", "{t:%d/%m/%Y;%H.%M.%S};{n},5", HOURS), f"48 rows of CO by time {AT}", cells=[0.5, 1.5]
    ),
    "1/1/2021 1:00 PM": Case(rows("ds,y", "{t.month}/{t.day}/{t:%Y %I:%M %p},{y}", HOURS), HOURLY),
    "hours that end at 24:00": Case(
        rows("Hour Ending,COAST", "03/01/2021 {t:02}:00,{y}", range(1, 25)),
        "24 rows of COAST by Hour Ending every h from 2021-03-01 01:00:00 to 2021-03-02",
    ),
    "day-first by regularity": Case(
        rows("ds,y", "{t:%d/%m/%Y},{y}", MONTHS), f"14 rows of y by ds {MONTHLY}", told="read with the day first"
    ),
    "month-first by regularity": Case(
        rows("ds,y", "{t:%m/%d/%Y},{y}", MONTHS), f"14 rows of y by ds {MONTHLY}", told="read with the month first"
    ),
    "day-first beyond the 12th": Case(rows("ds,y", "{t:%d.%m.%Y},{y}", LATER), LATE),
    "11-Mar-21": Case(rows("ds,y", "{t:%d-%b-%y},{y}", LATER), LATE),
    "March 1, 2021": Case(rows("ds,y", '"{t:%B %d, %Y}",{y}', DAYS), DAILY),
    "20210301": Case(rows("ds,y", "{t:%Y%m%d},{y}", DAYS), DAILY),
    "2021030113": Case(rows("ds,y", "{t:%Y%m%d%H},{y}", HOURS), HOURLY),
    "quarters 1974Q1": Case(
        rows("period,y", "{t},{y}", pd.period_range("1974Q1", periods=10, freq="Q")),
        "10 rows of y by period every QS-JAN from 1974-01-01 to 1976-04-01",
    ),
    "quarters Q1 2020": Case(
        rows("Quarter,y", "Q{t.quarter} {t.year},{y}", pd.period_range("2020Q1", periods=10, freq="Q")),
        "10 rows of y by Quarter every QS-JAN from 2020-01-01 to 2022-04-01",
    ),
    "Eurostat's 2021M03": Case(rows("TIME,y", "{t:%YM%m},{y}", MONTHS), f"14 rows of y by TIME {MONTHLY}"),
    "2021-03": Case(rows("Month,y", "{t:%Y-%m},{y}", MONTHS), f"14 rows of y by Month {MONTHLY}"),
    "ISO weeks": Case(rows("ds,y", "2021-W{t:02},{y}", range(1, 11)), "10 rows of y by ds every W-MON from 2021-01-04 to 2021-03-08"),
    "seconds since 1970": Case(rows("ds,y", "{t},{y}", range(1614556800, 1615420800, 86400)), DAILY),
    "milliseconds since 1970": Case(rows("ds,y", "{t}000,{y}", range(1614556800, 1614729600, 3600)), HOURLY),
    "steps that are counted": Case(rows("ds,y", "{t},{y}", range(1, 11)), "10 rows of y by ds every 1"),
    "times with Z": Case(
        rows("ds,y", "{t:%Y-%m-%dT%H:%M:%SZ},{y}", HOURS), "48 rows of y by ds every h from 2021-03-01+00:00 to 2021-03-02 23:00:00+00:00"
    ),
    "offsets from UTC across a clock change": Case(
        rows("ds,y", "{t},{y}", CLOCKS), "10 rows of y by ds every h from 2021-10-30 22:00:00+00:00 to 2021-10-31 07:00:00+00:00"
    ),
    "times in a column without a name": Case(rows(",y", ISO, DAYS), DAILY.replace("ds", "Unnamed: 0")),
    # How files are written.
    "semicolons and decimal commas": Case(rows("ds;y", "{t:%Y-%m-%d};{n},5", DAYS), DAILY, cells=[0.5, 1.5], told="decimals have a comma"),
    "points between thousands and decimal commas": Case(rows("ds;y", "{t:%d.%m.%Y};1.2{n}4,50", LATER), LATE, cells=[1204.5, 1214.5]),
    "tabs": Case(rows("ds\ty", "{t:%Y-%m-%d}\t{y}", DAYS), DAILY),
    "bars": Case(rows("ds|y", "{t:%Y-%m-%d}|{y}", DAYS), DAILY),
    "columns of spaces": Case(rows("ds      y", "{t:%Y-%m-%d}   {y}", DAYS), DAILY),
    "cp1252": Case(
        rows("ds;Verkäufe (€)", "{t:%Y-%m-%d};{y}", DAYS).encode("cp1252"), DAILY.replace("of y", "of Verkäufe (€)"), told="cp1252"
    ),
    "UTF-16": Case(rows("ds,y", ISO, DAYS).encode("utf-16"), DAILY, told="utf-16"),
    "UTF-8 with a byte-order mark": Case(rows("ds,y", ISO, DAYS).encode("utf-8-sig"), DAILY),
    "CRLF and empty lines": Case(rows("ds,y\n", ISO, DAYS).replace("\n", "\r\n"), DAILY),
    "thousands": Case(rows("ds,y", '{t:%Y-%m-%d},"1,2{n}4.5"', DAYS), DAILY, cells=[1204.5, 1214.5]),
    "thousands without decimals": Case(rows("ds,y", '{t:%Y-%m-%d},"12,2{n}4"', DAYS), DAILY, cells=[12204, 12214]),
    "$ and %": Case(rows("ds,y,z", "{t:%Y-%m-%d},$1{n}.25,{n}.5%", DAYS), DAILY.replace("y", "y, z", 1), cells=[10.25, 11.25]),
    "' around cells, as in the payments of BankSim": Case(
        rows("t,customer,category,amount", "{t},'{s}','es_food, es_drink',{n}.25", range(10), ("C1", "C2")),
        "20 rows of amount by t every 1, 2 series by customer",
    ),
    "K and M": Case(rows("ds,y", "{t:%Y-%m-%d},{n}.5K", DAYS).replace("1.5K", "1.5M"), DAILY, cells=[500, 1_500_000]),
    "losses in brackets": Case(rows("ds,y", "{t:%Y-%m-%d},({n}.5)", DAYS), DAILY, cells=[-0.5, -1.5]),
    "sep=; of Excel": Case("sep=;\n" + rows("ds;y", "{t:%Y-%m-%d};{y}", DAYS), DAILY),
    "comment lines": Case("# from the station\n# at noon\n" + rows("ds,y", ISO, DAYS), DAILY),
    "preamble lines": Case("Land-Ocean: Global Means\nstations\n" + rows("ds,y", ISO, DAYS), DAILY, told="begins after 2 other lines"),
    "Google Trends": Case(
        rows("Category: All categories\n\nMonth,tea: (Worldwide)", "{t:%Y-%m},{n}", MONTHS),
        f"14 rows of tea: (Worldwide) by Month {MONTHLY}",
    ),
    "no header": Case(rows("", ISO, DAYS)[1:], "10 rows of 1 by 0 every D from 2021-03-01 to 2021-03-10", told="no line of names"),
    "trailing commas": Case(rows("ds,y,,", ISO + ",,", DAYS), DAILY),
    "duplicate names": Case(rows("ds,y,y", ISO + ",{n}", DAYS), DAILY.replace("y", "y, y.1", 1)),
    "a counter of rows": Case(rows("id,ds,y", "{n}," + ISO, DAYS), DAILY, told="id (counts the rows)"),
    "a column of truth values": Case(rows("ds,open,y", "{t:%Y-%m-%d},True,{y}", DAYS), DAILY, told="open (truth values)"),
    "codes that begin with a zero": Case(
        rows("zip,ds,y", "{s}," + ISO, DAYS, ("01001", "02002")), DAILY.replace("10", "20", 1) + ", 2 series by zip"
    ),
    "data.read": Case(
        rows("a;b\nc;d\nds;y", "{t:%Y-%m-%d};1 2{n}4", DAYS), DAILY, cells=[1204, 1214], data={"read": {"skiprows": 2, "thousands": " "}}
    ),
    # Rows that are there twice, or are none.
    "identical rows twice": Case(
        rows("ds,y", "{t:%Y-%m-%d},{t.day}", [*DAYS, DAYS[3]]), DAILY, told="1 row that stands there twice is read once"
    ),
    "data.repeats=mean": Case(rows("ds,y", "{t:%Y-%m-%d},{n}", [*DAYS, DAYS[0]]), DAILY, cells=[5, 1], data={"repeats": "mean"}),
    "data.repeats=first": Case(rows("ds,y", "{t:%Y-%m-%d},{n}", [*DAYS, DAYS[0]]), DAILY, cells=[0, 1], data={"repeats": "first"}),
    "data.repeats=last": Case(rows("ds,y", "{t:%Y-%m-%d},{n}", [*DAYS, DAYS[0]]), DAILY, cells=[10, 1], data={"repeats": "last"}),
    "total row": Case(
        rows("ds,y", ISO, pd.date_range("2021-01-01", periods=200)) + "Total,25000\n",
        "200 rows of y by ds every D from 2021-01-01 to 2021-07-19",
        told="1 row without a time is left out",
    ),
    "rows out of order": Case(rows("ds,y", "{t:%Y-%m-%d},{t.day}", DAYS[::-1]), DAILY, cells=[1, 2, 3]),
    # Grids of times.
    "business days with holidays": Case(
        rows("Date,Close", ISO, OPEN), "22 rows of Close by Date every B from 2021-03-01 to 2021-04-01", told="2 missing rows (every B)"
    ),
    "month ends": Case(
        rows("ds,y", ISO, pd.date_range("2021-01-31", periods=10, freq="ME")), "10 rows of y by ds every ME from 2021-01-31 to 2021-10-31"
    ),
    "last business days of months": Case(
        rows("ds,y", ISO, pd.date_range("2021-01-29", periods=10, freq="BME")), "10 rows of y by ds every BME from 2021-01-29 to 2021-10-29"
    ),
    "ends of financial years": Case(
        rows("ds,y", "{t}-06-30,{y}", range(2010, 2020)), "10 rows of y by ds every YE-JUN from 2010-06-30 to 2019-06-30"
    ),
    "weeks on Mondays": Case(
        rows("ds,y", ISO, pd.date_range("2021-03-01", periods=10, freq="W-MON")),
        "10 rows of y by ds every W-MON from 2021-03-01 to 2021-05-03",
    ),
    "quarters of an hour": Case(
        rows("ds,y", "{t:%Y-%m-%d %H:%M},{y}", pd.date_range("2021-03-01", periods=10, freq="15min")),
        "10 rows of y by ds every 15min from 2021-03-01 to 2021-03-01 02:15:00",
    ),
    "days left out": Case(
        rows("ds,y", ISO, [*DAYS[:4], *DAYS[6:]]),
        DAILY.replace("10", "8", 1),
        told="2 missing rows (every D) count as empty, the first at 2021-03-05",
    ),
    "irregular times": Case(
        rows("ds,y", "2021-03-{t:02}T0{n}:1{n}:00,{y}", (1, 2, 5, 10, 17, 26)),
        "6 rows of y by ds from 2021-03-01 00:10:00 to 2021-03-26 05:15:00",
        told="irregular",
    ),
    "numbers without times": Case(rows("a,b", "{y},{n}.25", range(10)), "10 rows of a, b"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_published_table(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    table = read(tmp_path / "t.csv", case.content, **case.data)
    assert in_words(table.about) == case.about
    assert table.values[: len(case.cells), 0].tolist() == case.cells
    assert any(case.told in note for note in table.notes)


@pytest.mark.parametrize("every", [2, 20])
@pytest.mark.parametrize("mark", ["", '""', "?", "-", ".", "..", "None", "NA", "n/a", "NaN", "null", r"\N"])
def test_marks_of_missing_values(tmp_path: Path, mark: str, every: int) -> None:
    empty = list(range(1, 19, every))
    lines = [f"{day:%Y-%m-%d},{mark if place in empty else place + 0.5}\n" for place, day in enumerate(DAYS + LATER)]
    table = read(tmp_path / "t.csv", "ds,y\n" + "".join(lines))
    assert in_words(table.about) == f"20 rows of y by ds every D from 2021-03-01 to 2021-03-20, without {len(empty)} y"
    assert table.unfilled is not None
    assert [place for place, value in enumerate(table.unfilled[:, 0]) if np.isnan(value)] == empty


FRAME = pd.DataFrame({"ds": DAYS * 2, "id": ["p"] * 10 + ["q"] * 10, "y": [*range(10), *range(20, 30)]})
DATED = FRAME.assign(ds=FRAME.ds.dt.strftime("%Y-%m-%d"))
TEXT = DATED.to_csv(index=False).encode()


def zipped(content: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("t.csv", content)
    return made.getvalue()


def written(write: Callable[..., Any], **more: Any) -> bytes:
    made = io.BytesIO()
    write(made, **more)
    return made.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv.gz", gzip.compress(TEXT)),
        ("t.csv", gzip.compress(TEXT)),
        ("t.csv.bz2", bz2.compress(TEXT)),
        ("t.csv.xz", lzma.compress(TEXT)),
        ("t.csv.zip", zipped(TEXT)),
        ("t.csv.zst", pa.compress(TEXT, codec="zstd", asbytes=True)),
        ("t.parquet", written(FRAME.to_parquet)),
        ("t.feather", written(FRAME.to_feather)),
        ("t.jsonl", written(DATED.to_json, orient="records", lines=True)),
        ("t.json", written(DATED.to_json, orient="records")),
    ],
)
def test_a_table_in_another_kind_of_file(tmp_path: Path, name: str, content: bytes) -> None:
    table = read(tmp_path / name, content)
    assert in_words(table.about) == "20 rows of y by ds every D from 2021-03-01 to 2021-03-10, 2 series by id"
    assert (table.names, table.values[:, 0].tolist()) == (("p", "q"), FRAME.y.tolist())


def test_numbers_that_are_texts(tmp_path: Path) -> None:
    """Prices as the programs of exchanges give them; codes with zeros before them stay what they are."""
    prices = [{"t": f"2021-03-{day:02}", "close": f"1,{day:03}.50", "zip": "01001"} for day in range(1, 11)]
    table = read(tmp_path / "t.json", json.dumps(prices))
    assert in_words(table.about) == DAILY.replace("of y by ds", "of close by t")
    assert table.values[0, 0] == 1001.5


def test_the_columns_of_series_can_be_told(tmp_path: Path) -> None:
    """Also where other columns would do, and under names that are the values of all of them."""
    panel = rows("a,b,ds,y", "{s}," + ISO, DAYS, ("1,x", "1,y", "2,z"))
    assert read(tmp_path / "t.csv", panel).series == ("b",)
    told = read(tmp_path / "t.csv", panel, series=["a", "b"])
    assert (told.series, told.names, told.fields(2)) == (("a", "b"), ("1/x", "1/y", "2/z"), {"a": 2, "b": "z"})
    turned = rows("a,b,ds,y", "{s}," + ISO, DAYS, ("2,z", "1,y", "1,x"))
    assert read(tmp_path / "t.csv", turned, series=["a", "b"]).names == ("2/z", "1/y", "1/x")  # as they first appear
    alone = read(tmp_path / "t.csv", panel, series="b")
    assert (alone.series, alone.names) == (("b",), ("x", "y", "z"))


@pytest.mark.parametrize(
    ("content", "data", "message"),
    [
        (
            rows("ds,y", ISO, [*DAYS, DAYS[3]]),
            {},
            "row 11, column ds repeats 2021-03-04, and no column tells the series apart; .*data.repeats.*data.frequency=none",
        ),
        # A list of songs, which some columns happen to tell apart.
        (
            "song,fight,won,year,bpm\n" + "".join(f"S{n},{'yn'[n % 2]},{'yn'[n // 3 % 2]},{1900 + n * n % 31},{n}\n" for n in range(60)),
            {},
            "row 17, column year repeats 1908, and no column tells the series apart",
        ),
        (rows("ds,y", "{t:%F %H:%M},{y}", CLOCKS), {}, "row 4, column ds repeats 2021-10-31 02:00"),
        (rows("ds,y", "day {n},{y}", DAYS), {"time": "ds"}, "column ds contains 'day 0', which is no time; .*data.frequency=none"),
        (rows("ds,y", "{t:%F},many", DAYS), {}, r"no column of numbers besides ds; there are y \(text\)"),
        (rows("ds,y", ISO, DAYS), {"columns": ["x"]}, r"has no column 'x' \(data.columns\); use one of ds, y"),
        (rows("ds,y", ISO, DAYS), {"time": "date"}, r"has no column 'date' \(data.time\)"),
        (rows("ds,load,y", "{t:%F},many,{y}", DAYS), {"columns": ["load"]}, "column load has to be one of numbers, but row 1 is 'many'"),
        (rows("ds,y", "{t:%F},inf", DAYS), {}, "row 1, column y is inf, not a finite number"),
        (rows("ds,y", "{t:%F},", DAYS), {}, r"has no column of numbers besides ds; there are y \(empty\)"),
        (rows("ds,y", ISO, DAYS), {"frequency": "MS"}, "9 times in column ds, the first 2021-03-02, are not MS apart"),
        ("ds,y\n", {}, "is empty; use a table with at least one row"),
    ],
)
def test_what_has_no_sensible_reading_is_refused(tmp_path: Path, content: str, data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as refused:
        read(tmp_path / "t.csv", content, **data)
    assert "t.csv" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_to_predict_from_is_read_as_the_training_data_was(tmp_path: Path) -> None:
    """Four days, day first, of one series: nothing in them shows that."""
    (tmp_path / "t.csv").write_text(rows("ds,id,y", "{t:%d/%m/%Y},{s},{y}", pd.date_range("2021-01-01", periods=40), ("p", "q")))
    (tmp_path / "new.csv").write_text(rows("ds,id,y", "{t:%d/%m/%Y},p,{n}", pd.date_range("2021-05-04", periods=4)))
    data = {"train": str(tmp_path / "t.csv"), "cache": str(tmp_path / "cache"), "horizon": 2}
    spec = Spec.model_validate({"task": "forecasting", "data": data})
    table = series_of(str(tmp_path / "new.csv"), prepare(spec).codec, spec, labelled=True)
    assert (table.series, table.names, table.frequency, table.values[:, 0].tolist()) == (("id",), ("p",), "D", [0, 1, 2, 3])
    assert table.ahead(0, 2) == ["2021-05-08", "2021-05-09"]
