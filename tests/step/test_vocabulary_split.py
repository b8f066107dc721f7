"""A split vocabulary around a step: what a worker holds, what the planner says of it, and what is refused. One worker plays its part of
four whose lanes are all alike, so that what it hears from the others is what it says itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from carrywave.data.batch import Batch
from carrywave.errors import PlanError
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.world import World
from carrywave.plan.cost.footprint import largest_stage
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan, fewer, resolve
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse
from carrywave.spec.plan_spec import PlanSpec
from carrywave.step.trainer import Trainer

WORDS, WIDTH, LANES, STEPS, REPLICAS = 20_001, 16, 8, 10, 4
SPLIT = Plan(REPLICAS, split_vocabulary=True)
SPEC = {"model": {"hidden": WIDTH, "layers": 1}, "batch": {"lanes": LANES, "steps": STEPS}, "train": {"optimizer": "adam"}}


class Echo:
    """Others who say the same; their rows score nothing."""

    def __init__(self, index: int, of: int) -> None:
        self.index, self.of = index, of

    def gather(self, own: Tensor) -> Tensor:
        return own[None].expand(self.of, *own.shape).clone()

    def scatter_sum(self, parts: Tensor) -> Tensor:
        return parts[self.index].clone()

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor

    def maximum_(self, tensor: Tensor) -> Tensor:
        return tensor


class Place(Mesh):
    """The place of one worker in a plan, without the others."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.world, self.device = plan, World.alone(torch.device("cpu")), torch.device("cpu")
        self.replica, self.stage, self.links, self._all = *divmod(rank, plan.stages), None, None

    def replicas_of(self, stages: Sequence[int]) -> None:
        return None

    def row_exchange(self) -> Any:
        return Echo(self.replica, self.plan.replicas)


def a_model() -> Model:
    return Model(Embedding(WORDS, WIDTH), LSTM(WIDTH, WIDTH), Softmax(WIDTH, WORDS))


def held_bytes(plan: Plan, rank: int) -> int:
    """Weights, gradients and optimizer state after a step."""
    trainer = Trainer(a_model(), parse(SPEC).train, mesh=Place(plan, rank))
    tokens = torch.randint(WORDS, (STEPS, LANES), generator=torch.Generator().manual_seed(1))
    trainer.update(Batch.of(tokens, tokens, step=0))
    grads = [parameter.grad for _, parameter in trainer.named if parameter.grad is not None]
    assert len(grads) == len(trainer.named)
    state = [value for kept in trainer.optimizer.state.values() for value in kept.values()]
    return sum(tensor.nbytes for tensor in [*trainer.parameters().values(), *grads, *state])


@pytest.mark.parametrize("rank", [0, REPLICAS - 1])
def test_a_worker_holds_its_share_of_weights_gradients_and_optimizer_state(rank: int) -> None:
    whole = held_bytes(Plan.serial(), 0)
    assert whole >= 4 * 4 * 2 * WORDS * WIDTH
    assert held_bytes(SPLIT, rank) == pytest.approx(whole / REPLICAS, rel=0.02)  # a small layer is on all of them


def test_the_planner_counts_what_a_worker_holds() -> None:
    units = Units.of(parse(SPEC), DataFacts(vocabulary=WORDS))
    split = largest_stage(units, SPLIT)
    trainer = Trainer(a_model(), parse(SPEC).train, mesh=Place(SPLIT, 0))
    # The planner divides numbers, not rows.
    assert split.parameters == pytest.approx(sum(tensor.nbytes for tensor in trainer.parameters().values()), abs=4 * 2 * (WIDTH + 1))
    million = Units.of(parse(SPEC | {"model": {"hidden": 512, "layers": 2}}), DataFacts(vocabulary=1_000_000))
    quarter = largest_stage(million, Plan.serial()).total / 4
    assert largest_stage(million, SPLIT).total < 1.3 * quarter


def test_a_split_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(PlanError, match=r"cannot have plan.stages=2 stages; use plan.stages=1, or plan.share_head instead"):
        resolve(PlanSpec(stages=2, split_vocabulary=True), layers=2, workers=4, lanes=None)
    with pytest.raises(PlanError, match=r"a vocabulary of 3 cannot be split over 4 replicas; remove plan.split_vocabulary, or use fewer"):
        Trainer(Model(Embedding(3, 2), LSTM(2, 2), Softmax(2, 3)), mesh=Place(SPLIT, 0))
    with pytest.raises(PlanError, match=r"train.reproducible=true needs sums in one order on any number of replicas"):
        Trainer(a_model(), {"reproducible": True}, mesh=Place(SPLIT, 0))
    with pytest.raises(PlanError, match=r"needs carrywave's Embedding as the encoder, but this model has Linear of torch"):
        Trainer(Model(nn.Linear(3, 2), LSTM(2, 2), Softmax(2, 3)), mesh=Place(SPLIT, 0))


def test_one_worker_has_nobody_to_share_with() -> None:
    """Also when the others are gone, and the run goes on without them."""
    asked = PlanSpec(replicas=4, split_vocabulary=True)
    assert not resolve(fewer(asked, 1), layers=2, workers=1, lanes=None).splits_vocabulary
    assert resolve(fewer(asked, 3), layers=2, workers=3, lanes=None).splits_vocabulary


@pytest.mark.parametrize(("kind", "separable"), [(torch.optim.SGD, True), (torch.optim.AdamW, True), (torch.optim.Adafactor, False)])
def test_an_optimizer_that_mixes_rows_is_refused(kind: Any, separable: bool) -> None:
    model = a_model()
    optimizer = kind(model.parameters(), lr=0.1)
    if separable:
        Trainer(model, mesh=Place(SPLIT, 0), optimizer=optimizer)
        return
    with pytest.raises(
        PlanError, match=r"Adafactor may update the rows of a matrix differently when others are there, .*; use for example SGD"
    ):
        Trainer(model, mesh=Place(SPLIT, 0), optimizer=optimizer)
