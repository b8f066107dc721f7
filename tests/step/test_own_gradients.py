"""Gradients without an update: what is in `.grad`, how backwards add up, what apply does with it, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from _small_models import VOCABULARY, batch_of, build

import carrywave as cw
from carrywave.errors import Diverged, UserError
from carrywave.model.heads.classes import Softmax
from carrywave.plan.plan import Plan

PLANS = {
    "whole": Plan(),
    "chunks": Plan(chunk_steps=2),
    "micro-batches": Plan(micro_batches=2),
    "recomputed": Plan(chunk_steps=2, recompute=True),
}
KEYS: dict[str, Any] = {"lr": 0.05, "clip": 0.3}
FIRST, SECOND = batch_of(5, [5, 3, 4, 2]), batch_of(4, [4, 4, 1, 2])


def trainer_of(plan: str = "whole", *, dropout: float = 0.3, **keys: Any) -> cw.Trainer:
    return cw.Trainer(build(dropout=dropout), KEYS | keys, plan=PLANS[plan])


def gradients(trainer: cw.Trainer) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def weights(trainer: cw.Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.parameters().items()}


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-10, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")  # float64


def without_dropout() -> cw.Model:
    torch.manual_seed(1)
    return cw.Model(nn.Embedding(VOCABULARY, 6), cw.LSTM(6, 6, 2), Softmax(6, VOCABULARY)).double()


class Plain(nn.Module):
    """A model and its mean loss in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = without_dropout()

    def loss(self, batch: cw.Batch) -> Tensor:
        y, state = self.net(batch.inputs, lengths=batch.lengths)
        assert batch.targets is not None
        return nn.functional.cross_entropy(self.net.output(y, state).flatten(0, 1), batch.targets.flatten(), ignore_index=-100)


@pytest.mark.parametrize("plan", PLANS)
def test_the_gradient_is_that_of_the_mean_loss(plan: str) -> None:
    plain, trainer = Plain(), cw.Trainer(without_dropout(), KEYS, plan=PLANS[plan])
    for number, batch in enumerate((FIRST, SECOND)):
        loss = plain.loss(batch)
        (loss * (1.0 if number == 0 else -0.5)).backward()
        ours = trainer.backward(batch, weight=1.0 if number == 0 else -0.5)
        torch.testing.assert_close(ours, loss.detach(), rtol=1e-12, atol=0)
        close(gradients(trainer), {name: p.grad for name, p in plain.net.named_parameters() if p.grad is not None})
    torch.testing.assert_close(trainer.gradient_norm(), nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("plan", "optimizer"), [*((plan, "adam") for plan in PLANS), ("whole", "sgd")])
def test_backward_and_apply_are_a_step(plan: str, optimizer: str) -> None:
    """With dropout, a carry and clipping; also mixed with steps."""
    ours, theirs = (trainer_of(plan, optimizer=optimizer) for _ in range(2))
    for number in range(4):
        batches = [batch_of(4, [4] * 4, fresh=[number == 0] * 4)]
        wanted = theirs.step(*batches)
        if number == 2:
            found = ours.step(*batches)
        else:
            before = weights(ours)
            found = ours.backward(*batches)
            assert all(torch.equal(tensor, before[name]) for name, tensor in ours.parameters().items())
            ours.apply()
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=0)
        close(weights(ours), weights(theirs))
        close(gradients(ours), gradients(theirs))


def test_again_repeats_a_backward() -> None:
    trainer = trainer_of()
    goes_on = batch_of(4, [4] * 4, fresh=[False] * 4)
    trainer.step(batch_of(5, [5] * 4))
    trainer.backward(goes_on)
    first = gradients(trainer)
    trainer.zero_grad()
    trainer.backward(goes_on, again=True)
    assert all(torch.equal(tensor, first[name]) for name, tensor in gradients(trainer).items())
    trainer.zero_grad()
    trainer.backward(goes_on)  # the next window, with other masks
    assert not any(torch.equal(tensor, first[name]) for name, tensor in gradients(trainer).items())


def sam(trainer: cw.Trainer, batch: cw.Batch, radius: float) -> Tensor:
    """A step of sharpness-aware minimization."""
    loss = trainer.backward(batch)
    scale = radius / (trainer.gradient_norm() + 1e-12)
    before = {p: p.detach().clone() for p in trainer.model.parameters() if p.grad is not None}
    with torch.no_grad():
        for p in before:
            p += p.grad * scale
    trainer.zero_grad()
    trainer.backward(batch, again=True)
    with torch.no_grad():
        for p, value in before.items():
            p.copy_(value)
    trainer.apply()
    return loss


@pytest.mark.parametrize("plan", PLANS)
def test_sam_beside_plain_torch(plan: str) -> None:
    plain, trainer = Plain(), cw.Trainer(without_dropout(), {"optimizer": "sgd", "lr": 0.5}, plan=PLANS[plan])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for batch in (FIRST, SECOND, FIRST):
        plain.loss(batch).backward()
        norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        moves = {p: 0.1 * p.grad / (norm + 1e-12) for p in plain.parameters() if p.grad is not None}
        with torch.no_grad():
            for p, move in moves.items():
                p += move
        optimizer.zero_grad()
        plain.loss(batch).backward()
        with torch.no_grad():
            for p, move in moves.items():
                p -= move
        optimizer.step()
        optimizer.zero_grad()
        sam(trainer, batch, 0.1)
    close(weights(trainer), {name: p.detach() for name, p in plain.net.named_parameters()})


def test_numbers_that_are_not_finite() -> None:
    trainer = trainer_of()
    start = weights(trainer)
    trainer.backward(FIRST)
    trainer.model.head.bias.grad.fill_(torch.nan)
    with pytest.raises(Diverged, match="no longer finite"):
        trainer.apply()
    assert all(torch.equal(tensor, start[name]) for name, tensor in trainer.parameters().items())
    trainer.backward(FIRST)  # from zero
    trainer.apply()
    skips = trainer_of(on_nan="skip")
    skips.backward(FIRST, weight=float("inf"))
    assert not torch.isfinite(skips.apply())
    assert all(torch.equal(tensor, start[name]) for name, tensor in skips.parameters().items())


def test_fp16_skips_an_overflow_and_lowers_its_scale() -> None:
    net = build().float()
    trainer = cw.Trainer(net, {"precision": "fp16", "lr": 0.01})
    start = weights(trainer)
    assert trainer.scaler is not None
    trainer.scaler.scale.fill_(2.0**60)
    trainer.backward(FIRST)
    trainer.apply()
    assert float(trainer.scaler.scale) == 2.0**59
    assert all(torch.equal(tensor, start[name]) for name, tensor in trainer.parameters().items())
    trainer.scaler.scale.fill_(2.0**4)
    trainer.backward(FIRST)
    trainer.apply()
    assert not torch.equal(trainer.model.head.bias, start["head.bias"])


def test_what_is_refused() -> None:
    trainer = trainer_of()
    with pytest.raises(UserError, match=r"no gradient to apply; call trainer\.backward\(batch\)"):
        trainer.apply()
    with pytest.raises(UserError, match=r"again=True repeats the last trainer\.backward, but there was none"):
        trainer.backward(FIRST, again=True)
    trainer.backward(FIRST)
    for lost in (lambda: trainer.step(FIRST), trainer.state_dict):
        with pytest.raises(UserError, match=r"have not been applied; call trainer\.apply\(\), or trainer\.zero_grad\(\)"):
            lost()
    trainer.zero_grad()
    trainer.step(FIRST)
