"""The one source of randomness: fixed bits, good statistics, and no dependence on how coordinates are cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from carrywave.errors import UserError
from carrywave.kernels import random

WORD = 1 << 32


def grid(steps: int, lanes: int, units: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.arange(steps)[:, None, None], torch.arange(lanes)[:, None], torch.arange(units)


def plain_mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x85EBCA6B % WORD
    x ^= x >> 13
    x = x * 0xC2B2AE35 % WORD
    return x ^ x >> 16


def plain_absorb(a: int, b: int, w: int) -> tuple[int, int]:
    a = plain_mix(((a ^ w) * 0x9E3779B1 + b) % WORD)
    return a, plain_mix(a ^ b ^ 0x7F4A7C15)


def plain_bits(a: int, b: int, *coords: int) -> int:
    """The documented function, in Python's integers."""
    for w in coords[:-1]:
        a, b = plain_absorb(a, b, w % WORD)
    last = plain_mix((coords[-1] + 0x9E3779B9) % WORD)
    return plain_mix((plain_mix(a ^ last) * (last | 1) + b) % WORD)


@given(st.integers(0, 2**64), st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_bits_are_the_documented_function(seed: int, coords: list[int]) -> None:
    key = random.key(seed)
    a, b = (int(word) % WORD for word in key)
    drawn = random.bits(key, *(torch.tensor(coord) for coord in coords))
    assert int(drawn) % WORD == plain_bits(a, b, *coords)


def test_masks_can_be_traced_and_transformed() -> None:
    """Where operations are looked at, they are torch's, and the numbers are the same."""
    key, coords = random.key(3), (torch.arange(4)[:, None], torch.arange(6))
    expected = random.keep(random.fold(key, 5), 0.5, *coords)

    def masked(x: Tensor) -> Tensor:
        return (x * random.keep(random.fold(key, 5), 0.5, torch.arange(4)[:, None], torch.arange(6))).sum()

    assert torch.equal(torch.func.grad(masked)(torch.ones(4, 6)), expected)
    with FakeTensorMode() as mode:
        fake = random.keep(random.fold(mode.from_tensor(key), 5), 0.5, torch.arange(4)[:, None], torch.arange(6))
    assert fake.shape == expected.shape


def test_golden_values() -> None:
    """If one of these changes, every trained run changes: never edit them."""
    assert [int(word) % WORD for word in random.key(1)] == GOLDEN_KEY
    assert [int(word) % WORD for word in random.key(2**63 - 1, 3, 4)] == GOLDEN_LONG_KEY
    assert random.site("lstm.l0.dropout") == GOLDEN_SITE
    assert [int(word) % WORD for word in random.fold(random.key(1), GOLDEN_SITE)] == GOLDEN_FOLD
    drawn = random.bits(random.key(1), torch.arange(2)[:, None], torch.arange(3)).flatten()
    assert [int(word) % WORD for word in drawn] == GOLDEN_BITS


GOLDEN_KEY = [0x0342FCF6, 0x7637BA9F]
GOLDEN_LONG_KEY = [0x0F8CCFAE, 0x7B5FFF4F]
GOLDEN_SITE = 0x58BFC2A4
GOLDEN_FOLD = [0x264D5765, 0x48767C06]
GOLDEN_BITS = [0x3A88055E, 0x1F9F969C, 0x7C8EF293, 0xE6AC929F, 0x75570CE8, 0x6B82F4A1]


def test_keys_differ_by_every_number() -> None:
    keys = [random.key(*path) for path in [(1,), (2,), (1, 0), (1, 1), (1, 0, 0), (11,), (1 + 2**32,), (1 + 2**64,)]]
    assert len({tuple(key.tolist()) for key in keys}) == len(keys)
    assert all(key.dtype == torch.int32 and key.shape == (2,) for key in keys)


@given(st.integers(0, 2**63), st.integers(0, 5), st.integers(1, 5), st.integers(0, 6), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_slices_of_coordinates_give_slices_of_bits(seed: int, t0: int, t: int, b0: int, b: int) -> None:
    key = random.key(seed)
    time, lane, unit = grid(10, 12, 17)
    whole = random.bits(key, time, lane, unit)
    part = random.bits(key, time[t0 : t0 + t], lane[b0 : b0 + b], unit[3:])
    assert torch.equal(part, whole[t0 : t0 + t, b0 : b0 + b, 3:])
    # Any order of lanes, too.
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed % 1000))
    assert torch.equal(random.bits(key, time, order[:, None], unit), whole[:, order])


def test_every_row_and_every_bit_looks_random() -> None:
    drawn = random.bits(random.key(7), *grid(40, 50, 400))
    count = drawn.numel()
    for bit in range(32):
        ones = ((drawn >> bit) & 1).double().mean().item()
        assert abs(ones - 0.5) < 5 * 0.5 / math.sqrt(count), f"bit {bit}"
    for shift in (0, 8, 16, 24):
        observed = torch.bincount(((drawn >> shift) & 0xFF).flatten().long(), minlength=256).double()
        chi_square = ((observed - count / 256) ** 2 / (count / 256)).sum().item()
        # 255 degrees of freedom: deviation sqrt(510); five of them.
        assert abs(chi_square - 255) < 5 * math.sqrt(510), f"byte at {shift}"
    rows = drawn.reshape(-1, 400)
    assert len({tuple(row) for row in rows[:, :8].tolist()}) == len(rows)


def test_uniform_is_exact_in_every_wide_dtype() -> None:
    single = random.uniform(random.key(9), torch.arange(10_000))
    double = random.uniform(random.key(9), torch.arange(10_000), dtype=torch.float64)
    assert torch.equal(single.double(), double)
    assert single.min() >= 0.0
    assert single.max() < 1.0


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_keep_is_uniform_compared_with_p(p: float) -> None:
    coords = grid(10, 20, 100)
    mask = random.keep(random.key(2), p, *coords, dtype=torch.float64)
    expected = torch.where(random.uniform(random.key(2), *coords) >= p, 1 / (1 - p), 0.0).double()
    torch.testing.assert_close(mask, expected, rtol=1e-7, atol=0)  # 1/(1-p) passed through float32 in `expected`
    assert abs(mask.mean().item() - 1) < 5 * math.sqrt(p / (1 - p) / mask.numel()) + 1e-12


def test_scopes_nest_and_end() -> None:
    assert random.current_scope() is None
    with random.Scope(random.key(1), torch.arange(3), 5):
        with random.Scope(None, None, 7, pooled=True) as inner:
            assert random.current_scope() is inner
            assert inner.start == 7
        outer = random.current_scope()
        assert outer is not None
        assert outer.start == 5
    assert random.current_scope() is None


class Drawing(torch.autograd.Function):
    """Draws in its backward, as a checkpointed module with dropout does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        random.draw()
        return grad


def test_nothing_is_drawn_in_the_backward_of_a_trainer_and_elsewhere_it_is() -> None:
    x = torch.ones(1, requires_grad=True)
    with random.without_draws():
        random.draw()  # by another thread, which is not in that backward
        with random.without_draws():
            pass
        with pytest.raises(UserError, match="computed again in backward"):  # still refused
            Drawing.apply(x).backward()
    Drawing.apply(x).backward()
