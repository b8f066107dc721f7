"""Heads that read whole sequences and their lengths: divided by lanes and micro-batches as one device has them, refused by chunks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.data.batch import IGNORED
from carrywave.errors import PlanError
from carrywave.model.stage import Stage
from carrywave.model.state import Chunk
from carrywave.plan.plan import Plan, resolve
from carrywave.spec.plan_spec import PlanSpec
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.worker_setup import _check_plan

sys.path.insert(0, str(Path(__file__).parent))
from _chain import Chain

STEPS, LANES, WIDTH, CLASSES = 6, 5, 4, 3
LENGTHS = [6, 3, 0, 1, 5]
SGD = {"optimizer": "sgd", "lr": 0.5, "precision": "fp64"}


class Ctc(nn.Module):
    """Targets of a lane are a row of their own, shorter than its steps."""

    reads_whole = pooled = True

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, CLASSES + 1)

    def forward(self, y: Tensor, lengths: Tensor) -> Tensor:
        out: Tensor = self.out(y).log_softmax(-1)
        return out

    def loss(self, y: Tensor, target: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        wanted = torch.minimum((target != IGNORED).sum(-1), lengths)
        given = self(y, lengths), target.clamp(min=0) + 1, lengths, wanted
        each = nn.functional.ctc_loss(*given, reduction="none", zero_infinity=True)
        return torch.where(lengths > 0, each, 0.0).sum(), (lengths > 0).sum()


def model(head: Callable[[], nn.Module], *, bidirectional: bool = False) -> cw.Model:
    torch.manual_seed(0)
    lstm = cw.LSTM(3, WIDTH // 2 if bidirectional else WIDTH, 2, dropout=0.2, bidirectional=bidirectional)
    return cw.Model(nn.Linear(2, 3), lstm, head()).double()


def batch(head: Callable[[], nn.Module]) -> cw.Batch:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, LANES, 2, generator=draw, dtype=torch.float64)
    pooled = head is Ctc
    targets = torch.randint(CLASSES, (LANES, 2) if pooled else (STEPS, LANES), generator=draw)
    return cw.Batch.of(x, targets, torch.tensor(LENGTHS), pooled=pooled)


def chain() -> Chain:
    return Chain(WIDTH, CLASSES)


heads = pytest.mark.parametrize("make", [chain, Ctc])


@heads
def test_chunks_of_time_are_refused(make: Any) -> None:
    name = type(make()).__name__
    with pytest.raises(PlanError, match=f"the head {name} reads whole sequences, but .* chunks of 2 steps; remove plan.chunk_steps"):
        cw.Trainer(model(make), SGD, plan={"chunk_steps": 2})
    words = f"the head {name} reads whole sequences, but .* chunks of 4 steps; remove plan.chunk_steps"
    with pytest.raises(PlanError, match=f"{words}, and use plan.micro_batches=2 or more"):
        _check_plan(model(make), Plan(1, 2, (2,), 4), TrainSpec())
    with pytest.raises(PlanError, match=f"{words}$"):
        _check_plan(model(make), Plan(1, 2, (2,), 4, 2), TrainSpec())
    unasked = resolve(PlanSpec(stages=2), layers=2, workers=2, lanes=None, whole=True)
    _check_plan(model(make), unasked, TrainSpec())
    with pytest.raises(PlanError, match=r"the head of this model scores whole sequences; remove plan.share_head"):
        _check_plan(model(make), Plan(1, 2, (2,), None, 2, share_head=True), TrainSpec())
    _check_plan(model(make), Plan(1, 2, (2,), None, 2), TrainSpec())
    whole = model(make)
    stage = Stage(whole)
    with pytest.raises(PlanError, match="the head needs whole sequences, got a chunk from step 2"):
        stage(torch.zeros(2, LANES, 2), stage.start(LANES), Chunk(start=2))


def test_outputs_are_given_with_lengths_or_without() -> None:
    whole = model(chain).eval()
    y, state = whole(batch(chain).inputs, lengths=LENGTHS)
    assert torch.equal(whole.output(y, state, LENGTHS), whole.output(y, state))
