"""The cell `slstm`: the paper's equations without their stabiliser, which must not change the answer, gates beyond what exp can hold, and
tasks that need a state.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import carrywave as cw
from carrywave.errors import SpecError, UserError
from carrywave.plan.units import Units
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse

DOUBLE = torch.float64


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def layers_of(*sizes: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return cw.SLSTM(*sizes, **{"dtype": DOUBLE, **options})


def by_the_paper(layers: Any, x: Tensor) -> Tensor:
    """One layer with two heads, without a stabiliser: gates as they are."""
    h, c, n = (x.new_zeros(x.shape[1], 6) for _ in range(3))
    outputs = []
    for step in x:
        gates = step @ layers.weight_ih_l0.T + layers.bias_ih_l0 + layers.bias_hh_l0
        blocks = layers.weight_hh_l0.view(4, 2, 3, 3)  # gate, head, row, column
        gates = gates + torch.einsum("bkj,gkij->bgki", h.view(-1, 2, 3), blocks).flatten(1)
        i, f, z, o = gates.chunk(4, dim=-1)
        c = f.sigmoid() * c + i.exp() * z.tanh()
        n = f.sigmoid() * n + i.exp()
        h = o.sigmoid() * c / n
        outputs.append(h)
    return torch.stack(outputs)


def test_the_stabiliser_cancels_out() -> None:
    layers, x = layers_of(3, 6, num_heads=2), 3.0 * numbers(9, 4, 3)
    found, expected = layers(x)[0], by_the_paper(layers, x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    grads = [torch.autograd.grad(each.square().sum(), list(layers.parameters())) for each in (found, expected)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_that_exp_cannot_hold(dtype: torch.dtype) -> None:
    layers = cw.SLSTM(3, 6)
    with torch.no_grad():
        layers.weight_ih_l0.mul_(500.0)
    x = numbers(50, 4, 3).float().requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        y, carry = layers(x)
    y.float().square().sum().backward()
    assert y.dtype == dtype
    assert carry.m.abs().max() > 100  # exp of it overflows
    for tensor in (y, *carry, *(parameter.grad for parameter in layers.parameters())):
        assert bool(tensor.isfinite().all())
    assert y.abs().max() <= 1.0  # a mean of numbers between -1 and 1


def test_half_precision_sums_in_float32() -> None:
    """A thousand equal candidates have their own mean; in bfloat16 the sum would stop growing at 256."""
    layers = cw.SLSTM(1, 1)
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            parameter.copy_(torch.tensor([0.0, 20.0, 0.5, 20.0])[:, None] if name.startswith("weight_ih") else torch.zeros(()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, carry = layers(torch.ones(1000, 1, 1))
    torch.testing.assert_close(carry.n.flatten(), torch.tensor([1000.0]), rtol=1e-4, atol=0.0)  # float32, a thousand roundings
    torch.testing.assert_close((carry.c / carry.n).flatten(), torch.tensor([0.5]).tanh(), rtol=2**-8, atol=0.0)  # weights in bf16


def test_only_its_output_is_learned_or_kept() -> None:
    layers = layers_of(3, 6, learned_carry=True, zoneout=0.1)
    assert [name for name, _ in layers.named_parameters() if name.startswith("carry")] == ["carry_h_l0"]
    assert layers.zoneout == (0.1, 0.0, 0.0, 0.0)
    with pytest.raises(UserError, match=r"zoneout=\(0.1, 0.2\) for the cell slstm; use a chance of at least 0 and below 1$"):
        layers_of(3, 6, zoneout=(0.1, 0.2))


def test_from_a_spec() -> None:
    spec = parse({"model": {"cell": "slstm", "hidden": 8, "heads": 4, "zoneout": [0.1], "recurrent_dropout": 0.2, "cell_norm": True}})
    assert (spec.model.heads, spec.model.zoneout) == (4, (0.1,))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"heads": 3}, "heads is 3, which must divide hidden 128"),
        ({"projection": 4, "heads": 2}, "projection 4 would mix what 2 heads keep apart"),
        ({"zoneout": [0.1, 0.2, 0.3]}, "or one for each of h, c"),
        ({"zoneout": 1.0}, "zoneout"),
    ]
    for given, message in cases:
        with pytest.raises(SpecError, match=message):
            parse({"model": given})


def test_the_planner_counts_its_parameters_and_what_backward_keeps() -> None:
    sizes: dict[str, Any] = {"hidden": 512, "layers": 2}
    plain, noisy, normed, heads = (
        Units.of(parse({"model": sizes | more}), DataFacts(vocabulary=4096)).units[1]
        for more in ({}, {"zoneout": 0.1}, {"cell_norm": True}, {"heads": 4})
    )
    assert {unit.deferred for unit in (noisy, normed, heads)} == {0}
    assert noisy.parameters == plain.parameters
    assert normed.parameters == plain.parameters + (4 + 4 + 2) * 512
    assert heads.parameters == plain.parameters - 4 * 512 * 512 * 3 // 4
    assert normed.kept > noisy.kept > plain.kept


@pytest.mark.slow  # hundreds of steps of training
@pytest.mark.parametrize("modulus", [2, 3])
@pytest.mark.parametrize(("kind", "options"), [(cw.SLSTM, {"num_heads": 2}), (cw.LSTM, {})], ids=["slstm", "lstm"])
def test_running_sums_are_learned(kind: Any, options: dict[str, Any], modulus: int) -> None:
    """Parity and sums modulo 3 of 40 numbers, learned from 20: no sum of the past can give them, only a state that is carried along."""
    torch.manual_seed(1)
    layers, head = kind(modulus, 32, **options), nn.Linear(32, modulus)
    parameters = [*layers.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)

    def drawn(steps: int, lanes: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(0, modulus, (steps, lanes))
        return head(layers(one_hot(x, modulus).float())[0]), x.cumsum(0) % modulus

    for step in range(400):
        scores, sums = drawn(10 if step % 2 else 20, 64)
        optimizer.zero_grad()
        cross_entropy(scores.flatten(0, 1), sums.flatten()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = 0.01 * min(1.0, (400 - step) / 200)
        optimizer.step()
    with torch.no_grad():
        scores, sums = drawn(40, 256)
    right = (scores.argmax(-1) == sums).float()
    assert right.mean() > 0.99
    assert right[-1].mean() > 0.98
