"""`bench stepper` compares equals: both loops compute the same probabilities."""

from __future__ import annotations

import torch

from carrywave.benchmarks import stepper


def test_loops_compute_the_same() -> None:
    loops = stepper.loops_of(2, 16, 3)
    for _ in range(4):
        torch.testing.assert_close(loops["stepper"](), loops["plain"]())


def test_the_short_form() -> None:
    rows = stepper.run(quick=True)
    assert [(row["case"], row["clients"]) for row in rows] == [("1 x 16", 1), ("2 x 16", 3)]
    assert all(row["stepper_ms"] > 0 and row["plain_ms"] > 0 for row in rows)
    assert [*stepper.BOUND_MS] == [stepper.CASES[0]]
