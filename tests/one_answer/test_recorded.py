"""Recorded steps, as a GPU replays them, give the bits of steps that are not recorded. Graphs are emulated: `_emulated_graphs.py`."""

from __future__ import annotations

import pytest
import torch
from _answers import FACTORS, OPTIMIZERS, Case, fits, net, plan_of, steps_of
from _emulated_graphs import Graph, emulate
from _pairs import pairs

import carrywave as cw
from carrywave.step.graphs.capture import Capture

WHAT = {
    "plan": ("1", "1, chunks", "1, chunks recomputed", "1, micro-batches"),
    "head": ("tied words", "last", "forecast", "labels at each step", "numbers of a lane"),
    "cell": ("lstm", "gru", "slstm"),
    "data": ("whole", "lengths", "carried", "carried, resets, accumulated"),
    "dropout": ("none", "all", "locked"),
    "optimizer": ("momentum", "adamw", "penalties", "averaged"),
}
assert all(set(values) <= set(FACTORS[name]) for name, values in WHAT.items())
REPEATS = 2  # a shape is recorded the second time it is seen


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", pairs(WHAT, fits), ids=lambda row: "-".join(row.values()))
def test_recorded_steps_give_the_bits_of_others(row: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    found = [trained({**row, "layers": "plain", "dtype": "float32"}, recorded=recorded) for recorded in (False, True)]
    (losses, plain, _), (ours, recorded, replays) = found
    assert replays > 0
    assert ours == losses
    assert [name for name, tensor in plain.items() if not torch.equal(tensor, recorded[name])] == []


def trained(case: Case, *, recorded: bool) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, what the trainer would save, and how often a graph was replayed."""
    trainer = cw.Trainer(net(case), {**OPTIMIZERS[case["optimizer"]], "precision": "fp32"}, plan=plan_of(case), device="cpu")
    trainer.capture = Capture(torch.device("cpu")) if recorded else None
    before, losses = Graph.replays, []
    for _ in range(REPEATS):
        losses += [float(trainer.step(*batches)) for batches in steps_of(case)]
    return losses, dict(trainer.gathered()), Graph.replays - before
