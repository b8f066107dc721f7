"""Claim: a million rows of CSV, from the file to the first batch, take a small multiple of `pandas.read_csv` and a sort.

A hundred hourly series with two columns of numbers, by time, then by series, so that they have to be sorted. Ours finds the columns of
times and series, the frequency, repeats, missing rows and cells, scales every series, writes the cache and makes a batch; pandas is told
the column of times and what to sort by. Both take turns; CPU seconds count, and the medians of them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.harness.command import main
from benchmarks.harness.timing import one_thread, take_turns
from carrywave.data.loader import build
from carrywave.data.order import Cursor, StreamOrder
from carrywave.data.prepare import prepare
from carrywave.data.sequences import View
from carrywave.spec.load import parse

SERIES, ROUNDS = 100, 5


def _written(path: Path, rows: int) -> Path:
    random, times = np.random.default_rng(0), pd.date_range("2020-01-01", periods=rows // SERIES, freq="h").astype("str")
    names = [f"S{number:03}" for number in range(SERIES)]
    table = {"unique_id": np.tile(names, len(times)), "ds": np.repeat(times, SERIES), "y": random.normal(size=rows).round(4)}
    pd.DataFrame(table | {"x": random.normal(size=rows).round(4)}).to_csv(path, index=False)
    return path


def _ours(path: Path) -> None:
    with tempfile.TemporaryDirectory() as cache:
        data = {"train": str(path), "horizon": 24, "cache": cache}
        train = prepare(parse({"task": "forecasting", "data": data, "batch": {"lanes": 64, "steps": 96}})).train
        order = StreamOrder(train.lengths, lanes=64, steps=96)
        build(View(train.inputs, train.starts, train.lengths), order.window(Cursor(0, 0)), Cursor(0, 0))


def _theirs(path: Path) -> None:
    pd.read_csv(path, parse_dates=["ds"]).sort_values(["unique_id", "ds"])


def _cpu_seconds(call: Callable[[Path], None], path: Path) -> float:
    begin = time.process_time()
    call(path)
    return time.process_time() - begin


def run(*, quick: bool = False) -> list[dict[str, object]]:
    """One row for each; `ratio` is its CPU time over that of pandas."""
    with tempfile.TemporaryDirectory() as folder, one_thread():
        path = _written(Path(folder) / "t.csv", 20_000 if quick else 1_000_000)
        calls = {"carrywave": _ours, "pandas.read_csv and a sort": _theirs}
        blocks = {name: (lambda call=call: _cpu_seconds(call, path)) for name, call in calls.items()}
        taken = take_turns(blocks, 2 if quick else ROUNDS + 1)
    seconds = {name: statistics.median(each[1:]) for name, each in taken.items()}
    return [
        {"from a file": name, "cpu_seconds": each, "ratio": each / seconds["pandas.read_csv and a sort"]} for name, each in seconds.items()
    ]


if __name__ == "__main__":
    main("benchmarks.data")
