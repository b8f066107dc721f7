"""`bench snapshot` counts the whole cost of a snapshot, and of snapshots that were in fact written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from carrywave.benchmarks import snapshot

COLUMNS = ("case", "workers", "snapshot_mb", "every", "step_ms", "stall", "spread", "held_ms", "held", "written_s", "target")


@pytest.mark.slow
def test_it_runs_and_snapshots_are_whole() -> None:
    [row] = snapshot.run(quick=True)
    assert tuple(row) == COLUMNS
    words, hidden = snapshot.QUICK.vocabulary, snapshot.QUICK.hidden
    parameters = 2 * words * hidden + words + 2 * (8 * hidden * hidden + 8 * hidden)
    assert row["snapshot_mb"] == pytest.approx(3 * 4 * parameters / 1e6, rel=0.1, abs=1)


def test_the_stall_is_the_median_over_pairs() -> None:
    def pair(with_seconds: float, held: float) -> dict[str, float]:
        return {"with_seconds": with_seconds, "without_seconds": 2.0, "written_seconds": 1.0, "held_seconds": held, "num_bytes": 6e8}

    rows = [[pair(99.0, 9.0), pair(2.1, 0.1), pair(2.02, 0.2), pair(3.0, 0.3)], [pair(9.0, 9.0), *(pair(9.0, 0.25) for _ in range(3))]]
    row = snapshot.row_of(replace(snapshot.FULL, every=10), rows)
    assert (row["stall"], row["step_ms"], row["snapshot_mb"], row["held_ms"], row["held"]) == (0.05, 200.0, 600, 250.0, 0.125)
