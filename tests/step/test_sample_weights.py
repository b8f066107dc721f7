"""Weights of single targets in a step: every cut of lanes and time, resets, users' own heads and modules, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.errors import UserError
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.model.initialization import initialize
from carrywave.model.model import Model

TOKENS, CLASSES, STEPS, LANES = 7, 3, 6, 5
LENGTHS = [6, 4, 6, 1, 5]


def model_of(head: nn.Module | None = None) -> Model:
    model = Model(Embedding(TOKENS, 4).double(), cw.LSTM(4, 5, dtype=torch.float64), (head or Softmax(5, CLASSES)).double())
    initialize(model, 1)
    return model


def batch_of(weights: Any = "by step", *, pooled: bool = False, **options: Any) -> cw.Batch:
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(TOKENS, (STEPS, LANES), generator=generator)
    target = torch.randint(CLASSES, (LANES,) if pooled else (STEPS, LANES), generator=generator)
    if isinstance(weights, str):
        weights = torch.rand((STEPS, LANES) if weights == "by step" else (LANES,), generator=generator, dtype=torch.float64) * 2
        weights.view(-1)[2] = 0.0
    return cw.Batch.of(x, target, options.pop("lengths", LENGTHS), step=0, pooled=pooled, weights=weights, **options)


def trained(model: nn.Module, batch: cw.Batch, plan: dict[str, Any] | None = None, **options: Any) -> dict[str, Tensor]:
    spec = {"precision": "fp64", "optimizer": "sgd", "lr": 1.0, "clip": None}
    trainer = cw.Trainer(model, spec, plan=plan or {}, keep_state=False, **options)
    loss = trainer.step(batch)
    return {"loss": torch.tensor(float(loss), dtype=torch.float64)} | {name: p.detach() for name, p in model.named_parameters()}


class OwnSteps(nn.Module):
    """A user's head with a weighted loss."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, CLASSES)

    def forward(self, y: Tensor) -> Tensor:
        return self.out(y)

    def loss(self, y: Tensor, target: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        losses = nn.functional.cross_entropy(self(y).flatten(0, 1), target.flatten(), reduction="none")
        weights = (target != -100).to(y.dtype) if weights is None else torch.where(target == -100, 0.0, weights)
        return (losses * weights.flatten()).sum(), weights.sum()


class NoWeights(OwnSteps):
    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().loss(y, target)


class Whole(nn.Module):
    """A user's model in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.out = nn.Embedding(TOKENS, 4), nn.LSTM(4, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embedding(x))[0])


def weighted_loss(out: Tensor, target: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    losses = nn.functional.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="none")
    return (losses * weights.flatten()).sum(), torch.where(target != -100, weights, 0.0).sum()


def test_a_step_minimises_the_weighted_mean() -> None:
    batch, model = batch_of(), model_of()
    y, _ = model(batch.inputs, lengths=batch.lengths)
    assert batch.targets is not None
    assert batch.weights is not None
    losses = nn.functional.cross_entropy(model.output(y, model.start(LANES)).flatten(0, 1), batch.targets.flatten(), reduction="none")
    mean = (losses * batch.weights.flatten()).sum() / batch.weights.sum()
    assert not batch.weights[batch.targets == -100].any()
    wanted = [p.detach() - g for p, g in zip(model.parameters(), torch.autograd.grad(mean, list(model.parameters())), strict=True)]
    found = trained(model, batch)
    torch.testing.assert_close(found.pop("loss"), mean.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(list(found.values()), wanted, rtol=1e-10, atol=1e-12)


def test_a_loss_without_weights_is_refused_where_a_batch_has_some() -> None:
    trained(model_of(NoWeights()), batch_of(None))
    with pytest.raises(UserError, match="the batch has weights, but the loss of the head NoWeights takes none; give it a keyword weights"):
        trained(model_of(NoWeights()), batch_of())
    with pytest.raises(UserError, match="the loss of the module Whole takes none"):
        trained(Whole().double(), batch_of(), loss=lambda out, target: weighted_loss(out, target, torch.ones_like(target)))
