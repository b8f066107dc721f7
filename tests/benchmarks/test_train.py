"""The training benchmark compares equals: the same model, the same windows, the same number of real steps."""

from __future__ import annotations

import pytest
import torch

from carrywave.benchmarks import train
from carrywave.benchmarks.harness.loaded_loops import LabelledLengths
from carrywave.benchmarks.peers import plain_loops

COLUMNS = ("case", "device", "loop", "tokens_per_second", "spread", "ratio", "target")

CPU = torch.device("cpu")


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_both_stream_loops_train_on_the_same_number_of_tokens(cell: str) -> None:
    loops = train._streams(20, 8, 4, 16, CPU, cell)
    for _ in range(2):  # the second from the carry of the first
        assert {name: step() for name, step in loops.items()} == {"carrywave": 64, "plain PyTorch": 64}


def test_batches_of_sequences_hold_about_as_many_real_steps() -> None:
    loops = train._lengths(LabelledLengths(8, 50, 512), CPU)
    totals = {name: sum(step() for _ in range(20)) for name, step in loops.items()}
    ours = totals.pop("carrywave")
    assert all(0.7 < ours / other < 1.4 for other in totals.values())


def test_the_plain_models_learn() -> None:
    """A peer that did not learn would be no peer."""
    torch.manual_seed(0)
    tokens = torch.arange(4000) % 7
    model = plain_loops.PlainLanguageModel(7, 16, 1, 0.0)
    loop = plain_loops.PlainStreams(tokens, model, lanes=4, steps=20, lr=0.02, clip=1.0, device=CPU)
    for _ in range(45):
        loop.step()
    with torch.no_grad():
        logits, _ = model(tokens[:50, None], None)
    assert float((logits[10:, 0].argmax(-1) == tokens[11:51]).float().mean()) == 1.0


def test_rows_name_the_ratio_to_the_best_peer() -> None:
    rows = train.compare("case", {"carrywave": lambda: 10, "a": lambda: 5, "b": lambda: 1}, 1, 0.0, CPU, target=1.0)
    assert [row["loop"] for row in rows] == ["carrywave", "a", "b"]
    assert max(row["ratio"] for row in rows[1:]) == 1.0  # type: ignore[type-var]
    assert all(set(row) == set(COLUMNS) for row in rows)
