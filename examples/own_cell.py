"""Layers of a cell of your own: its gates, the parts of its carry, and one step. Everything else is as for any other cell.

Two layers are on two devices, and the second works on a chunk of time while the first goes on to the next. On one device (without `devices`
and `plan`) the loss is the same.

    python examples/own_cell.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.cells.cell import Extra


class Carry(NamedTuple):
    h: Tensor
    mean: Tensor


def step(gates: Tensor, carry: Any, weights: Any) -> tuple[Tensor, Tensor]:  # two gates: what is new, and how much of it
    new, share = (gates + weights.recurrent(carry.h)).chunk(2, dim=-1)
    mean = carry.mean + share.sigmoid() * weights.candidate(new.tanh() - carry.mean)
    return weights.named("gain") * mean, mean


def extra(hidden: int) -> dict[str, Extra]:
    return {"gain": Extra((hidden,), 1.0)}  # shape and initial value


class Mean(cw.Recurrent):
    cell = cw.Cell("mean", gates=2, carry=Carry, step=step, extra=extra)


class Head(nn.Linear):
    def loss(self, y: Tensor, tag: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(self(y).flatten(0, 1), tag.flatten(), reduction="sum"), (tag != -100).sum()


def main(devices: int = 2, plan: dict[str, int] | None = None) -> float:
    torch.manual_seed(0)
    x = torch.randn(200, 12, 3)
    tags = (x.cumsum(1).sum(2) > 0).long()
    model = cw.Model(nn.Linear(3, 8), Mean(8, 16, num_layers=2), Head(16, 2))
    settings: dict[str, Any] = {"task": "tagging", "batch": {"tokens": 512}, "train": {"epochs": 4, "precision": "fp64"}}
    result = cw.fit(model, (x, tags), **settings, devices=devices, plan=plan)
    loss = result.metrics["valid"]["loss"]
    print(f"{loss:.5f}")
    return loss


if __name__ == "__main__":
    main(2, {"stages": 2, "chunk_steps": 4})
