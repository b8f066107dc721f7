"""Both ways are timed by processes of their own, and the table says what they fetched."""

from __future__ import annotations

import pytest

from carrywave.benchmarks.memory_use import heap


@pytest.mark.slow
def test_both_ways_are_timed() -> None:
    [row] = heap.run(quick=True)
    assert row["ratio"] == pytest.approx(row["given_back_ms"] / row["kept_ms"], abs=0.01)
    assert row["faults_kept"] <= row["faults_given_back"] + 20
