"""`bench calls` compares equals: both modules compute the same."""

from __future__ import annotations

import pytest
import torch

from carrywave.benchmarks import calls


@pytest.mark.parametrize("kind", calls.KINDS)
def test_both_compute_the_same(kind: str) -> None:
    for name, both in calls.calls_of(kind, 8, 2, 5).items():
        # float32; sums in another order, over up to 50 steps
        torch.testing.assert_close(both["ours"](), both["torch"](), rtol=1e-4, atol=1e-5, msg=name, check_layout=True)


def test_the_short_form() -> None:
    rows = calls.run(quick=True)
    assert [(row["case"], row["call"]) for row in rows[2:4]] == [
        ("lstm 2 x 8, 2 lanes", "step"),
        ("lstm 2 x 8, 2 lanes x 50 steps", "step by step"),
    ]
    assert all(row["torch_ms"] > 0 and row["ours_ms"] > 0 and row["ratio"] > 0 for row in rows)
    assert len(rows) == len(calls.KINDS) * len(calls.TARGETS)
