"""The checksums of weights that replicas compare."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from carrywave.step.checks.agreement import sum_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def tensor(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 40).abs().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@hypothesis.given(size=st.integers(1, 40), offset=st.integers(0, 3), seed=st.integers(0, 5))
def test_it_depends_on_the_elements_and_not_on_where_they_lie(dtype: torch.dtype, size: int, offset: int, seed: int) -> None:
    plain = tensor(size, dtype, seed)
    inside = torch.cat([plain[:1].expand(offset), plain])[offset:]
    apart = torch.stack([plain, plain], dim=1)[:, 0]
    found = sum_of(plain)
    assert found.dtype == torch.float64
    assert 0 <= found < 2**40
    assert sum_of(inside) == sum_of(apart) == sum_of(plain.flip(0).contiguous().flip(0)) == found


@pytest.mark.parametrize("dtype", DTYPES[:4])
@hypothesis.given(size=st.integers(1, 40), at=st.integers(0, 39), bit=st.integers(0, 7), byte=st.integers(0, 7))
def test_one_bit_changes_it(dtype: torch.dtype, size: int, at: int, bit: int, byte: int) -> None:
    plain = tensor(size, dtype)
    other = plain.clone()
    wide = other.element_size()
    other.view(torch.uint8)[at % size * wide + byte % wide] ^= 1 << bit
    assert sum_of(other) != sum_of(plain)
