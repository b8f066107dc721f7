"""`bench data` gives comparable rows: all loaders pass the same real tokens, and ours pads less, or hardly at all."""

from __future__ import annotations

import pytest

from carrywave.benchmarks import data

COLUMNS = ("loader", "batches", "batches_per_second", "real_tokens_per_second", "waste", "shapes", "steps", "ratio")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the peer's workers are forked, whatever threads there are
def test_rows_compare_the_same_tokens() -> None:
    rows = data.run(quick=True)
    assert all(tuple(row) == COLUMNS for row in rows)
    ours, packed, theirs = rows
    assert theirs["ratio"] == 1.0
    real = [float(row["real_tokens_per_second"]) / float(row["batches_per_second"]) * int(row["batches"]) for row in rows]  # type: ignore[arg-type, call-overload]
    seconds = [int(row["batches"]) / float(row["batches_per_second"]) for row in rows]  # type: ignore[arg-type, call-overload]
    assert real == pytest.approx([real[0]] * 3, rel=1e-9)  # quotients of float64
    assert ours["ratio"] == pytest.approx(seconds[2] / seconds[0], rel=1e-9)
    assert float(packed["waste"]) < float(ours["waste"]) < 0.1 < float(theirs["waste"])  # type: ignore[arg-type]
    assert int(packed["shapes"]) <= 4 < int(ours["shapes"])  # type: ignore[call-overload]
