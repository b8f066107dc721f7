"""The head that forecasts distributions, against torch's own distributions in float64: likelihoods, gradients, masks, weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import NegativeBinomial, Normal, Poisson, StudentT

from carrywave.model.heads.distributions import DistributionForecast
from carrywave.spec.data_spec import COUNTS, PARAMETERS

KINDS = tuple(PARAMETERS)
CLOSE = 1e-10  # float64, some dozen operations


def reference(kind: str, parameters: Tensor, value: Tensor) -> Tensor:
    """The negative log-likelihood as torch has it."""
    first, *rest = parameters.unbind(-1)
    match kind:
        case "normal":
            found = Normal(first, rest[0])
        case "student_t":
            found = StudentT(rest[1], first, rest[0])
        case "poisson":
            found = Poisson(first)
        case _:
            size = 1.0 / rest[0]
            found = NegativeBinomial(size, logits=(first * rest[0]).log())
    return -found.log_prob(value)


def drawn(kind: str, seed: int, steps: int = 3, lanes: int = 2, past: int = 4) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the last layer gives, targets and past values."""
    make = torch.Generator().manual_seed(seed)
    y, target = (torch.randn(shape, generator=make, dtype=torch.float64) for shape in ((steps, lanes, 5), (steps, lanes, 2, 3)))
    values = torch.randn((steps, lanes, 3, past), generator=make, dtype=torch.float64)
    if kind in COUNTS:
        return y, target.mul(4).abs().floor(), torch.cat([values.abs(), torch.full_like(values, 2.5)], dim=2)
    return y, target, values


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**20), linear=st.booleans(), missing=st.floats(0.0, 1.0), weighted=st.booleans())
def test_loss_and_gradients_are_those_of_torchs_distributions(kind: str, seed: int, linear: bool, missing: float, weighted: bool) -> None:
    torch.manual_seed(seed)
    head = DistributionForecast(5, 2, 3, kind, linear=linear, scaled=linear, past_steps=4 if linear or kind in COUNTS else 0).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    y, target, past = drawn(kind, seed)
    past = past if head.past_steps else None
    gone = torch.rand(target.shape, generator=torch.Generator().manual_seed(seed)) < missing
    holes = torch.where(gone, math.nan, target)
    weights = torch.rand(3, 2, dtype=torch.float64) if weighted else None
    y.requires_grad_()
    total, count = head.loss(y, holes, past, weights=weights)
    found = torch.autograd.grad(total, [y, *head.parameters()], allow_unused=True)
    share = (torch.ones(3, 2) if weights is None else weights).double()[..., None, None] * ~gone
    wanted = (reference(kind, head(y, past), target) * share).sum()
    expected = torch.autograd.grad(wanted, [y, *head.parameters()], allow_unused=True)
    torch.testing.assert_close(total, wanted, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(count, share.sum(), rtol=CLOSE, atol=0)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_targets_leave_no_trace(kind: str) -> None:
    head = DistributionForecast(5, 2, 3, kind, past_steps=1 if kind in COUNTS else 0)
    y, target, past = drawn(kind, 1, past=1)
    y = y.float().requires_grad_()
    total, count = head.loss(y, torch.full_like(target, math.nan), past.float() if kind in COUNTS else None)
    [gradient] = torch.autograd.grad(total, y)
    assert (total.item(), count.item(), gradient.abs().sum().item()) == (0.0, 0.0, 0.0)
    assert total.dtype == torch.float32


def test_a_scaled_head_follows_the_last_values() -> None:
    """In units three times as large, counts are three times as many; location and scale likewise."""
    for kind in ("student_t", "negative_binomial"):
        head = DistributionForecast(5, 2, 3, kind, linear=True, scaled=True, past_steps=4).double()
        torch.nn.init.normal_(head.line.weight)
        y, _, past = drawn(kind, 3)
        once, thrice = head(y, past), head(y, 3.0 * past if kind == "student_t" else torch.cat([past[:, :, :3], 3 * past[:, :, 3:]], 2))
        scaled = 2 if kind == "student_t" else 1
        torch.testing.assert_close(thrice[..., :scaled], 3.0 * once[..., :scaled], rtol=CLOSE, atol=CLOSE)
        torch.testing.assert_close(thrice[..., scaled:], once[..., scaled:], rtol=CLOSE, atol=CLOSE)
