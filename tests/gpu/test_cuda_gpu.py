"""On CUDA: equal random bits, cuDNN against the reference without its warnings, lengths to the bit in every precision, capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from carrywave.kernels import random
from carrywave.kernels.carry import Carry
from carrywave.kernels.lstm import aten
from carrywave.kernels.weights import LayerWeights
from carrywave.model.lstm import GRU, LSTM
from carrywave.model.recurrent import Recurrent

pytestmark = pytest.mark.gpu


def test_random_bits_are_those_of_the_cpu() -> None:
    key = random.key(1, 2)
    coords = torch.arange(5)[:, None, None], torch.arange(7)[:, None], torch.arange(300)
    there = key.cuda(), *(coord.cuda() for coord in coords)
    assert torch.equal(random.bits(*there).cpu(), random.bits(key, *coords))
    assert torch.equal(random.fold(there[0], random.site("x")).cpu(), random.fold(key, random.site("x")))
    assert torch.equal(random.uniform(*there).cpu(), random.uniform(key, *coords))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        mask = random.keep(there[0], 0.3, *there[1:], dtype=dtype)
        assert torch.equal(mask.cpu(), random.keep(key, 0.3, *coords, dtype=dtype))


def solve(layers: Recurrent, x: Tensor, carry: Any, lengths: Tensor | None, key: Tensor) -> list[Tensor]:
    leaves = [x.requires_grad_(), *(part.requires_grad_() for part in carry)]
    y, end = layers(x, carry if len(carry) > 1 else carry[0], lengths, key)
    end = (end,) if isinstance(end, Tensor) else end
    total = y.sin().sum() + end[0].cos().sum() + end[-1].square().sum()
    found = [y, *end, *torch.autograd.grad(total, [*leaves, *layers.parameters()])]
    return [tensor.detach().cpu() for tensor in found]


@pytest.mark.parametrize("lengths", [None, (9, 4, 1, 0)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "projection"), [(LSTM, 0), (LSTM, 8), (GRU, 0)], ids=["lstm", "lstm projected", "gru"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_cudnn_is_the_reference(
    bidirectional: bool, kind: type[Recurrent], projection: int, bias: bool, lengths: tuple[int, ...] | None
) -> None:
    """Warnings are errors: cuDNN would warn if the weights were not one chunk in its own order."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"bias": bias, "bidirectional": bidirectional, "proj_size": projection, "dropout": 0.4, "weight_drop": 0.3}
    layers = kind(7, 16, 2, **options, dtype=torch.float64, kernel="reference")
    rows = 4 if bidirectional else 2
    carry = kind.cell.carry(*(torch.randn(rows, 4, width, dtype=torch.float64) for width in kind.cell.widths(16, projection)))
    x, key = torch.randn(9, 4, 7, dtype=torch.float64), random.key(3)
    real = None if lengths is None else torch.tensor(lengths)
    expected = solve(layers, x, carry, real, key)
    layers.kernel = "aten"
    there = [part.detach().cuda() for part in carry]
    got = solve(layers.cuda(), x.detach().cuda(), there, None if real is None else real.cuda(), key.cuda())
    # float64; cuDNN sums in another order, over 9 steps of 2 layers.
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_carry_passes_padded_steps_to_the_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).cuda()

    layer = (LayerWeights(make(256, 24), make(256, 64), make(256), make(256)),)
    carry, x, lengths = Carry(make(1, 8, 64), make(1, 8, 64)), make(9, 8, 24), torch.tensor([9, 4, 1, 0, 9, 9, 2, 3]).cuda()
    _, end = aten.layer(x, carry, layer, lengths)
    longer = torch.cat((x, torch.full((10, 8, 24), torch.nan, dtype=dtype, device="cuda")))
    y, later = aten.layer(longer, carry, layer, lengths)
    assert torch.equal(end.c, later.c)
    assert torch.equal(end.h, later.h)
    assert torch.equal(later.c[:, 3], carry.c[:, 3])
    assert not y[9:].any()


def test_autocast_gives_the_types_that_torch_gives() -> None:
    lstm = LSTM(16, 32, 2).cuda()
    assert LSTM.backends.choose("auto", torch.zeros(1, 1, 16, device="cuda"), lstm.weights(0)) == "aten"
    x, lengths = torch.randn(8, 4, 16, device="cuda"), torch.tensor([8, 3, 0, 5], device="cuda")
    exact, _ = lstm(x, None, lengths)
    with torch.autocast("cuda", torch.bfloat16):
        y, carry = lstm(x, None, lengths)
    assert y.dtype == carry[0].dtype == carry[1].dtype == torch.bfloat16  # and sums in float32 within
    # bf16 has 8 bits, and outputs are below 1.
    torch.testing.assert_close(y.float(), exact, rtol=0, atol=2**-6)
    y.float().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in lstm.parameters())


def test_a_captured_graph_replays_with_another_key() -> None:
    lstm = LSTM(16, 32, 2, dropout=0.5, weight_drop=0.5).cuda()
    x, lengths = torch.randn(8, 4, 16, device="cuda"), torch.tensor([8, 3, 0, 5], device="cuda")
    key = random.key(1).cuda()
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            expected = [lstm(x, None, lengths, random.key(seed).cuda())[0].clone() for seed in (1, 2)]
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = lstm(x, None, lengths, key)
        for seed, want in zip((1, 2), expected, strict=True):
            key.copy_(random.key(seed))
            graph.replay()
            torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)  # float32, the same kernels
    assert not torch.equal(*expected)
