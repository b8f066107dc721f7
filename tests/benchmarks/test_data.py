"""`bench data` gives comparable rows: both loaders pass the same real tokens, and ours pads less."""

from __future__ import annotations

import pytest

from carrywave.benchmarks import data

COLUMNS = ("loader", "batches", "batches_per_second", "real_tokens_per_second", "waste", "ratio")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the peer's workers are forked, whatever threads there are
def test_rows_compare_the_same_tokens() -> None:
    rows = data.run(quick=True)
    assert all(tuple(row) == COLUMNS for row in rows)
    ours, theirs = rows
    assert theirs["ratio"] == 1.0
    real = [float(row["real_tokens_per_second"]) / float(row["batches_per_second"]) * int(row["batches"]) for row in rows]  # type: ignore[arg-type, call-overload]
    seconds = [int(row["batches"]) / float(row["batches_per_second"]) for row in rows]  # type: ignore[arg-type, call-overload]
    assert real == pytest.approx([real[0]] * 2, rel=1e-9)  # quotients of float64
    assert ours["ratio"] == pytest.approx(seconds[1] / seconds[0], rel=1e-9)
    assert float(ours["waste"]) < 0.1 < float(theirs["waste"])  # type: ignore[arg-type]
