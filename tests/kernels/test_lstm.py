"""The contract over several layers: keyed dropout, norms, chunks of time, micro-batches of lanes, and dtypes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from carrywave.kernels import random
from carrywave.kernels.carry import Carries, Carry
from carrywave.kernels.layers import run_layers
from carrywave.kernels.weights import Layer, LayerWeights

SITES = [random.site("a"), random.site("b")]


def stack(inputs: int, widths: list[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Layer]:
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    sizes = [inputs, *widths]
    return [
        (LayerWeights(make(4 * hidden, before), make(4 * hidden, hidden), make(4 * hidden), make(4 * hidden)),)
        for before, hidden in itertools.pairwise(sizes)
    ]


def zeros(widths: list[int], lanes: int, dtype: torch.dtype = torch.float64) -> Carries:
    return tuple(Carry(torch.zeros(1, lanes, width, dtype=dtype), torch.zeros(1, lanes, width, dtype=dtype)) for width in widths)


@pytest.mark.parametrize("locked", [False, True])
def test_dropout_stands_between_layers_only(locked: bool) -> None:
    widths, key = [4, 5], random.key(1)
    layers, x = stack(3, widths), torch.randn(6, 2, 3, dtype=torch.float64)
    y, _ = run_layers(x, zeros(widths, 2), layers, dropout=0.5, locked=locked, key=key, sites=SITES[:1])
    first, _ = run_layers(x, zeros(widths[:1], 2), layers[:1])
    time, lane, unit = torch.arange(6)[:, None, None], torch.arange(2)[:, None], torch.arange(4)
    folded = random.fold(key, SITES[0])
    coords = (lane, unit) if locked else (time, lane, unit)
    expected, _ = run_layers(first * random.keep(folded, 0.5, *coords, dtype=torch.float64), zeros(widths[1:], 2), layers[1:])
    assert torch.equal(y, expected)
    # A site after the last layer: what a stage that is not the last one asks for.
    dropped, _ = run_layers(x, zeros(widths, 2), layers, dropout=0.5, locked=locked, key=key, sites=SITES)
    assert (dropped == 0).any()
    assert torch.equal(dropped[dropped != 0], (y * 2.0)[dropped != 0])


def test_norms_apply_to_outputs_and_not_to_carry_or_padding() -> None:
    widths, lengths = [4], torch.tensor([3, 1])
    layers, x = stack(3, widths), torch.randn(3, 2, 3, dtype=torch.float64)
    norm = nn.LayerNorm(4, dtype=torch.float64)
    nn.init.constant_(norm.bias, 7.0)
    plain, end = run_layers(x, zeros(widths, 2), layers, lengths)
    normed, same = run_layers(x, zeros(widths, 2), layers, lengths, norms=[norm])
    assert torch.equal(normed[:, 0], norm(plain)[:, 0])
    assert not normed[1:, 1].any()
    assert torch.equal(end[0].h, same[0].h)


@pytest.mark.parametrize("name", ["reference", "aten", "manual"])
def test_autocast_computes_short_and_keeps_the_carry_long(name: str) -> None:
    layers, x = stack(3, [8, 8], dtype=torch.float32), torch.randn(4, 2, 3)
    exact, end = run_layers(x, zeros([8, 8], 2, torch.float32), layers, torch.tensor([4, 2]), backend=name)
    with torch.autocast("cpu", torch.bfloat16):
        y, carries = run_layers(x, zeros([8, 8], 2, torch.float32), layers, torch.tensor([4, 2]), backend=name)
    assert y.dtype == torch.bfloat16
    assert {part.dtype for carry in carries for part in carry} == {torch.float32}
    # bf16 has 8 bits; eight products of size one and two layers lose two or three more.
    torch.testing.assert_close(y.float(), exact, rtol=0, atol=2**-4)
    torch.testing.assert_close(carries[1].h, end[1].h, rtol=0, atol=2**-4)
