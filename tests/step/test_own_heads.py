"""The head of a user's own, in training and in evaluation: one loss, whatever else the head can do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.model.heads.classes import Softmax

T, B, WIDTH, CLASSES = 4, 3, 5, 3
SGD = {"optimizer": "sgd", "lr": 0.5, "precision": "fp64"}


class Judged(nn.Module):
    """A head whose `score` is an accuracy, which is no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = self.out(y)
        return out

    def score(self, out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (out.argmax(-1) == target).double().sum(), torch.tensor(target.numel())

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Any]:
        return nn.functional.cross_entropy(self(y).flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


class Odd(Judged):
    """Its `score` is not for us at all."""

    def score(self) -> str:  # type: ignore[override]
        return "good"


class Smoothed(Softmax):
    """Our head with another loss: the `score` that it inherits does not belong to it."""

    def loss(self, y_TBW: Tensor, target_TB: Tensor) -> tuple[Tensor, Tensor]:
        logits, target = self(y_TBW).flatten(0, 1), target_TB.flatten()
        return nn.functional.cross_entropy(logits, target, label_smoothing=0.3, reduction="sum"), torch.tensor(target.numel())


def replaced() -> Softmax:
    """Our head with its loss replaced in this one object."""
    head = Softmax(WIDTH, CLASSES)
    usual = head.loss
    head.loss = lambda y, target: (2.0 * usual(y, target)[0], usual(y, target)[1])  # type: ignore[method-assign]
    return head


def model(head: nn.Module) -> cw.Model:
    torch.manual_seed(0)
    return cw.Model(nn.Linear(2, 3), cw.LSTM(3, WIDTH), head).double()


def batch() -> cw.Batch:
    draw = torch.Generator().manual_seed(1)
    return cw.Batch.of(torch.randn(T, B, 2, generator=draw, dtype=torch.float64), torch.randint(CLASSES, (T, B), generator=draw))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("plan", [{}, {"chunk_steps": 2}, {"micro_batches": 2}])
@pytest.mark.parametrize("make", [Judged, Odd, lambda: Smoothed(WIDTH, CLASSES), replaced, lambda: Softmax(WIDTH, CLASSES)])
def test_an_evaluation_with_metrics_has_the_loss_that_is_trained(make: Any, plan: dict[str, Any]) -> None:
    net = model(make())
    trainer = cw.Trainer(net, SGD, plan=plan)
    seen: list[Tensor] = []
    found = trainer.evaluate([batch()], observe=lambda out, target: seen.append(out))
    with torch.no_grad():
        total, count = net.head.loss(net(batch().inputs)[0], batch().targets)
    assert found == pytest.approx(float(total / count), rel=1e-12)  # float64; chunks are summed in another order
    assert found == pytest.approx(float(trainer.step(batch())), rel=1e-12)
    assert seen[0].shape[-1] == CLASSES
