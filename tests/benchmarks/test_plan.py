"""Every plan is predicted and timed, the chosen one is among them, and the last row holds the errors of all."""

from __future__ import annotations

import statistics

import pytest

from carrywave.benchmarks import plan


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_predictions_stand_beside_measurements() -> None:
    *rows, summary = plan.run(quick=True)
    assert [row["plan"] for row in rows][:2] == ["1 device", "2 replicas"]
    assert sum(row["plan"].startswith("2 stages") for row in rows) >= 3
    assert all(row["predicted_ms"] > 0 and row["measured_ms"] > 0 for row in rows)
    assert [row["chosen"] for row in rows].count("chosen") == 1
    assert min(row["over_best"] for row in rows) == 1.0
    errors = [abs(float(row["error"].rstrip("%"))) for row in rows]
    for row, error in zip(rows, errors, strict=True):
        assert error == pytest.approx(abs(100 * (row["predicted_ms"] / row["measured_ms"] - 1)), abs=0.2)
    median, worst = (float(part.split()[1].rstrip("%")) for part in summary["error"].split(", "))
    assert median == pytest.approx(statistics.median(errors), abs=0.1)
    assert worst == pytest.approx(max(errors), abs=0.1)
