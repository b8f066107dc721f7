"""Batches of a user's own loop: those with an autograd graph, the carry of lanes that change their number, their order or fail, and
batches from which nothing can be learned.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import carrywave as cw
from carrywave.errors import UserError
from carrywave.model.heads.classes import Sigmoid
from carrywave.model.heads.crf import CRF
from carrywave.model.heads.ctc import Ctc
from carrywave.model.state import State

T, B, WIDTH, CLASSES = 4, 4, 5, 3
SGD = {"optimizer": "sgd", "lr": 0.5, "precision": "fp64"}
PLANS: list[dict[str, Any]] = [{}, {"chunk_steps": 2}, {"micro_batches": 2}]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = self.out(y)
        return out

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (self(y) - target).square().sum(), torch.tensor(target.numel())


def model() -> cw.Model:
    torch.manual_seed(0)
    return cw.Model(nn.Linear(2, 3), cw.LSTM(3, WIDTH, num_layers=2, dropout=0.5), Head()).double()


def tensors(seed: int = 1, lanes: int = B) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(T, lanes, width, generator=draw, dtype=torch.float64) for width in (2, 1))  # type: ignore[return-value]


# --- With a graph


@pytest.mark.parametrize("plan", PLANS)
def test_inputs_and_targets_with_a_graph_are_refused_at_every_step(plan: dict[str, Any]) -> None:
    outer = nn.Linear(2, 2).double()
    x, target = tensors()
    trainer = cw.Trainer(model(), SGD, plan=plan)
    for _ in range(2):
        with pytest.raises(UserError, match=r"the inputs require grad, .* put what makes them into the model, or detach"):
            trainer.step(cw.Batch.of(outer(x), target))
        with pytest.raises(UserError, match=r"the targets require grad, .* put what makes them into the model, or detach"):
            trainer.step(cw.Batch.of(x, outer(x)[..., :1]))
        with pytest.raises(UserError, match="the inputs require grad"):
            trainer.step(cw.Batch.of(x.clone().requires_grad_(), target))
        assert outer.weight.grad is None
        trainer.step(cw.Batch.of(outer(x).detach(), target))  # the check also holds after a step has been taken
    whole = cw.Trainer(nn.Linear(2, 1).double(), SGD, plan={"micro_batches": 2}, loss=lambda out, t: ((out - t).abs().sum(), t.numel()))
    with pytest.raises(UserError, match="the inputs require grad"):
        whole.step(cw.Batch.of(outer(x), target))


# --- Lanes that continue


def assert_same_state(one: cw.Trainer, two: cw.Trainer) -> None:
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(one.state_dict()["carry"].values(), two.state_dict()["carry"].values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("plan", PLANS)
def test_a_lane_that_continues_in_another_column_is_refused(plan: dict[str, Any]) -> None:
    """The carry is kept by column. It would be another lane's."""
    (x, target), order = tensors(), [2, 0, 3, 1]
    trainer, same = cw.Trainer(model(), SGD, plan=plan), cw.Trainer(model(), SGD, plan=plan)
    for each in (trainer, same):
        each.step(cw.Batch.of(x, target))
    moved = cw.Batch.of(x[:, order], target[:, order], lanes=order, fresh=False)
    with pytest.raises(
        UserError, match="lane 2 continues its carry in column 0, where the previous batch had lane 0; keep the lanes in one"
    ):
        trainer.step(moved)
    some = [False, True, True, True]
    with pytest.raises(UserError, match="lane 2 continues its carry in column 0"):
        trainer.step(cw.Batch.of(x, target, lanes=torch.tensor(order), fresh=some))
    with pytest.raises(UserError, match="lane 5 continues its carry in column 3, where the previous batch had lane 3"):
        trainer.step(cw.Batch.of(x, target), cw.Batch.of(x, target, lanes=[0, 1, 2, 5], fresh=False))
    with pytest.raises(UserError, match="lane 2 continues its carry in column 0"):
        trainer.evaluate([cw.Batch.of(x, target), moved])
    for each, numbers in ((trainer, None), (same, [0, 1, 2, 3])):  # a step that was refused has left nothing behind
        each.step(cw.Batch.of(x, target, lanes=numbers, fresh=False))
    assert_same_state(trainer, same)


@pytest.mark.parametrize(("lanes", "width"), [(3, WIDTH), (1, WIDTH), (B, WIDTH + 1)])
def test_a_state_of_other_lanes_or_widths_is_refused(lanes: int, width: int) -> None:
    """The state of other lanes had been dropped without a word, and that of another width been an error of a kernel."""
    trainer, same, right = cw.Trainer(model(), SGD), cw.Trainer(model(), SGD), cw.LSTM(3, WIDTH, 2, dtype=torch.float64).initial(B)
    trainer.state = State(cw.LSTM(3, width, 2, dtype=torch.float64).initial(lanes))
    said = rf"carry h of layer 0 has shape \[1, {lanes}, {width}\], expected \[1, {B}, {WIDTH}\]; build a new one"
    with pytest.raises(UserError, match=said):
        trainer.step(cw.Batch.of(*tensors(), fresh=False))
    for each in (trainer, same):
        each.state = State(right)
        each.step(cw.Batch.of(*tensors(), fresh=False))
        each.step(cw.Batch.of(*tensors(lanes=3)))  # all of which are fresh: nothing goes on
    assert_same_state(trainer, same)


# --- Checkpointing of one's own


class Checkpointed(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 3), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


@pytest.mark.filterwarnings("ignore:encoder")  # plans that split are refused by the check of modules, and here it warns of them
def test_checkpointing_of_dropout_is_refused_and_of_anything_else_is_not() -> None:
    """It computes a module again in backward, where the key of the batch is not known: other masks, and a wrong gradient."""
    nets = [model(), model(), model()]
    nets[1] = cw.Model(Checkpointed(0.5).double(), nets[1].lstm, nets[1].head)
    nets[2] = cw.Model(Checkpointed(0.0).double(), nets[2].lstm, nets[2].head)
    nets[2].encoder.inner[0].load_state_dict(nets[0].encoder.state_dict())
    plain, refused, allowed = (cw.Trainer(net, SGD) for net in nets)
    with pytest.raises(UserError, match=r"a module with dropout is computed again in backward, .* set plan\.recompute=true instead"):
        refused.step(cw.Batch.of(*tensors()))
    for trainer in (plain, allowed):
        trainer.step(cw.Batch.of(*tensors()))
    for a, b in zip(nets[0].parameters(), nets[2].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


# --- That cannot be learned


def test_targets_that_a_head_cannot_learn_are_said_in_our_words() -> None:
    """Instead of a loss that is not finite, or a wrong one."""
    x, target = torch.zeros(T, B, 2), torch.zeros(T, B, dtype=torch.int64)

    def refused(head: nn.Module, targets: Tensor, words: str, **more: Any) -> None:
        trainer = cw.Trainer(cw.Model(nn.Linear(2, 3), cw.LSTM(3, WIDTH), head), {"lr": 0.1})
        for use in (trainer.step, lambda batch: trainer.evaluate([batch])):
            with pytest.raises(UserError, match=words):
                use(cw.Batch.of(x, targets, **more))

    refused(CRF(WIDTH, CLASSES), target + CLASSES, "contain class 3, but the head knows 0 to 2")
    refused(CRF(WIDTH, CLASSES), target - 1, "contain class -1, but the head knows 0 to 2")
    refused(CRF(WIDTH, CLASSES), target.double(), "the head CRF learns classes; pass whole numbers")
    refused(CRF(WIDTH, CLASSES), target[..., None], r"the head CRF learns a label for each step; pass \[time, lane\]")
    refused(Sigmoid(WIDTH, CLASSES), torch.full((T, B, CLASSES), 2.0), "contain 2, but a label holds or does not; pass 1 or 0 for each")
    rows = torch.tensor([[0, 1, -1]] * B)
    short = torch.full((B,), 1)
    refused(
        Ctc(WIDTH, CLASSES), rows, "labels of lane 0 need 2 answers, .*, but the head gives 1 for its 1 steps", lengths=short, pooled=True
    )
    refused(Ctc(WIDTH, CLASSES), torch.zeros(B, T, dtype=torch.int64), f"labels of lane 0 need {2 * T - 1} answers", pooled=True)
