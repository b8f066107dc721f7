"""The head that transcribes, against a plain recursion over alignments with autograd, and against torch's own loss."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import ctc_loss, linear

from carrywave.data.batch import IGNORED
from carrywave.model.heads.alignments import negative_log_likelihood, steps_needed
from carrywave.model.heads.ctc import Ctc

WIDTH, LABELS = 4, 3


def plain(logs_TV: Tensor, labels: list[int], blank: int) -> Tensor:
    """The recursion as it is written: one sequence, one place after the other."""
    places = [blank, *(each for label in labels for each in (label, blank))]
    never = torch.tensor(-math.inf, dtype=logs_TV.dtype)
    reached = [logs_TV[0, places[at]] if at < 2 else never for at in range(len(places))]
    for logs_V in logs_TV[1:]:
        new = []
        for at, place in enumerate(places):
            jump = at > 1 and place not in (blank, places[at - 2])
            before = torch.stack([reached[at], reached[at - 1] if at else never, reached[at - 2] if jump else never])
            finite = before[before > -math.inf]
            new.append(finite.logsumexp(0) + logs_V[place] if len(finite) else never)
        reached = new
    return -torch.stack(reached[-2:]).logsumexp(0)


lanes = st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, LABELS - 1), max_size=4)), min_size=1, max_size=4)


@settings(max_examples=30, deadline=None)
@given(lanes=lanes, upsample=st.integers(1, 3), seed=st.integers(0, 2**16), missing=st.booleans(), data=st.data())
def test_loss_and_gradients_are_those_of_a_plain_recursion(
    lanes: list[tuple[int, list[int]]], upsample: int, seed: int, missing: bool, data: st.DataObject
) -> None:
    torch.manual_seed(seed)
    steps, width = max(1, *(length for length, _ in lanes)), max(1, *(len(labels) for _, labels in lanes))
    head = Ctc(WIDTH, LABELS, upsample=upsample).double()
    with torch.no_grad():
        head.bias.normal_()
    y = torch.randn(steps, len(lanes), WIDTH, dtype=torch.float64, requires_grad=True)
    target, weights = torch.full((len(lanes), width), -1), torch.rand(len(lanes), dtype=torch.float64) if missing else None
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for lane, (length, labels) in enumerate(lanes):
        repeats = sum(one == other for one, other in pairwise(labels))
        fits = length and len(labels) + repeats <= length * upsample and not (missing and data.draw(st.booleans()))
        if not fits:
            target[lane] = IGNORED
            continue
        target[lane, : len(labels)] = torch.tensor(labels, dtype=torch.int64)
        logits = linear(y[:length, lane], head.weight, head.bias).view(length * upsample, LABELS + 1)
        weight = 1.0 if weights is None else float(weights[lane])
        total = total + weight * plain(logits.log_softmax(-1), labels, LABELS)
        count += weight * max(1, len(labels))
    lengths = torch.tensor([length for length, _ in lanes])
    found, counted = head.loss(y, target, lengths, weights=weights)
    assert float(counted) == pytest.approx(count, rel=1e-12)
    torch.testing.assert_close(found, total, rtol=1e-12, atol=1e-12)
    if total.requires_grad:
        inputs = [y, head.weight, head.bias]
        for own, wanted in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(total, inputs), strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-10, atol=1e-12)


def test_the_loss_is_torchs_and_infinite_where_labels_do_not_fit() -> None:
    torch.manual_seed(1)
    logs = torch.randn(9, 6, LABELS + 1, dtype=torch.float64).log_softmax(-1).requires_grad_()
    labels = torch.randint(LABELS, (6, 7))
    count = torch.tensor([7, 5, 3, 1, 0, 7])
    labels[5] = 2  # seven times the same needs 13 steps
    labels = torch.where(torch.arange(7) < count[:, None], labels, -1)
    wanted = ctc_loss(logs, labels.clamp(min=0), torch.full((6,), 9), count, blank=LABELS, reduction="none")
    found = negative_log_likelihood(logs, labels, LABELS)
    assert bool(wanted.isinf()[5])
    assert torch.equal(found.isinf(), wanted.isinf())
    assert torch.equal(steps_needed(labels) <= 9, found.isfinite())
    torch.testing.assert_close(found[:5], wanted[:5], rtol=1e-12, atol=0.0)
    [own] = torch.autograd.grad(found.sum(), [logs])
    assert own[:, 5].isnan().all()  # never a gradient of zero that nobody notices


def test_under_autocast_the_recursion_stays_in_float32() -> None:
    torch.manual_seed(3)
    head, y = Ctc(WIDTH, LABELS), torch.randn(6, 2, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = head(y, torch.tensor([6, 4]))
        total, _ = head.score(out, torch.tensor([[0, 1], [2, -1]]))
    assert out.dtype == total.dtype == torch.float32
    [gradient] = torch.autograd.grad(total, [out])
    torch.testing.assert_close(gradient[:4].sum(-1), -torch.ones(4, 2), rtol=1e-5, atol=0.0)  # each step has one class, in float32
