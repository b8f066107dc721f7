"""torch's dropout in a user's modules: found and changed as in torch, in any shape where nothing is cut, and the same on every plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import carrywave as cw

STEPS, LANES, FEATURES, WIDTH, CLASSES = 6, 8, 9, 7, 3
PLANS: list[dict[str, Any]] = [{"micro_batches": 2}, {"chunk_steps": 2}, {"chunk_steps": 2, "recompute": True}]
Change = Callable[[nn.Module, int], None]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(WIDTH, CLASSES)

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = self.out(self.drop(y))
        return out

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return functional.cross_entropy(self(y).flatten(0, 1), target.flatten(), reduction="sum"), torch.tensor(target.numel())


def model_of(*encoder: nn.Module, **between: nn.Module) -> cw.Model:
    model = cw.Model(nn.Sequential(*encoder), cw.LSTM(FEATURES, WIDTH), Head(), **between).double()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return model


def losses(model: nn.Module, plan: dict[str, Any], change: Change = lambda model, step: None, steps: int = 4) -> list[float]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(STEPS, LANES, FEATURES, generator=generator).double()
    batch = cw.Batch.of(x, torch.randint(CLASSES, (STEPS, LANES), generator=generator))
    trainer = cw.Trainer(model, {"optimizer": "sgd", "lr": 0.3, "precision": "fp64"}, plan=plan, device="cpu", keep_state=False)
    found = []
    for step in range(steps):
        change(model, step)
        found.append(float(trainer.step(batch)))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("encoder", [nn.ELU(inplace=True), nn.Dropout(0.5, inplace=True)], ids=["ELU", "Dropout"])
def test_a_layer_that_writes_into_its_input_leaves_the_batch_as_it_was(encoder: nn.Module, plan: dict[str, Any]) -> None:
    def made() -> cw.Model:
        return model_of(encoder, nn.Linear(FEATURES, FEATURES))

    assert losses(made(), plan) == pytest.approx(losses(made(), {}), rel=1e-12)
