"""The loss scaler: skipped steps bit for bit, growth and backoff, on the CPU where every optimizer must heed it too."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from carrywave.spec.train_spec import TrainSpec
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.optim.loss_scaler import Scaler
from carrywave.step.optim.optimizer import NTASGD, state_tensors

CPU = torch.device("cpu")
SPECS = {
    "sgd": TrainSpec(optimizer="sgd", lr=0.1, weight_decay=0.1),
    "momentum": TrainSpec(optimizer="sgd", lr=0.1, momentum=0.9),
    "adam": TrainSpec(optimizer="adam", lr=0.1, weight_decay=0.1),
    "adamw": TrainSpec(optimizer="adamw", lr=0.1, weight_decay=0.1),
    "ntasgd": TrainSpec(optimizer="ntasgd", lr=0.1, weight_decay=0.1),
    "averaging": TrainSpec(optimizer="ntasgd", lr=0.1),
}


def parameters() -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(3)
    return [(name, nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in (("w", (9, 5)), ("b", (7,)))]


def built(name: str, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    optimizer = optimizers.build(SPECS[name], named, CPU)
    if name == "averaging":
        assert isinstance(optimizer, NTASGD)
        optimizer.trigger()
    return optimizer


def give(named: list[tuple[str, nn.Parameter]], step: int, scale: float, bad: float | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(50 + step)
    for _, parameter in named:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
    grads = [parameter.grad for _, parameter in named if parameter.grad is not None]
    if bad is not None:
        grads[-1].view(-1)[3] = bad
    return grads


def bits(named: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named} | {name: t.clone() for name, t in state_tensors(optimizer, named).items()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("first", [0, 2])
def test_an_overflow_changes_nothing(name: str, bad: float, first: int) -> None:
    named = parameters()
    optimizer, scaler = built(name, named), Scaler(initial=8.0)
    for step in range(first):
        scaler.unscale_(give(named, step, 8.0))
        scaler.step(optimizer)
    before = bits(named, optimizer)
    assert scaler.unscale_(give(named, 9, 8.0, bad)).item() is True
    scaler.step(optimizer)
    assert same(bits(named, optimizer), before)
    assert scaler.scale.item() == 4.0
    assert scaler.unscale_(give(named, 10, 4.0)).item() is False
    scaler.step(optimizer)
    assert not torch.equal(bits(named, optimizer)["w"], before["w"])


@pytest.mark.parametrize("name", SPECS)
def test_scaled_steps_are_plain_steps_with_the_skipped_ones_left_out(name: str) -> None:
    scaled, plain = parameters(), parameters()
    first, second, scaler = built(name, scaled), built(name, plain), Scaler(initial=2.0**10)
    for step in range(6):
        bad = math.inf if step in (0, 3) else None
        scaler.unscale_(give(scaled, step, scaler.scale.item(), bad))
        scaler.step(first)
        if bad is None:
            give(plain, step, 1.0)
            second.step()
    # A power of two scales exactly, so not a bit may differ.
    assert same(bits(scaled, first), bits(plain, second))


def test_grows_after_good_steps_in_a_row_and_backs_off_at_once() -> None:
    scaler = Scaler(initial=16.0, interval=3)
    course = []
    for bad in [False, False, True, False, False, False, False, True, True]:
        scaler.unscale_([torch.tensor([math.inf if bad else 1.0])])
        scaler.update_()
        course.append((scaler.scale.item(), scaler.good_steps.item()))
    assert course == [(16.0, 1), (16.0, 2), (8.0, 0), (8.0, 1), (8.0, 2), (16.0, 0), (16.0, 1), (8.0, 0), (4.0, 0)]


def test_gradients_of_a_scaled_loss_come_back_exactly() -> None:
    scaler = Scaler(initial=2.0**7)
    x = torch.tensor([1.5, -2.25], requires_grad=True)
    torch.autograd.backward((x * x).sum(), scaler.scale)
    assert x.grad is not None
    assert x.grad.tolist() == [3.0 * 2**7, -4.5 * 2**7]
    scaler.unscale_([x.grad])
    assert x.grad.tolist() == [3.0, -4.5]
