"""Many river basins in one file that need not fit into memory: writes a table of synthetic ones, reads it, and says how much that took.

    python examples/many_basins.py data/basins                    # 200 basins x 1,000 days
    python examples/many_basins.py data/basins 16000 10000        # 160 million rows: 2.1 GB of Parquet, 3.2 GB of cache
    carrywave train --run runs/basins task=regression data.train=data/basins/basins.parquet data.cache=data/basins/cache \
        data.each_step=true data.series=basin data.targets=[flow] data.static=[quick,slow] data.split=[0.7,0.1,0.2] data.warmup=365 \
        batch.lanes=256 batch.steps=365 train.loss=nse train.epochs=1

Rain runs off through two linear reservoirs, a quick one and a slow one, of a size of its own in each basin; one value in ten of the
discharge is missing. The rows of a basin are next to each other, in order of their days, as a large file must have them. Both writing and
reading hold a few basins at a time; training reads windows from the cache, which is mapped into memory, not loaded.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet

AT_ONCE = 100  # basins
COLUMNS = ("rain", "warmth", "quick", "slow", "flow")


def write(path: Path, basins: int, days: int) -> None:
    """Write the table, some basins at a time."""
    draw = np.random.default_rng(0)
    schema = pa.schema([("basin", pa.string()), ("date", pa.date32()), *((name, pa.float32()) for name in COLUMNS)])
    path.parent.mkdir(parents=True, exist_ok=True)
    dates = np.datetime64("1990-01-01") + np.arange(days)
    with pa_parquet.ParquetWriter(path, schema) as file:
        for first in range(0, basins, AT_ONCE):
            names = [f"b{number:05d}" for number in range(first, min(first + AT_ONCE, basins))]
            quick, slow = draw.uniform(0.2, 0.9, len(names)), draw.uniform(20, 60, len(names))
            rain = draw.gamma(0.4, 8.0, (len(names), days)) * (draw.random((len(names), days)) < 0.4)
            warmth = 10 + 10 * np.sin(2 * np.pi * np.arange(days) / 365) + draw.normal(0, 1, rain.shape)
            flow = run_off(np.maximum(rain - 0.1 * np.maximum(warmth, 0), 0), quick, slow)
            flow[draw.random(flow.shape) < 0.1] = np.nan
            weather = (rain, warmth, np.repeat(quick, days), np.repeat(slow, days), flow)
            columns = [pa.array(np.repeat(names, days)), pa.array(np.tile(dates, len(names)))]
            columns += [pa.array(values.reshape(-1).astype(np.float32), from_pandas=True) for values in weather]
            file.write_table(pa.table(columns, schema=schema))


def run_off(wet: np.ndarray, quick: np.ndarray, slow: np.ndarray) -> np.ndarray:
    """The discharge of two linear reservoirs, day by day."""
    flow = np.zeros_like(wet)
    for share, time_constant in ((quick, 4.0), (1 - quick, slow)):
        store = np.full(len(wet), 5.0)
        for day in range(wet.shape[1]):
            store = store + share * wet[:, day]
            flow[:, day] += store / time_constant
            store = store * (1 - 1 / time_constant)
    return flow


def read(folder: Path) -> dict[str, float]:
    """Read the table into the cache, as a run does before its first step; returns the seconds and memory in MiB, before and at its peak."""
    from carrywave.data.prepare import prepare
    from carrywave.spec.load import parse

    asked = {"train": str(folder / "basins.parquet"), "cache": str(folder / "cache"), "series": "basin", "static": ["quick", "slow"]}
    data = {**asked, "each_step": True, "targets": ["flow"], "split": [0.7, 0.1, 0.2], "warmup": 365}
    asks = parse({"task": "regression", "data": data})
    held, begin, done = [memory()], time.perf_counter(), threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            held.append(memory())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        found = prepare(asks)
    finally:
        done.set()
        watching.join()
    return {"seconds": time.perf_counter() - begin, "before": held[0], "peak": max(held), "rows": float(len(found.train.inputs))}


def memory() -> float:
    """The memory that this process holds, in MiB, without pages of mapped files, which the system takes back when it needs room; where
    that is not known, the most that it has held.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("RssAnon")) / (1 << 10)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def main(folder: str, basins: str = "200", days: str = "1000") -> None:
    path = Path(folder) / "basins.parquet"
    begin = time.perf_counter()
    write(path, int(basins), int(days))
    print(f"{path}: {int(basins):,} basins, {int(days):,} days, {path.stat().st_size / 1e6:,.0f} MB in {time.perf_counter() - begin:.0f} s")
    # In a process of its own, whose peak is that of reading alone.
    told = subprocess.run([sys.executable, __file__, "--read", folder], check=True, capture_output=True, text=True).stdout
    found = json.loads(told.splitlines()[-1])
    more = found["peak"] - found["before"]
    print(f"read in {found['seconds']:.0f} s, with {more:,.0f} MiB of memory beyond the {found['before']:,.0f} before")


if __name__ == "__main__":
    if sys.argv[1] == "--read":
        print(json.dumps(read(Path(sys.argv[2]))))
    else:
        main(*sys.argv[1:])
