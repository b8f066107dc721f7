"""Optimizers against hand loops, and their state by names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from carrywave.errors import RunError
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.optim import weight_average
from carrywave.step.optim.optimizer import NTASGD, load_state, nonmonotone, state_tensors

CPU = torch.device("cpu")
SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "b": ()}
KINDS = ["sgd", "adam", "adamw", "ntasgd"]


def parameters(dtype: torch.dtype = torch.float64, seed: int = 1) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))) for name, shape in SHAPES.items()]


def give_gradients(named: list[tuple[str, nn.Parameter]], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    for _, parameter in named:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
    return [parameter.grad for _, parameter in named if parameter.grad is not None]


def run(spec: TrainSpec, named: list[tuple[str, nn.Parameter]], steps: int) -> torch.optim.Optimizer:
    optimizer = optimizers.build(spec, named, CPU)
    for step in range(steps):
        give_gradients(named, step)
        optimizer.step()
    return optimizer


def values(named: list[tuple[str, nn.Parameter]]) -> list[Tensor]:
    return [parameter.detach().clone() for _, parameter in named]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_by_hand(momentum: float) -> None:
    named = parameters()
    weights, speeds = values(named), [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES.values()]
    run(TrainSpec(optimizer="sgd", lr=0.1, momentum=momentum, weight_decay=0.01), named, 4)
    mirror = parameters()
    for step in range(4):
        for number, grad in enumerate(give_gradients(mirror, step)):
            speeds[number] = momentum * speeds[number] + grad + 0.01 * weights[number]
            weights[number] = weights[number] - 0.1 * speeds[number]
    assert_close(values(named), weights, rtol=1e-13, atol=1e-15)  # float64, a few operations in another order


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_adam_by_hand(kind: str) -> None:
    named = parameters()
    weights = values(named)
    first = [torch.zeros_like(w) for w in weights]
    second = [torch.zeros_like(w) for w in weights]
    run(TrainSpec(optimizer=kind, lr=0.1, betas=(0.8, 0.9), weight_decay=0.05), named, 4)
    mirror = parameters()
    for step in range(4):
        for n, grad in enumerate(give_gradients(mirror, step)):
            if kind == "adam":
                grad = grad + 0.05 * weights[n]
            else:
                weights[n] = weights[n] * (1 - 0.1 * 0.05)
            first[n] = 0.8 * first[n] + 0.2 * grad
            second[n] = 0.9 * second[n] + 0.1 * grad * grad
            tall, wide = first[n] / (1 - 0.8 ** (step + 1)), second[n] / (1 - 0.9 ** (step + 1))
            weights[n] = weights[n] - 0.1 * tall / (wide.sqrt() + 1e-8)
    assert_close(values(named), weights, rtol=1e-12, atol=1e-14)  # float64; the root and the bias correction round


def test_ntasgd_by_hand() -> None:
    named = parameters()
    weights = values(named)
    optimizer = optimizers.build(TrainSpec(optimizer="ntasgd", lr=0.1, weight_decay=0.02), named, CPU)
    assert isinstance(optimizer, NTASGD)
    seen: list[list[Tensor]] = []
    for step in range(6):
        if step == 2:
            optimizer.trigger()
            seen.append([w.clone() for w in weights])
        grads = give_gradients(named, step)
        weights = [w - 0.1 * (g + 0.02 * w) for w, g in zip(weights, grads, strict=True)]
        optimizer.step()
        if step >= 2:
            seen.append([w.clone() for w in weights])
    assert optimizer.average_active
    assert_close(values(named), weights, rtol=1e-13, atol=1e-15)  # float64
    raw = values(named)
    with weight_average.swapped(optimizer):
        means = [torch.stack(column).mean(0) for column in zip(*seen, strict=True)]
        assert_close(values(named), means, rtol=1e-13, atol=1e-14)  # a running mean rounds at each step
    assert all(torch.equal(a, b) for a, b in zip(values(named), raw, strict=True))


@pytest.mark.parametrize(
    ("history", "nonmono", "wanted"),
    [
        ([], 2, False),
        ([3.0], 2, False),
        ([3.0, 2.0, 2.5], 2, False),  # nothing is old enough
        ([3.0, 2.0, 2.5, 2.9], 2, False),  # 2.9 beats the only old one, 3.0
        ([2.0, 2.5, 2.5, 2.1], 2, True),
        ([2.0, 2.5, 2.5, 2.0], 2, False),  # equal is not worse
        ([2.0, 1.0, 1.2], 1, False),
        ([2.0, 1.0, 1.2, 1.1], 1, True),
    ],
)
def test_trigger_rule(history: list[float], nonmono: int, wanted: bool) -> None:
    assert nonmonotone(history, nonmono) is wanted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_goes_on_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    spec = TrainSpec(optimizer=kind, lr=0.1, momentum=0.9 if kind == "sgd" else 0.0)
    straight, broken = parameters(dtype), parameters(dtype)
    first, second = optimizers.build(spec, straight, CPU), optimizers.build(spec, broken, CPU)
    for step in range(6):
        if step == 3:
            for optimizer in (first, second):
                if isinstance(optimizer, NTASGD):
                    optimizer.trigger()
        if step == 4:  # a new process: parameters in another order, found again by name
            kept = {name: tensor.clone() for name, tensor in state_tensors(second, broken).items()}
            broken = [(name, nn.Parameter(p.detach().clone())) for name, p in reversed(broken)]
            second = optimizers.build(spec, broken, CPU)
            load_state(second, broken, kept)
        for named, optimizer in ((straight, first), (broken, second)):
            give_gradients(sorted(named, key=lambda pair: list(SHAPES).index(pair[0])), step)
            optimizer.step()
    assert all(torch.equal(dict(straight)[name], dict(broken)[name]) for name in SHAPES)
    ours, theirs = state_tensors(first, straight), state_tensors(second, broken)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def faulty(change: str) -> dict[str, Tensor]:
    named = parameters()
    kept = dict(state_tensors(optimizers.build(TrainSpec(optimizer="adam"), named, CPU), named))
    match change:
        case "missing":
            del kept["exp_avg/a.bias"]
        case "extra":
            kept["exp_avg/c"] = torch.zeros(2)
        case "shape":
            kept["exp_avg/a.bias"] = torch.zeros(6, dtype=torch.float64)
        case "dtype":
            kept["exp_avg/a.bias"] = torch.zeros(5, dtype=torch.float32)
    return kept


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "has no optimizer state exp_avg/a.bias"),
        ("extra", "exp_avg/c, which this run does not have"),
        ("shape", r"exp_avg/a.bias is torch.float64 \[6\], but this run needs torch.float64 \[5\]"),
        ("dtype", r"exp_avg/a.bias is torch.float32 \[5\], but this run needs torch.float64 \[5\]"),
    ],
)
def test_refuses_a_state_that_does_not_fit(change: str, said: str) -> None:
    named = parameters()
    with pytest.raises(RunError, match=said):
        load_state(optimizers.build(TrainSpec(optimizer="adam"), named, CPU), named, faulty(change))


def test_ntasgd_goes_back_to_before_its_trigger() -> None:
    named = parameters()
    optimizer = NTASGD([p for _, p in named], 0.1)
    optimizer.trigger()
    load_state(optimizer, named, {})
    assert not optimizer.average_active
