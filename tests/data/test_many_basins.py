"""A file of series that is read in blocks takes the memory of a block, however many series it has; and the program that shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Reads a file of 20 basins, then one of 320, and prints the peaks of NumPy and Arrow in bytes for each. The pool of Arrow only knows the
# highest peak so far, so the second is at least the first.
READ = """
import sys, tracemalloc
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import many_basins
import pyarrow as pa
from carrywave.data.steps import series_source
series_source.WHOLE_CELLS, series_source.BLOCK_CELLS = int(sys.argv[2]), 1 << 15
for basins in (20, 320):
    folder = Path(sys.argv[3]) / f"{basins}-{sys.argv[2]}"
    many_basins.AT_ONCE = 10
    many_basins.write(folder / "basins.parquet", basins, 600)
    pool = pa.default_memory_pool()
    tracemalloc.start()
    rows = many_basins.read(folder)["rows"]
    print(int(rows), tracemalloc.get_traced_memory()[1], pool.max_memory())
    tracemalloc.stop()
"""


def peaks(folder: Path, whole_cells: int) -> list[list[int]]:
    words = [sys.executable, "-c", READ, str(ROOT / "examples"), str(whole_cells), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [[int(number) for number in line.split()] for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_series(tmp_path: Path) -> None:
    few, many = peaks(tmp_path, 0)
    assert (few[0], many[0]) == (20 * 600, 320 * 600)
    assert many[1] < 1.5 * few[1]  # sixteen times as many rows; names and deviations of series are kept
    assert many[2] < 1.5 * few[2]
    whole = peaks(tmp_path, 1 << 40)[1]
    assert whole[1] > 3 * many[1]  # read as a whole, it would have been seen


@pytest.mark.slow
def test_the_program(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "examples/many_basins.py"), str(tmp_path / "basins"), "3", "600"]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told[0].startswith(f"{tmp_path / 'basins/basins.parquet'}: 3 basins, 600 days")
    assert "MiB of memory beyond" in told[1]
