"""Linear layers of padded matrices: the same numbers, and no rows copied that are aligned already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from carrywave.kernels.cuda import aligned


@pytest.mark.parametrize("biased", [False, True])
def test_it_is_torchs(biased: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 2, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    bias = torch.randn(11, requires_grad=True) if biased else None
    leaves = [x, weight, *([] if bias is None else [bias])]
    apply: Any = aligned._AlignedLinear.apply
    y = apply(x, weight, bias, torch.float32)
    expected = functional.linear(x, weight, bias)
    assert y.shape == expected.shape
    assert y.stride(-2) == 16
    by = torch.randn_like(expected)
    for own, theirs in zip(*((each, *torch.autograd.grad((each * by).sum(), leaves)) for each in (y, expected)), strict=True):
        assert own.dtype == theirs.dtype
        torch.testing.assert_close(own, theirs)


@pytest.mark.parametrize("rows", [1, 6])
def test_what_lies_between_the_rows_of_a_gradient_does_not_matter(rows: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True), torch.randn(11, requires_grad=True)
    by = torch.full((rows, 16), torch.nan)
    by[:, :11].normal_()
    before = by.clone()
    apply: Any = aligned._AlignedLinear.apply
    leaves = (x, weight, bias)
    found = torch.autograd.grad(apply(*leaves, torch.float32), leaves, by[:, :11])
    for one, expected in zip(found, torch.autograd.grad(functional.linear(*leaves), leaves, by[:, :11]), strict=True):
        torch.testing.assert_close(one, expected)
    torch.testing.assert_close(by, before, equal_nan=True, rtol=0, atol=0)


def test_only_where_it_makes_a_difference() -> None:
    x, odd, even = torch.randn(2, 5), torch.randn(11, 5), torch.randn(16, 8)
    assert not aligned.serves(x, odd)  # on the CPU
    assert not aligned.serves(x.to("meta"), even)
