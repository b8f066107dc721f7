"""Training and evaluation mode: the trainer trains, and what the user keeps in `eval` stays there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.errors import UserError

SGD = {"optimizer": "sgd", "lr": 0.1, "precision": "fp64"}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(4, 1)

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = self.out(self.drop(y))
        return out

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (self(y) - target).square().sum(), torch.tensor(target.numel())


class OpaqueModel(nn.Module):
    """The same parts, as a module in one piece."""

    def __init__(self, encoder: nn.Module, lstm: nn.Module, head: Head) -> None:
        super().__init__()
        self.encoder, self.lstm, self.head = encoder, lstm, head

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.encoder(x))[0])
        return out

    def loss(self, out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (out - target).square().sum(), torch.tensor(target.numel())


def build(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)), cw.LSTM(3, 4), Head()).double()  # type: ignore[call-arg]


def batch() -> cw.Batch:
    draw = torch.Generator().manual_seed(1)
    x, target = (torch.randn(4, 3, width, generator=draw, dtype=torch.float64) for width in (2, 1))
    return cw.Batch.of(x, target, step=0)


@pytest.mark.parametrize("kind", [cw.Model, OpaqueModel])
def test_a_part_kept_in_eval_stays_there_when_the_whole_model_was_put_in_eval(kind: type[nn.Module]) -> None:
    steady, looked_at = build(kind), build(kind)
    losses = []
    for net in (steady, looked_at):
        trainer = cw.Trainer(net, SGD)
        net.encoder.eval()
        told = [trainer.step(batch())]
        if net is looked_at:
            net.eval()  # for an evaluation of one's own
        losses.append([*told, trainer.step(batch()), trainer.step(batch())])
        assert net.training
        assert net.head.drop.training
        assert not any(module.training for module in net.encoder.modules())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", [cw.Model, OpaqueModel])
def test_a_step_trains_a_model_in_eval_and_follows_train(kind: type[nn.Module]) -> None:
    net = build(kind).eval()  # as a model that was just loaded
    trainer = cw.Trainer(net, SGD)
    trainer.step(batch())
    assert all(module.training for module in net.modules())
    net.encoder.eval()
    trainer.step(batch())
    net.eval()
    net.train()  # of the whole model, said by the user: the encoder is no longer kept in eval
    trainer.step(batch())
    assert all(module.training for module in net.modules())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.norm = nn.Linear(2, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.read(x).flatten(0, 1)).unflatten(0, x.shape[:2])
        return out


def test_a_batch_norm_kept_in_eval_is_accepted_on_every_plan_and_refused_in_training_mode() -> None:
    found = []
    for plan, options in [({}, {}), ({"chunk_steps": 2}, {}), ({"micro_batches": 2}, {})]:
        torch.manual_seed(0)
        encoder = Normed()
        encoder.norm.running_mean.copy_(torch.arange(3.0))  # type: ignore[union-attr]
        encoder.norm.eval()
        model = cw.Model(encoder, cw.LSTM(3, 4), Head()).double()
        trainer = cw.Trainer(model, SGD | options, plan=plan)
        losses = [float(trainer.step(batch())) for _ in range(2)]
        found.append([*losses, trainer.evaluate([batch()]), *encoder.norm.weight.tolist(), *encoder.norm.running_mean.tolist()])  # type: ignore[union-attr]
        losses.append(float(trainer.step(batch())))
        model.train()
        with pytest.raises(UserError, match=r"encoder\.norm is a BatchNorm1d in training mode, .* keep its statistics as they are"):
            trainer.step(batch())
    for each in found:
        assert each == pytest.approx(found[0], rel=1e-11)  # float64: sums in another order
