"""A long sequence takes little memory when it is recomputed, whatever its length, and the gradient stays what it was."""

from __future__ import annotations

import pytest

from carrywave.benchmarks.memory_use import long


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_hardly_grows_with_the_length() -> None:
    rows = long.run(quick=True)
    assert [list(row) for row in rows] == [list(long.COLUMNS)] * 6
    assert [(row["steps"], row["recompute"]) for row in rows] == [
        (steps, level) for steps in long.QUICK_LENGTHS for level in ("false", "true", "twice")
    ]
    plain, once, twice = rows[3:]
    assert max(once["step_mb"], twice["step_mb"]) < plain["step_mb"]
    for row in rows[1:3]:
        assert float(row["error_fp64"]) < 1e-10
        assert float(row["error"]) < 1e-4  # some hundreds of float32 sums in a row
