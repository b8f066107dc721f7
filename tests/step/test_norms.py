"""Gradients between backward and update, against plain arithmetic and torch's own clipping."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from carrywave.step import norms


def made(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def squared(grads: list[Tensor]) -> Tensor:
    return norms.norms(grads).square().sum()


def norm_of(grads: list[Tensor]) -> Tensor:
    return squared(grads).sqrt()


def apply(grads: list[Tensor], count: Tensor, limit: float | None = None) -> Tensor:
    norm = norms.norm_of_mean(squared(grads).to(count.device), count)
    norms.scale_(grads, norms.factor(norm, count, limit))
    return norm


@pytest.mark.parametrize("count", [torch.tensor(4), torch.tensor(4.0), torch.tensor(4.0, dtype=torch.float64)])
def test_divides_by_a_count_of_any_kind(count: Tensor) -> None:
    grads = made((2, 3), (4,), ())
    wanted, before = [grad / 4.0 for grad in grads], norm_of(grads)
    norm = apply(grads, count)
    assert_close(grads, wanted, rtol=0, atol=0)  # a power of two: exact
    assert_close(norm, before / 4.0, rtol=1e-15, atol=0)


def test_no_target_gives_no_gradient() -> None:
    grads = made((2, 3), (4,), dtype=torch.float32)
    assert float(apply(grads, torch.tensor(0), 1.0)) == 0.0
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def test_a_gradient_that_is_no_number_still_shows_without_targets() -> None:
    grads = [torch.tensor([1.0, math.nan])]
    norm = apply(grads, torch.tensor(0.0))
    assert grads[0].isnan().tolist() == [False, True]
    assert bool(norm.isnan())


def test_norm_is_that_of_one_long_vector() -> None:
    grads = made((2, 3), (4,), (), (0,))
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    assert_close(norm_of(grads), flat.square().sum().sqrt(), rtol=1e-14, atol=0)


def test_squares_of_stages_add_up() -> None:
    grads = made((2, 3), (4,), (5, 2))
    parts = squared(grads[:1]) + squared(grads[1:])
    assert_close(parts.sqrt(), norm_of(grads), rtol=1e-14, atol=0)


def test_norm_of_halves_is_taken_in_float32() -> None:
    grads = [torch.full((1000,), 100.0, dtype=torch.float16)]  # its square overflows float16
    assert_close(norm_of(grads).item(), 100.0 * math.sqrt(1000.0), rtol=1e-6, atol=0)  # float32 has 24 bits


def test_sum_of_squares_outlives_float32() -> None:
    norm = norm_of([torch.tensor([1e19]), torch.tensor([1e19])])  # each norm fits float32, their squares do not
    assert_close(norm.item(), math.sqrt(2.0) * 1e19, rtol=1e-6, atol=0)
    assert norm.dtype == torch.float64


@pytest.mark.parametrize("limit", [0.25, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clips_as_torch_does(limit: float, dtype: torch.dtype) -> None:
    ours, theirs = made((20, 3), (4,), dtype=dtype), [torch.nn.Parameter(torch.zeros_like(g)) for g in made((20, 3), (4,), dtype=dtype)]
    for parameter, grad in zip(theirs, ours, strict=True):
        parameter.grad = grad / 3.0
    norm = apply(ours, torch.tensor(3.0, dtype=torch.float64), limit)
    reference = torch.nn.utils.clip_grad_norm_(theirs, limit)
    assert_close(norm.to(dtype), reference, rtol=4 * torch.finfo(dtype).eps, atol=0)  # summed in another order
    assert_close(ours, [parameter.grad for parameter in theirs], rtol=8 * torch.finfo(dtype).eps, atol=0)


def test_small_gradients_are_left_bit_for_bit() -> None:
    grads = made((5,), dtype=torch.float32)
    before = [grad.clone() for grad in grads]
    apply(grads, torch.tensor(1), 1e3)
    assert torch.equal(grads[0], before[0])


def test_mixed_dtypes_and_nothing_at_all() -> None:
    grads = [torch.ones(2, dtype=torch.float32), torch.ones(3, dtype=torch.float64)]
    norm = apply(grads, torch.tensor(2), 0.5)
    assert norm.item() == pytest.approx(math.sqrt(5 * 0.25), rel=1e-7)
    assert norm_of(grads).item() == pytest.approx(0.5, rel=1e-5)  # the 1e-6 beside the norm
    norms.scale_([], torch.tensor(1.0))
    assert norm_of([]).item() == 0.0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_waits_for_the_device() -> None:
    grads = [grad.cuda() for grad in made((20, 3), (4,), dtype=torch.float32)]
    count, wanted = torch.tensor(3.0, dtype=torch.float64, device="cuda"), made((20, 3), (4,))
    torch.cuda.set_sync_debug_mode("error")
    try:
        apply(grads, count, 0.25)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    apply(wanted, count.cpu(), 0.25)
    assert_close([grad.cpu().double() for grad in grads], wanted, rtol=1e-6, atol=0)  # float32 has 24 bits
