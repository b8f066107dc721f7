"""Around a step of a user's own loop: modes of modules, precision, counts, steps that end halfway, targets that can be read in two ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.errors import UserError
from carrywave.model.heads.pooled import PooledNumbers


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)
        self.fails, self.count = False, None

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Any]:
        if self.fails:
            raise ValueError("mine")
        total = nn.functional.cross_entropy(self.out(y).flatten(0, 1), target.flatten(), reduction="sum")
        return total, (target != -100).sum() if self.count is None else self.count


def net(seed: int = 0) -> cw.Model:
    torch.manual_seed(seed)
    return cw.Model(nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5)), cw.LSTM(6, 8), Head()).double()


def batch(seed: int = 1, **keys: Any) -> cw.Batch:
    torch.manual_seed(seed)
    return cw.Batch.of(torch.randn(6, 5, 3, dtype=torch.float64), torch.randint(0, 4, (6, 5)), **keys)


def apart(one: cw.Trainer, other: cw.Trainer) -> float:
    theirs = other.gathered()
    return max(float((tensor - theirs[name]).abs().max()) for name, tensor in one.gathered().items())


def test_a_step_inside_autocast_is_refused() -> None:
    trainer = cw.Trainer(net(), {})
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(UserError, match=r"inside torch\.autocast, .* set train.precision=bf16"),
    ):
        trainer.step(batch())


def test_targets_that_can_be_read_in_two_ways_are_asked_about() -> None:
    """As many steps as lanes and as numbers for each lane: lengths would shut off the wrong ones."""
    model = cw.Model(nn.Linear(3, 6), cw.LSTM(6, 8), PooledNumbers(8, 4)).double()
    x, target = torch.randn(4, 4, 3, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    trainer = cw.Trainer(model, {})
    with pytest.raises(UserError, match=r"targets of shape \[4, 4\] could be one per step or several per lane.*pooled=True"):
        trainer.step(cw.Batch.of(x, target, lengths=[4, 1, 2, 3]))
    sure = float(trainer.evaluate([cw.Batch.of(x, target, lengths=[4, 1, 2, 3], pooled=True)]))
    assert sure == pytest.approx(
        float(trainer.step(cw.Batch.of(x, target, lengths=[4, 1, 2, 3], pooled=True))), rel=1e-6
    )  # said in float32
    trainer.step(cw.Batch.of(x, target))  # nothing is shut off


@pytest.mark.parametrize("plan", [{}, {"chunk_steps": 2}])
def test_a_step_that_ended_halfway_can_be_taken_again(plan: dict[str, Any]) -> None:
    trainers = [cw.Trainer(net(), {"lr": 0.05}, plan=plan) for _ in range(2)]
    for number in range(4):
        given = batch(number, fresh=number == 0)
        if number == 2:
            trainers[1].model.head.fails = True
            with pytest.raises(ValueError, match="mine"):
                trainers[1].step(given)
            trainers[1].model.head.fails = False
        one, other = (float(trainer.step(given)) for trainer in trainers)
        assert one == other
    assert apart(*trainers) == 0.0
    assert trainers[0].state_dict()["position"] == trainers[1].state_dict()["position"]


@pytest.mark.parametrize("count", [0, torch.zeros(()), np.int64(0)])
def test_a_count_that_cannot_be_is_refused(count: Any) -> None:
    model = net()
    model.head.count = count
    with pytest.raises(UserError, match=r"a count that is not positive; return \(sum, number of targets\)"):
        cw.Trainer(model, {}).step(batch())


def test_a_step_without_targets_that_count_is_none() -> None:
    """Nothing to divide by, and nothing to be divided: no mistake."""
    trainer = cw.Trainer(net(), {"optimizer": "sgd", "lr": 0.1})
    before = trainer.gathered()
    x, target = torch.randn(6, 5, 3, dtype=torch.float64), torch.full((6, 5), -100)
    assert float(trainer.step(cw.Batch.of(x, target))) == 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.gathered().items())


def test_a_step_in_inference_mode_is_refused() -> None:
    trainer = cw.Trainer(net(), {})
    with torch.inference_mode(), pytest.raises(UserError, match=r"inside torch\.inference_mode, where nothing can be differentiated"):
        trainer.step(batch())
