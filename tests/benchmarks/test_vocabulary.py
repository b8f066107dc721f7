"""`bench vocabulary` compares the memory and the loss of workers that share a vocabulary with those of one that has it all."""

from __future__ import annotations

import pytest

from carrywave.benchmarks.memory_use import vocabulary

COLUMNS = ("case", "workers", "peak_mib", "share", "peak_mib_each", "step_seconds", "loss_off", "target")


@pytest.mark.slow
def test_a_worker_needs_about_a_quarter_and_finds_the_same_loss() -> None:
    alone, split = vocabulary.run(quick=True)
    assert tuple(alone) == tuple(split) == COLUMNS
    assert (alone["share"], alone["loss_off"]) == (1.0, 0.0)
    whole_mib = 4 * 4 * 2 * vocabulary.QUICK.vocabulary * vocabulary.QUICK.hidden / 2**20
    assert float(str(alone["peak_mib"])) > whole_mib  # weights, gradients and two numbers of Adam's for each
    assert float(str(split["share"])) <= vocabulary.TARGET
    assert float(str(split["loss_off"])) < 1e-5  # float32, in another order


def test_the_worker_that_needs_the_most_counts() -> None:
    def worker(peak_mib: float, loss: float) -> list[dict[str, float]]:
        return [{"peak_mib": peak_mib, "loss": loss, "step_seconds": 1.0}]

    row = vocabulary.row_of(vocabulary.FULL, [worker(30.0, 2.0), worker(50.0, 2.0)], [worker(100.0, 2.5)])
    assert (row["share"], row["peak_mib_each"], row["loss_off"]) == (0.5, "30 50", 0.2)
