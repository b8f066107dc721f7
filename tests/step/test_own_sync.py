"""`train.sync` in a Trainer: when replicas agree, and what is refused. What it computes: tests/distributed/test_loop_parts.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from _small_models import batch_of, build

import carrywave as cw
from carrywave.errors import Diverged, SpecError, UserError

KEYS: dict[str, Any] = {"lr": 0.05, "sync": "local", "sync_every": 2}
BATCH = batch_of(4, [4, 3, 4])


def test_an_evaluation_needs_an_exchange() -> None:
    trainer = cw.Trainer(build(), KEYS | {"sync": "diloco"})
    trainer.evaluate([BATCH])  # before the first step all agree
    trainer.step(BATCH)
    for early in (lambda: trainer.evaluate([BATCH]), trainer.gathered):
        with pytest.raises(UserError, match=r"on their own since their last exchange; call trainer\.exchange\(\) on all workers first"):
            early()
    trainer.step(BATCH)  # the second one exchanges
    trainer.evaluate([BATCH])
    trainer.step(BATCH)
    trainer.exchange()
    trainer.gathered()


def test_one_replica_that_averages_agrees_with_itself_at_any_step() -> None:
    ours, theirs = cw.Trainer(build(), KEYS), cw.Trainer(build(), {"lr": 0.05})
    for _ in range(3):
        for trainer in (ours, theirs):
            trainer.step(BATCH)
        assert ours.evaluate([BATCH]) == pytest.approx(theirs.evaluate([BATCH]), rel=1e-12)  # float64: w + (v - w) rounds
        for name, tensor in theirs.gathered().items():
            torch.testing.assert_close(ours.gathered()[name], tensor, rtol=1e-12, atol=1e-14)


def test_one_replica_computes_what_a_step_computes() -> None:
    ours, theirs = cw.Trainer(build(), KEYS), cw.Trainer(build(), {"lr": 0.05})
    for _ in range(3):
        assert torch.equal(ours.step(BATCH), theirs.step(BATCH))
    ours.exchange()
    for name, tensor in theirs.gathered().items():
        torch.testing.assert_close(ours.gathered()[name], tensor, rtol=1e-12, atol=1e-14)  # float64: w + (v - w) rounds


def test_a_number_that_is_not_finite_stops_at_the_exchange() -> None:
    trainer = cw.Trainer(build(), KEYS)
    trainer.step(BATCH)
    with torch.no_grad():
        trainer.model.head.bias.fill_(torch.nan)
    with pytest.raises(Diverged, match=r"the weight head\.bias of head on rank 0 is no longer finite"):
        trainer.step(BATCH)


def test_what_is_refused() -> None:
    with pytest.raises(SpecError, match=r"train\.sync=async needs the training loop.*use local or diloco, or use cw\.fit"):
        cw.Trainer(build(), {"sync": "async"})
    trainer = cw.Trainer(build(), KEYS)
    with pytest.raises(UserError, match=r"exchanges weights after whole steps; use trainer\.step"):
        trainer.backward(BATCH)
    for of in (trainer.state_dict, lambda: trainer.load_state_dict({})):
        with pytest.raises(UserError, match="each replica has an optimizer state of its own, which a trainer's state does not hold"):
            of()
    trainer.model.head.requires_grad_(False)
    with pytest.raises(UserError, match=r"the trained parameters are fixed; set requires_grad before the Trainer"):
        trainer.step(BATCH)
