"""`bench replicas` compares equals: the same model, the same number of real tokens, losses checked before anything is timed."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from carrywave.benchmarks import replicas
from carrywave.benchmarks.harness.loaded_loops import LabelledLengths
from carrywave.benchmarks.harness.workers import start

COLUMNS = ("case", "workers", "loop", "lstm", "tokens_per_second", "spread", "speedup", "ratio", "target")


@pytest.mark.slow
def test_all_loops_train_on_as_many_real_tokens() -> None:
    """Workers refuse to time a loop whose losses are not one worker's, so all of them have passed that here."""
    lengths = LabelledLengths(hidden=8, longest=40, tokens=128, sequences=24)
    job = {"cases": [asdict(replicas.QUICK), asdict(lengths)], "rounds": 12, "seconds": 0.0}
    rows = start("carrywave.benchmarks.replicas", job, 2)[0]
    assert [row["loop"] for row in rows] == [
        *("serial", "carrywave", "DDP", "DDP, small buckets"),
        *("serial", "carrywave", "DDP, padded", "DDP, packed"),
    ]
    tokens = [row["tokens"] for row in rows]
    assert tokens[:4] == [12 * 64] * 4
    assert tokens[4] == tokens[5]  # the same batches, whoever holds them
    assert tokens[6] == tokens[7]
    assert 0.6 < tokens[5] / tokens[6] < 1.5  # batches hold about as many real steps


def test_rows_name_the_ratio_to_the_best_peer() -> None:
    rates = {"serial": 10.0, "carrywave": 18.0, "DDP, padded": 12.0, "DDP, packed": 9.0}
    timed = [{"loop": loop, "lstm": "cw.LSTM", "tokens_per_second": rate, "spread": 0.0} for loop, rate in rates.items()]
    rows = replicas.rows_of("case", 2, timed, 1.5)
    assert all(tuple(row) == COLUMNS for row in rows)
    assert [row["ratio"] for row in rows] == [pytest.approx(10 / 12, abs=1e-3), 1.5, 1.0, 0.75]  # three digits are shown
    assert [row["speedup"] for row in rows] == [1.0, 1.8, 1.2, 0.9]
    assert [row["target"] for row in rows] == [None, 1.5, None, None]
    assert [row["workers"] for row in rows] == [1, 2, 2, 2]
