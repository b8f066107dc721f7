"""Losses with gradients in them, and weights that are made of others, in a trainer that cuts time: as by hand. float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import carrywave as cw
from carrywave.kernels import deferred_gradients

DOUBLE = torch.float64
TRAIN = {"optimizer": "sgd", "lr": 0.5, "precision": "fp64"}


class Penalized(nn.Module):
    """A head that keeps the loss from depending too much on each step's y; its product is one that a trainer may put off."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.weight, self.again = nn.Parameter(torch.randn(3, 4)), again

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        y = y if y.requires_grad else y.detach().requires_grad_()
        total = cross_entropy(deferred_gradients.linear(y.tanh(), self.weight).flatten(0, 1), target.flatten(), reduction="sum")
        [slope] = torch.autograd.grad(total, y, create_graph=self.again, retain_graph=True)
        return total + (slope.square().sum() if self.again else (slope * y).sum()), (target != -100).sum()


def train(model: cw.Model, plan: dict[str, int], steps: int = 3) -> None:
    """A trainer's steps."""
    trainer = cw.Trainer(model, TRAIN, plan=plan)
    for _ in range(steps):
        trainer.step(cw.Batch.of(*data()))


def by_hand(model: cw.Model, steps: int = 3) -> None:
    """The same, as anyone would write it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        x, target = data()
        total, count = model.head.loss(model(x)[0], target)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(6, 2, 2, generator=generator, dtype=DOUBLE), torch.randint(3, (6, 2), generator=generator)


def made(head: Callable[[], nn.Module]) -> cw.Model:
    torch.manual_seed(0)
    return cw.Model(nn.Linear(2, 3), cw.LSTM(3, 4, 2), head()).double()


def same(one: nn.Module, other: nn.Module) -> None:
    # float64; chunks add up in another order.
    torch.testing.assert_close(dict(one.named_parameters()), dict(other.named_parameters()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("plan", [{}, {"chunk_steps": 2}])
@pytest.mark.parametrize("again", [False, True])
def test_a_gradient_within_a_loss(again: bool, plan: dict[str, int]) -> None:
    torch.manual_seed(1)
    ours = made(lambda: Penalized(again))
    theirs = copy.deepcopy(ours)
    train(ours, plan)
    by_hand(theirs)
    same(ours, theirs)
