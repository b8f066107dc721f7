"""Any nn.Module as a model of one piece: trained as by hand, judged and used like the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import carrywave as cw
from carrywave.errors import PlanError, UserError
from carrywave.model.heads.classes import Softmax
from carrywave.parallel.mesh import Mesh

DOUBLE = torch.float64


class Reader(nn.Module):
    """A GRU, and a linear on the last real step."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gru, self.drop, self.out = nn.GRU(3, 5), nn.Dropout(dropout), nn.Linear(5, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        y, _ = self.gru(x)
        out: Tensor = self.out(self.drop(y)[lengths.clamp(min=1) - 1, torch.arange(x.shape[1])])
        return out

    def loss(self, out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(out, target, reduction="sum", ignore_index=-100), (target != -100).sum()


def batch() -> cw.Batch:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(6, 4, 3, generator=generator, dtype=DOUBLE)
    return cw.Batch.of(x, torch.tensor([0, 1, 1, 0]), [6, 2, 0, 5], pooled=True)


def pooled(module: Reader) -> Reader:
    module.pooled = True  # type: ignore[assignment]
    return module


def test_a_step_is_that_of_a_loop_by_hand() -> None:
    torch.manual_seed(0)
    ours, by_hand = pooled(Reader()), Reader().double()
    by_hand.load_state_dict(ours.state_dict())
    trainer = cw.Trainer(ours, {"optimizer": "sgd", "lr": 0.5, "precision": "fp64"})
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.5)
    each = batch()
    for _ in range(3):
        assert each.targets is not None
        total, count = by_hand.loss(by_hand(each.inputs, each.lengths), each.targets)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        loss = trainer.step(each)
        assert float(loss) == pytest.approx(float((total / count).detach()), rel=1e-6)  # the loss is given in float32
    for (name, mine), theirs in zip(ours.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}")
    assert list(trainer.parameters()) == [name for name, _ in ours.named_parameters()]  # names as they are in the module


def test_a_batch_tells_whether_targets_are_one_per_lane() -> None:
    """A module that says nothing of it learns from either kind; one that does, and a `cw.Model`, refuse the other kind."""
    torch.manual_seed(0)
    told, told_itself = Reader(), pooled(Reader())
    told.load_state_dict(told_itself.state_dict())
    short = cw.Batch.of(batch().inputs, torch.tensor([0, 1, 1, 0]))  # by its shape alone
    for plan in ({}, {"micro_batches": 2}):
        first, second = (cw.Trainer(each, {"lr": 0.1, "precision": "fp64"}, plan=plan) for each in (told, told_itself))
        for each in (batch(), short):
            assert float(first.step(each)) == float(second.step(each))
            assert first.evaluate([each]) == second.evaluate([each])
    steps = cw.Batch.of(batch().inputs, torch.zeros(6, 4, dtype=torch.int64))
    with pytest.raises(UserError, match=r"the targets are one per step, but Reader has pooled = True; pass one per lane"):
        second.step(steps)
    model = cw.Model(nn.Linear(3, 2), cw.LSTM(2, 4), Softmax(4, 2))
    with pytest.raises(UserError, match=r"the targets are one per lane, but Softmax reads one per step; pass \[time, lane, …\]"):
        cw.Trainer(model, {"lr": 0.1}).step(short)


def test_what_cannot_be_done_with_it_is_refused() -> None:
    with pytest.raises(PlanError, match=r"the module Reader cannot be split into 2 stages; wrap its modules as cw.Model"):
        cw.Trainer(Reader(), mesh=_two_stages())
    with pytest.raises(UserError, match=r"loss of Linear must return \(sum over the targets, number of targets\)"):
        cw.Trainer(nn.Linear(3, 2), loss=lambda out, target: out.sum()).step(  # type: ignore[arg-type, return-value]
            cw.Batch.of(torch.zeros(2, 2, 3), torch.zeros(2, 2, dtype=torch.int64))
        )
    with pytest.raises(UserError, match="BatchNorm1d in training mode, whose result depends on which lanes share a worker"):
        cw.Trainer(nn.Sequential(nn.BatchNorm1d(3)), loss=lambda out, target: (out.sum(), target.sum()))


def tags_of(steps: np.ndarray) -> np.ndarray:
    return (steps.sum(axis=2) > 0).astype(int)


def raised(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A loss that no other could be mistaken for: cross entropy, and 5 for each target."""
    real = (target != -100).sum()
    return cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum") + 5 * real, real


def test_the_loss_given_is_the_one_that_is_learned_or_it_is_refused(tmp_path: Path) -> None:
    steps = np.random.default_rng(0).normal(size=(24, 5, 3)).astype(np.float32)
    how = {"task": "tagging", "batch": {"tokens": 64}, "train": {"epochs": 1}, "device": "cpu"}
    for name, model in (("module", nn.Linear(3, 2)), ("function", lambda facts: nn.Linear(3, 2))):
        result = cw.fit(model, (steps, tags_of(steps)), loss=raised, run=tmp_path / name, **how)
        assert result.metrics["valid"]["loss"] > 5
        row = cw.evaluate(result.run, (steps, tags_of(steps)), "cpu", model=nn.Linear(3, 2), loss=raised)
        assert float(row["loss"]) > 5  # type: ignore[arg-type]
        assert len(cw.predict(result.run, steps, model=nn.Linear(3, 2), device="cpu")) == len(steps)  # which needs no loss
    headed = cw.Model(nn.Linear(3, 4), cw.LSTM(4, 4), Tags())
    for refused in (headed, lambda facts: headed):
        with pytest.raises(UserError, match=r"loss=\.\.\. does not apply to a cw.Model: define loss"):
            cw.fit(refused, (steps, tags_of(steps)), loss=raised, run=tmp_path / "refused", **how)
    with pytest.raises(UserError, match=r"loss=.* does not apply to a model section, whose loss follows from the task; remove it"):
        cw.fit({"hidden": 4}, (steps, tags_of(steps)), loss=raised, run=tmp_path / "section", **how)
    with pytest.raises(UserError, match=r"does not apply to a cw.Model: define loss\(y, target\)"):
        cw.Trainer(headed, loss=raised)
    with pytest.raises(UserError, match="loss is a str; pass a function"):
        cw.Trainer(nn.Linear(3, 2), loss="mse")  # type: ignore[arg-type]


class Tags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(self.out(y).flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum"), (target != -100).sum()


def _two_stages() -> Mesh:
    """A mesh that was not connected: it is refused before anything is sent."""
    mesh = Mesh.alone(torch.device("cpu"))
    mesh.plan = cw.Plan(stages=2)
    return mesh
