"""The arithmetic of an exchange, the bound on staleness, and what replicas tell each other; without processes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import carrywave as cw
from _sync_definition import simulate
from carrywave.errors import PlanError, SpecError
from carrywave.plan.memory import Footprint
from carrywave.plan.plan import Plan, check_sync
from carrywave.plan.units import Units
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.nonfinite import Seen
from carrywave.step.sync.averaging import Averaging, OuterRule
from carrywave.step.sync.meeting import joined
from carrywave.step.sync.pushing import ShareServer

CLOSE = 1e-12  # a dozen additions in float64


def draw(seed: int) -> Tensor:
    return torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "train",
    [
        {"sync": "local"},
        {"sync": "local", "sync_momentum": 0.6},
        {"sync": "diloco", "sync_lr": 0.5, "sync_momentum": 0.8},
        {"sync": "diloco", "sync_lr": 0.5, "sync_momentum": 0.0},
    ],
)
def test_the_rule_is_that_of_the_reference(train: dict[str, float]) -> None:
    spec = parse({"train": train}).train
    rule = OuterRule.of(spec)
    counts = [3, 5]

    def inner(weights: list[Tensor], replica: int, step: int) -> int:
        weights[0] += 0.1 * draw(10 * step + replica) * weights[0]
        return counts[replica]

    wanted = simulate(
        [draw(0)],
        inner,
        lambda step: step % 3 == 0,
        replicas=2,
        steps=9,
        mode="local" if spec.sync == "local" else "diloco",
        momentum=spec.exchange_momentum,
        lr=spec.sync_lr,
    )
    outer, momentum = draw(0), torch.zeros(7, dtype=torch.float64) if rule.momentum else None
    for exchange in range(3):
        begun = outer.clone()
        own = [[begun.clone()] for _ in counts]
        for step in range(3 * exchange + 1, 3 * exchange + 4):
            for replica, weights in enumerate(own):
                inner(weights, replica, step)
        changes = [(weights[0] - begun) * (count / sum(counts)) for weights, count in zip(own, counts, strict=True)]
        rule.step_(outer, momentum, changes[0] + changes[1])
    torch.testing.assert_close(outer, wanted[0], rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("most_ahead", [0, 1, 3])
def test_staleness_is_bounded_and_nobody_waits_forever(most_ahead: int) -> None:
    replicas, order = 4, random.Random(most_ahead)
    share = ShareServer(0, replicas, TrainSpec(sync="async", sync_staleness=most_ahead), torch.zeros(2), None)
    waiting: set[int] = set()
    for _ in range(3000):
        ready = [replica for replica in range(replicas) if replica not in waiting]
        assert ready  # the slowest can always go on
        replica = order.choices(ready, weights=[1 + 9 * each for each in ready])[0]  # the last is much the fastest
        share.push(replica, torch.ones(2), 0.1)
        waiting.add(replica)
        for each in list(waiting):
            if share.done[each] - min(share.done) <= most_ahead:
                share.pull(each)
                waiting.remove(each)
        assert max(share.done) - min(share.done) <= most_ahead + 1
    assert 0 < share.staleness.most <= (replicas - 1) * (2 * most_ahead + 1)
    assert share.staleness.ahead == most_ahead
    assert share.staleness.pushes == 3000
    assert 0 < share.staleness.mean <= share.staleness.most


def test_news_of_non_finite_steps_are_joined() -> None:
    # Two replicas of two stages: ago + 1, code, bad, longest, in a row, scale gone.
    good = [0, 0, 0, 0, 0, 0]
    assert joined([good] * 4, [0, 2]) == Seen()
    one, other = [3, 7, 2, 1, 0, 0], [5, 4, 3, 3, 3, 0]
    assert joined([one, one, other, other], [0, 2]) == Seen(ago=4, codes=(0, 0, 4, 4), bad=5, longest=3, in_a_row=3)


def test_stages_do_not_push() -> None:
    check_sync(Plan(replicas=4), "async")
    check_sync(Plan(replicas=2, stages=2), "diloco")
    with pytest.raises(PlanError, match=r"but plan\.stages=2; use plan\.stages=1, or train\.sync=local or diloco"):
        check_sync(Plan(replicas=2, stages=2), "async")


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"sync_lr": 0.5}, "train.sync_lr is for train.sync=diloco, not for train.sync=step; remove it"),
        ({"sync": "local", "sync_staleness": 2}, "train.sync_staleness is for train.sync=async, not for train.sync=local; remove it"),
        ({"sync": "diloco", "optimizer": "ntasgd"}, "train.optimizer=ntasgd averages the weights of every step"),
    ],
)
def test_refused_in_one_line(train: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse({"train": train})
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("train", "copies"),
    [
        ({"sync": "local"}, 3),  # outer weights; differences, one by one and in a row
        ({"sync": "local", "sync_momentum": 0.5}, 4),
        ({"sync": "diloco"}, 4),
        ({"sync": "async"}, 4),
    ],
)
def test_the_plan_counts_the_copies(train: dict[str, object], copies: int) -> None:
    facts = DataFacts(steps=10_000, vocabulary=50)
    plan = Plan(replicas=2)
    both = (Units.of(parse({"train": each}), facts) for each in (train, {}))
    own, usual = (Footprint(plan, units.shapes[0], units).memory(0, 0, len(units)) for units in both)
    assert own.optimizer - usual.optimizer == copies * own.parameters
    assert usual.gradients - own.gradients == own.parameters  # nothing is summed in buffers of its own
    assert own.activations == usual.activations


def test_targets_of_a_step_that_fp16_skipped_do_not_count() -> None:
    """An exchange weighs a replica by what it has learned from."""
    torch.manual_seed(0)
    trainer = cw.Trainer(
        torch.nn.Linear(2, 1), {"precision": "fp16"}, loss=lambda out, target: ((out - target).square().sum(), target.numel())
    )
    averaging = Averaging(trainer.mesh, trainer.named, (), TrainSpec(sync="local"))
    batch = cw.Batch.of(torch.ones(3, 4, 2), torch.zeros(3, 4, 1))
    assert trainer.scaler is not None
    usual = trainer.scaler.scale.clone()
    trainer.scaler.scale.fill_(2.0**120)
    before = [parameter.clone() for _, parameter in trainer.named]
    result = trainer.update(batch)
    assert all(torch.equal(one, parameter) for one, (_, parameter) in zip(before, trainer.named, strict=True))
    assert bool(result.finite)  # the run goes on
    averaging.add(result)
    assert float(averaging.targets) == 0.0
    trainer.scaler.scale.copy_(usual)
    averaging.add(trainer.update(batch))
    assert float(averaging.targets) == 12.0
