"""Windows that arrive chunk by chunk, through the executor: kernels that keep them on the device give what unchunked layers give.

The launches of the persistent kernels are replaced by what they define, in float64 (tests/kernels/_in_float64.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from _in_float64 import replace_launches

sys.path.insert(0, str(Path(__file__).parent))
import _small_models as small_models
from _small_models import KEY, batch_of

from carrywave.data.batch import Batch
from carrywave.kernels import dispatch
from carrywave.kernels.hopper import persistent, windowed
from carrywave.kernels.hopper.layout import H200, LayerShape, Wave
from carrywave.model.model import Model
from carrywave.model.stage import Stage
from carrywave.plan.plan import Plan
from carrywave.step.passes.executor import Pass
from carrywave.step.passes.jobs import BatchOutcome, PassJob, program_for

# Sums of some hundred terms, in another order, in float64.
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    replace_launches(monkeypatch)
    monkeypatch.setattr(persistent, "refusal", lambda *given: "")
    monkeypatch.setattr(persistent, "_chip", lambda x: H200)
    monkeypatch.setattr(persistent, "wave_of", lambda x, layers, cell, plain: None)
    yield
    dispatch._failures.clear()
    dispatch._warned.clear()


def waves(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """From here on, layers run in one call, in pieces of this many steps."""
    monkeypatch.setattr(persistent, "wave_of", lambda x, layers, cell, plain: Wave(LayerShape(64, 1, 8, 1), 1, min(piece, len(x))))


def build(**options: Any) -> Model:
    return small_models.build(kernel="persistent", **options)


def outcome_of(model: Model, batches: list[Batch], plan: Plan, **asked: Any) -> tuple[list[BatchOutcome], dict[str, Tensor]]:
    model.zero_grad()
    program = program_for(plan, batches, backward=True)
    jobs = [PassJob(each, None if number else model.start(len(each.lengths)), KEY, **asked) for number, each in enumerate(batches)]
    outcomes = Pass(Stage(model), plan, program, jobs).run()
    return outcomes, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: Model, batches: list[Batch], plan: Plan, **asked: Any) -> None:
    """The plan gives the losses, carries and gradients of whole windows."""
    expected, wanted = outcome_of(model, batches, Plan.serial(), **asked)
    outcomes, gradients = outcome_of(model, batches, plan, **asked)
    for own, other in zip(outcomes, expected, strict=True):
        torch.testing.assert_close(own.loss_sum, other.loss_sum, **TOLERANCE)
        torch.testing.assert_close(own.sums[2], other.sums[2], **TOLERANCE)
        for carry, of_other in zip(own.state.carries, other.state.carries, strict=True):
            torch.testing.assert_close(tuple(carry), tuple(of_other), **TOLERANCE)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], msg=lambda text, name=name: f"{name}: {text}", **TOLERANCE)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[windowed.StackWindow]:
    """Every window that a kernel has held."""
    made: list[windowed.StackWindow] = []
    begin = windowed.StackWindow.__init__

    def noted(self: windowed.StackWindow, *args: Any) -> None:
        begin(self, *args)
        made.append(self)

    monkeypatch.setattr(windowed.StackWindow, "__init__", noted)
    return made


@settings(max_examples=25)
@given(
    chunk_steps=st.integers(1, 6),
    micro_batches=st.integers(1, 3),
    pooled=st.booleans(),
    piece=st.none() | st.integers(1, 4),
    lengths=st.lists(st.integers(0, 7), min_size=3, max_size=5),
    full=st.booleans(),
)
def test_chunks_are_the_window(
    chunk_steps: int, micro_batches: int, pooled: bool, piece: int | None, lengths: list[int], full: bool
) -> None:
    lengths = [7] * len(lengths) if full else [7, *lengths[1:]]
    with pytest.MonkeyPatch.context() as patch:
        if piece is not None:
            waves(patch, piece)
        assert_same(build(pooled=pooled), [batch_of(7, lengths, pooled=pooled)], Plan(chunk_steps=chunk_steps, micro_batches=micro_batches))
