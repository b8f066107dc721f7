"""Recurrent dropout, zoneout and norms inside the cell, of every cell: against loops in plain PyTorch that draw their own masks, and their
gradients against differences.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

import carrywave as cw
from carrywave.errors import UserError
from carrywave.kernels import random
from carrywave.kernels.step_marks import CellNoise

sys.path.insert(0, str(Path(__file__).parent))
from _odd import CELLS

every_cell = pytest.mark.parametrize("kind", CELLS.values(), ids=list(CELLS))
DOUBLE = torch.float64
CLOSE = {"rtol": 1e-12, "atol": 1e-14}
NOISY: dict[str, Any] = {"recurrent_dropout": 0.3, "zoneout": 0.4, "cell_norm": True}


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def stack(kind: Any, *sizes: Any, **options: Any) -> Any:
    """Layers whose parameters are all random: norms begin with ones, which hide mistakes."""
    torch.manual_seed(0)
    layers = kind(*sizes, **{"dtype": DOUBLE, **options})
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(layers.named_parameters())):
            parameter.copy_(0.5 * numbers(*parameter.shape, seed=number))
    return layers


def mask(key: Tensor, site: str, p: float, lanes: Tensor, shape: tuple[int, int, int], start: int) -> Tensor:
    """Where numbers between 0 and 1 are at least p, by definition: one for each time, lane and unit."""
    time, unit = torch.arange(start, start + shape[0])[:, None, None], torch.arange(shape[2])
    return random.uniform(random.fold(key, random.site(site)), time, lanes[:, None], unit, dtype=DOUBLE) >= p


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("way", ["", "_reverse"])
def test_an_lstm_with_everything_is_the_loop_of_the_papers(training: bool, way: str) -> None:
    drop, zone_h, zone_c = 0.3, 0.4, 0.2
    layers = stack(cw.LSTM, 3, 5, bidirectional=True, recurrent_dropout=drop, zoneout=(zone_h, zone_c), cell_norm=True).train(training)
    x, key, lanes, start = numbers(6, 4, 3).requires_grad_(), random.key(5, 1), torch.tensor([7, 2, 0, 9]), 11
    w = {name.removesuffix("_l0" + way): each for name, each in layers.named_parameters() if name.endswith("_l0" + way)}
    kept = mask(key, f"lstm_l0{way}.candidate", drop, lanes, (6, 4, 5), start).double() / (1.0 - drop)
    stays = [~mask(key, f"lstm_l0{way}.zoneout.{part}", p, lanes, (6, 4, 5), start) for part, p in enumerate((zone_h, zone_c))]
    h, c = h0, c0 = numbers(4, 5, seed=3), numbers(4, 5, seed=4)
    outputs: dict[int, Tensor] = {}
    for t in reversed(range(6)) if way else range(6):
        gates = layer_norm(x[t] @ w["weight_ih"].T, (20,)) * w["norm_ih"] + w["bias_ih"]
        gates = gates + layer_norm(h @ w["weight_hh"].T, (20,)) * w["norm_hh"] + w["bias_hh"]
        i, f, g, o = gates.chunk(4, dim=-1)
        new = g.tanh() * kept[t] if training else g.tanh()
        next_c = f.sigmoid() * c + i.sigmoid() * new
        next_h = o.sigmoid() * (layer_norm(next_c, (5,)) * w["norm_c"] + w["norm_c_bias"]).tanh()
        if training:
            h, c = torch.where(stays[0][t], h, next_h), torch.where(stays[1][t], c, next_c)
        else:
            h, c = zone_h * h + (1 - zone_h) * next_h, zone_c * c + (1 - zone_c) * next_c
        outputs[t] = h
    expected, at = torch.stack([outputs[t] for t in range(6)]), 1 if way else 0
    carry = tuple(torch.stack((part, part)) for part in (h0, c0))
    y, end = layers(x, carry, key=key, lanes=lanes, start=start)
    torch.testing.assert_close(y[..., 5 * at : 5 * at + 5], expected, **CLOSE)
    torch.testing.assert_close(end.h[at], h, **CLOSE)
    torch.testing.assert_close(end.c[at], c, **CLOSE)
    wanted = [x, *w.values()]
    for mine, theirs in zip(
        *(torch.autograd.grad(each.square().sum(), wanted) for each in (y[..., 5 * at : 5 * at + 5], expected)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled(4)
@every_cell
@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_those_of_differences(kind: Any, training: bool) -> None:
    layers, key = stack(kind, 2, 3, **NOISY).train(training), random.key(3)
    names = [name for name, _ in layers.named_parameters()]
    carry = tuple(numbers(*part.shape, seed=9 + number).requires_grad_() for number, part in enumerate(layers.initial(2)[0]))

    def run(x: Tensor, *rest: Tensor) -> Any:
        parts, weights = rest[: len(carry)], dict(zip(names, rest[len(carry) :], strict=True))
        y, ends = torch.func.functional_call(layers, weights, (x, (parts,), [4, 2], key))
        return (y, *(ends if isinstance(ends, tuple) else (ends,)))

    assert torch.autograd.gradcheck(run, (numbers(4, 2, 2).requires_grad_(), *carry, *layers.parameters()))


def test_masks_have_their_shares_and_their_own_sites() -> None:
    noise, like = CellNoise(0.3, (0.1, 0.0), ("there", "back"), key=random.key(1)), torch.empty(50, 40, 30)
    drawn = [noise.candidate(way, like) for way in range(2)] + [noise.kept(way, 0, like) for way in range(2)]
    for number, each in enumerate(drawn):
        assert isinstance(each, Tensor)
        assert each.shape == like.shape
        # 60,000 draws: a standard deviation of 0.002 at most, of multipliers 0.003.
        assert abs(each.mean().item() - (1.0 if number < 2 else 0.1)) < 0.012
        torch.testing.assert_close(each.unique(), torch.tensor([0.0, 1.0 / 0.7 if number < 2 else 1.0]))
    assert not torch.equal(drawn[0] == 0, drawn[1] == 0)
    assert not torch.equal(drawn[2], drawn[3])
    assert noise.kept(0, 1, like) is None
    locked = replace(noise, locked=True).candidate(0, like)
    assert locked is not None
    assert torch.equal(locked[0], locked[49])
    resting = replace(noise, key=None)
    assert resting.candidate(0, like) is None
    assert resting.kept(0, 0, like) == 0.1
    assert resting.kept(0, 1, like) is None


def test_zoneout_in_evaluation_is_its_expectation() -> None:
    """For one step, which is linear in what is kept: the mean over many lanes that draw differently."""
    layers, x = stack(cw.RNN, 3, 4, zoneout=0.25), numbers(1, 1, 3)
    h = numbers(1, 1, 4, seed=2)
    drawn, _ = layers(x.expand(1, 40_000, 3), h.expand(1, 40_000, 4).contiguous(), key=random.key(1))
    mean, _ = layers.eval()(x, h)
    # The standard deviation of one draw is at most half the gap between old and new, about 1; of the mean, 0.005.
    torch.testing.assert_close(drawn.mean(1, keepdim=True), mean, rtol=0, atol=0.02)


def test_noise_draws_from_torch_without_a_key_and_rests_in_evaluation() -> None:
    layers, x = stack(cw.LSTM, 3, 4, recurrent_dropout=0.5), numbers(5, 2, 3)
    torch.manual_seed(1)
    first, _ = layers(x)
    second, _ = layers(x)
    torch.manual_seed(1)
    again, _ = layers(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    plain = stack(cw.LSTM, 3, 4)
    torch.testing.assert_close(layers.eval()(x)[0], plain(x)[0], **CLOSE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recurrent_dropout": 1.0}, "recurrent_dropout=1.0 must be at least 0 and below 1"),
        ({"zoneout": -0.1}, "zoneout=-0.1 for the cell lstm; use a chance of at least 0 and below 1, or one for each of h, c"),
        ({"zoneout": (0.1, 0.2, 0.3)}, "or one for each of h, c"),
    ],
)
def test_mistakes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        cw.LSTM(3, 4, **options)


def test_a_step_without_a_place_for_an_option_is_refused() -> None:
    def plain(gates: Tensor, carry: Any, weights: Any) -> tuple[Tensor, ...]:
        return (gates + weights.recurrent(carry.h)).tanh()[:, :4], carry.c

    def kind(**changes: Any) -> Any:
        return type("Own", (cw.Recurrent,), {"cell": replace(cw.LSTM.cell, name="own", kernels=False, **changes)})

    with pytest.raises(UserError, match=r"the step of the cell own drops nothing; let it pass .* through weights.candidate"):
        kind(step=plain)(3, 4, recurrent_dropout=0.1)
    with pytest.raises(UserError, match=r"the cell own has memory=True, but calls no weights.normed"):
        kind(step=plain)(3, 4, cell_norm=True)
    with pytest.raises(UserError, match=r"the cell own calls weights.normed, but has memory=False"):
        kind(memory=False)(3, 4, cell_norm=True)


def test_heads_see_only_their_own_outputs() -> None:
    """A layer with heads is one whose recurrent matrix has zeros outside its blocks."""
    layers, whole = (stack(cw.LSTM, 3, 6, bidirectional=True, num_heads=heads, cell_norm=True) for heads in (3, 1))
    assert layers.weight_hh_l0.shape == (24, 2)
    given = {name: each.clone() for name, each in layers.state_dict().items()}
    for way in ("", "_reverse"):
        blocks = given[f"weight_hh_l0{way}"].view(4, 3, 2, 2)
        given[f"weight_hh_l0{way}"] = torch.stack([torch.block_diag(*gate) for gate in blocks]).view(24, 6)
    whole.load_state_dict(given)
    x = numbers(5, 2, 3)
    torch.testing.assert_close(layers(x)[0], whole(x)[0], **CLOSE)


@pytest.mark.parametrize("kernel", ["auto", "aten", "manual", "reference"])
@pytest.mark.parametrize("options", [{"num_heads": 2}, {"cell_norm": True}, {"zoneout": 0.3}, {"recurrent_dropout": 0.3}], ids=str)
def test_kernels_that_do_not_know_an_option_leave_it_to_the_definition(kernel: str, options: dict[str, Any]) -> None:
    x, key = numbers(5, 2, 3), random.key(1)
    expected, _ = stack(cw.LSTM, 3, 4, 2, kernel="reference", **options)(x, key=key)
    found, _ = stack(cw.LSTM, 3, 4, 2, kernel=kernel, **options)(x, key=key)
    torch.testing.assert_close(found, expected, **CLOSE)
    plain, _ = stack(cw.LSTM, 3, 4, 2)(x) if "num_heads" not in options else (torch.zeros_like(x[..., :1]), None)
    assert not torch.allclose(found, plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "num_heads=3 must divide hidden_size=4"),
        ({"num_heads": 2, "proj_size": 2}, "proj_size=2 would mix what num_heads=2 keep apart"),
    ],
)
def test_heads_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        cw.LSTM(3, 4, **options)
