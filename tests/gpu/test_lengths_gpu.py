"""What lengths ask for around the recurrence: the kernels of `lengths.cu` against the plain operations, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from carrywave.kernels.carry import Carry
from carrywave.kernels.hopper import recurrence
from carrywave.kernels.lengths import last_real, real_steps
from carrywave.kernels.lstm import aten
from carrywave.kernels.torch_kernels import CUDNN_STEPS
from carrywave.kernels.weights import LayerWeights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DTYPES = st.sampled_from([torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 10_000)


@given(lanes=st.integers(1, 1100), steps=st.integers(1, 70), chunk_steps=st.integers(1, 80), seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_lanes_from_the_longest_to_the_shortest(lanes: int, steps: int, chunk_steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    lengths = torch.randint(0, steps + 1, (lanes,), device="cuda")
    dealt = recurrence.deal(lengths, steps, chunk_steps, torch.empty(0, dtype=torch.bfloat16, device="cuda"))
    order = torch.argsort(lengths, descending=True, stable=True).to(torch.int32)
    assert len(dealt) == -(-steps // chunk_steps)
    for first, each in zip(range(0, steps, chunk_steps), dealt, strict=True):
        assert each.order_B is not None
        assert each.lengths_B is not None
        assert torch.equal(each.order_B, order)
        assert torch.equal(each.lengths_B, (lengths - first).clamp(0, min(chunk_steps, steps - first)).to(torch.int32))


@given(lanes=st.integers(1, 40), steps=st.integers(1, 30), inputs=st.integers(1, 140), dtype=DTYPES, narrow=st.booleans(), seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_padding_is_zero_whatever_it_held(lanes: int, steps: int, inputs: int, dtype: torch.dtype, narrow: bool, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(steps, lanes, inputs + 3, device="cuda").to(dtype)
    x = x[..., 1 : inputs + 1] if narrow else x[..., :inputs].contiguous()  # a part of another tensor, or one of its own
    lengths = torch.randint(0, steps + 1, (lanes,), device="cuda")
    real = real_steps(lengths, steps)
    x = torch.where(real, x, torch.nan)
    rows = recurrence.real_rows(x, lengths)
    assert rows.shape == (steps * lanes, -(-inputs // 8) * 8)
    assert torch.equal(rows[:, :inputs], torch.where(real, x, 0.0).reshape(-1, inputs))
    assert not rows[:, inputs:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(lanes=st.integers(1, 40), steps=st.integers(1, 30), hidden=st.integers(1, 300), seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_the_last_real_state(lanes: int, steps: int, hidden: int, seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    hs = torch.randn(steps + 1, lanes, -(-hidden // 64) * 64, device="cuda").bfloat16()
    lengths = torch.randint(0, steps + 1, (lanes,), device="cuda")
    found = recurrence.last_state(hs, lengths, hidden, dtype)
    assert torch.equal(found, last_real(hs[1:, :, :hidden], lengths, hs[0, :, :hidden]).to(dtype))


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_sequences_longer_than_cudnn_takes(directions: int, padded: bool) -> None:
    steps = CUDNN_STEPS + 5
    torch.manual_seed(1)
    layer = tuple(LayerWeights(*(torch.randn(*shape).cuda() / 3 for shape in ((16, 3), (16, 4), (16,), (16,)))) for _ in range(directions))
    x, carry = torch.randn(steps, 2, 3, device="cuda"), Carry(*(torch.randn(directions, 2, 4, device="cuda") for _ in range(2)))
    lengths = torch.tensor([steps, steps - 3], device="cuda") if padded else None
    y, _ = aten.layer(x, carry, layer, lengths)
    # An LSTM forgets: the last steps, and the first ones of the other direction, are those of a short sequence from any carry.
    tail, _ = aten.layer(x[-500:], carry, layer, None if lengths is None else lengths - (steps - 500))
    torch.testing.assert_close(y[-100:, :, :4], tail[-100:, :, :4], rtol=1e-3, atol=1e-3)  # cuDNN may use TF32, with 10 bits
    if directions == 2:
        torch.testing.assert_close(y[-100:, :, 4:], tail[-100:, :, 4:], rtol=1e-3, atol=1e-3)
