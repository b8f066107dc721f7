"""A user's own loop around `Trainer`: freezing and unfreezing, optimizers, hooks, batches and numbers that cannot be right, going on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _warm
import carrywave as cw
from carrywave.errors import Diverged, SpecError, UserError
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.plan.plan import Plan
from carrywave.step.checks.hooks import Hooks
from carrywave.step.passes.jobs import flatten
from carrywave.step.trainer_state import PARTS

T, B, WIDTH, CLASSES = 6, 4, 5, 3
SGD = {"optimizer": "sgd", "lr": 0.5, "precision": "fp64"}
CHUNKS: list[dict[str, Any]] = [{}, {"chunk_steps": 2}, {"chunk_steps": 4, "recompute": True}]


class Head(nn.Module):
    def __init__(self, width: int = WIDTH, classes: int = CLASSES) -> None:
        super().__init__()
        self.out = nn.Linear(width, classes)

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = self.out(y)
        return out

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = self(y).flatten(0, 1)
        return nn.functional.cross_entropy(logits, target.flatten(), ignore_index=-100, reduction="sum"), (target != -100).sum()


def model(head: nn.Module | None = None, seed: int = 0) -> cw.Model:
    torch.manual_seed(seed)
    return cw.Model(nn.Linear(2, 3), cw.LSTM(3, WIDTH, num_layers=2), head or Head()).double()


def batch(seed: int = 1, lanes: int = B, **keys: Any) -> cw.Batch:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(T, lanes, 2, generator=draw, dtype=torch.float64)
    return cw.Batch.of(x, torch.randint(0, CLASSES, (T, lanes), generator=draw), **keys)


def by_hand(net: cw.Model, optimizer: torch.optim.Optimizer, given: cw.Batch, clip: float | None = None) -> None:
    """One step in plain PyTorch."""
    optimizer.zero_grad()
    y, _ = net(given.inputs)
    assert given.targets is not None
    total, count = net.head.loss(y, given.targets)
    (total / count).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(net.parameters(), clip)
    optimizer.step()


def assert_equal_weights(one: nn.Module, two: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14, msg=name)  # float64; chunks are summed in another order


# --- Freezing and unfreezing


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", CHUNKS)
@pytest.mark.parametrize("own", [False, True], ids=["the spec's optimizer", "an own one"])
def test_what_is_frozen_and_unfrozen_between_steps_is_followed(plan: dict[str, Any], own: bool) -> None:
    ours, plain = model(), model()
    for net in (ours, plain):
        net.head.requires_grad_(False)

    def make(net: cw.Model) -> torch.optim.Optimizer:
        return torch.optim.Adam(net.parameters(), lr=0.01)

    if own:
        trainer = cw.Trainer(ours, {"clip": 0.1}, plan=plan, optimizer=make(ours), keep_state=False)
    else:
        trainer = cw.Trainer(ours, {"clip": 0.1, "lr": 0.01}, plan=plan, keep_state=False)
    theirs = make(plain)
    for number in range(6):
        for net in (ours, plain):
            net.head.requires_grad_(number >= 2)
            net.lstm.requires_grad_(number != 4)
        trainer.step(batch(number))
        by_hand(plain, theirs, batch(number), 0.1)
    assert_equal_weights(ours, plain)


def test_a_parameter_that_was_replaced_is_refused() -> None:
    net = model()
    trainer = cw.Trainer(net, SGD)
    trainer.step(batch())
    net.head.out.weight = nn.Parameter(torch.zeros_like(net.head.out.weight))
    with pytest.raises(UserError, match=r"head\.out\.weight was replaced or removed after the trainer was created"):
        trainer.step(batch())


def test_a_model_that_was_converted_is_refused() -> None:
    net = model()
    trainer = cw.Trainer(net, SGD)
    trainer.step(batch())
    net.float()
    with pytest.raises(UserError, match=r"was float64 on cpu and is float32 on cpu; .* create a new Trainer"):
        trainer.step(batch())


# --- What is not the model's


# --- What a trainer is given


def test_keys_that_a_step_does_not_act_on_are_refused() -> None:
    for keys in ({"warmup": 10}, {"schedule": "cosine"}, {"accumulate": 2}, {"max_steps": 5}, {"epochs": 3}, {"early_stop": 2}):
        [key] = keys
        with pytest.raises(SpecError, match=rf"train\.{key} does not apply to a Trainer, which takes single steps; .*, or use cw\.fit"):
            cw.Trainer(model(), keys)
    with pytest.raises(SpecError, match="on_nan=back"):
        cw.Trainer(model(), {"on_nan": "back"})
    net = model()
    for keys in ({"lr": 0.1}, {"optimizer": "adam"}, {"weight_decay": 0.1}):
        [key] = keys
        with pytest.raises(SpecError, match=rf"train\.{key} does not apply to your own optimizer"):
            cw.Trainer(net, keys, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    # A whole spec may be shared with cw.fit, as long as it asks for nothing else.
    assert cw.Trainer(model(), cw.Spec.model_validate({"train": {"lr": 0.25}})).spec.lr == 0.25


def test_a_float64_model_is_trained_as_one(tmp_path: Path) -> None:
    net = model()
    assert cw.Trainer(net, {"lr": 0.1}).spec.precision == "fp64"
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    for kind, remedy in ((torch.float64, "or set train.precision=fp64"), (torch.float16, "train.precision=fp16")):
        other = model().to(kind)
        with pytest.raises(UserError, match=rf"use model\.float\(\).*{remedy}"):
            cw.Trainer(other, {"precision": "fp32"})
        assert {p.dtype for p in other.parameters()} == {kind}
    given, options = (batch().inputs.transpose(0, 1), [[0] * T] * B), {"task": "tagging", "batch": {"tokens": 64}}
    with pytest.raises(UserError, match=r"is float64, but train\.precision=fp32"):
        cw.fit(model(), given, train={"precision": "fp32"}, run=tmp_path, **options)
    result = cw.fit(model(), given, train={"max_steps": 1}, run=tmp_path, **options)
    assert result.task.spec.train.precision == "fp64"
    assert "precision: fp64" in (tmp_path / "spec.yaml").read_text()


def test_lanes_that_cannot_go_on_are_refused() -> None:
    both_ways = cw.Model(nn.Linear(2, 3), cw.LSTM(3, WIDTH, bidirectional=True), Head(2 * WIDTH)).double()
    plain = nn.Linear(2, CLASSES).double()
    loss = Head.loss.__get__(nn.Identity())
    for trainer, why in (
        (cw.Trainer(both_ways, SGD), "the model reads whole sequences"),
        (
            cw.Trainer(plain, SGD, loss=loss),
            "does not know the carry of a Linear; wrap its parts as cw.Model.*, or remove fresh",
        ),
        (cw.Trainer(model(), SGD, keep_state=False), "keep_state=False"),
    ):
        for fresh in (False, [True] * (B - 1) + [False]):
            with pytest.raises(UserError, match=f"fresh=False continues the carry .*{why}"):
                trainer.step(batch(fresh=fresh))
        trainer.step(batch(fresh=True))


def test_batches_that_cannot_be_meant_are_said_in_our_words() -> None:
    words = cw.Model(Embedding(7, 3), cw.LSTM(3, WIDTH), Softmax(WIDTH, CLASSES))
    trainer, numbers = cw.Trainer(words, {"lr": 0.1}), cw.Trainer(model(), {"lr": 0.1})
    tokens, target = torch.zeros(T, B, dtype=torch.int64), torch.zeros(T, B, dtype=torch.int64)
    with pytest.raises(UserError, match="the batch has no targets"):
        trainer.step(cw.Batch.of(tokens))
    with pytest.raises(UserError, match="contain token 7, but the encoder knows 0 to 6"):
        trainer.step(cw.Batch.of(tokens + 7, target))
    with pytest.raises(UserError, match="contain class -1, but the head knows 0 to 2"):
        trainer.step(cw.Batch.of(tokens, target - 1))
    with pytest.raises(UserError, match="Embedding reads tokens; pass whole numbers"):
        trainer.step(cw.Batch.of(torch.zeros(T, B, 2), target))
    with pytest.raises(UserError, match=r"Linear reads 2 numbers per step; pass floats of shape \[time, lane, 2\]"):
        numbers.step(cw.Batch.of(torch.zeros(T, B, 3), target))
    with pytest.raises(UserError, match="learns classes; pass whole numbers"):
        trainer.step(cw.Batch.of(tokens, target.double()))
    trainer.step(cw.Batch.of(tokens, torch.full_like(target, -100)))  # nothing to learn in this one is no mistake


# --- Hooks


@pytest.mark.parametrize("plan", CHUNKS)
def test_post_accumulate_hooks_see_the_final_gradient_once(plan: dict[str, Any]) -> None:
    net, plain = model(), model()
    seen: list[Tensor] = []

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())
        parameter.grad.mul_(2.0)

    handle = net.lstm.weight_hh_l0.register_post_accumulate_grad_hook(hook)
    trainer = cw.Trainer(net, {"optimizer": "sgd", "lr": 0.5, "clip": 0.05}, plan=plan, keep_state=False)
    trainer.step(batch())
    theirs = torch.optim.SGD(plain.parameters(), lr=0.0)
    by_hand(plain, theirs, batch(), 0.05)
    [own] = seen
    torch.testing.assert_close(own, plain.lstm.weight_hh_l0.grad, rtol=1e-12, atol=1e-15)
    expected = plain.lstm.weight_hh_l0 - 0.5 * 2.0 * own
    torch.testing.assert_close(net.lstm.weight_hh_l0, expected, rtol=1e-12, atol=1e-15)
    handle.remove()
    trainer.step(batch(2))
    assert len(seen) == 1


def test_hooks_that_would_see_parts_of_a_gradient_are_refused() -> None:
    net = model()
    net.head.out.weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(UserError, match=r"register_hook\) would see parts .* use register_post_accumulate_grad_hook"):
        cw.Trainer(net, SGD, plan={"chunk_steps": 2}).step(batch())
    before = net.head.out.weight.clone()
    cw.Trainer(net, SGD).step(batch())
    assert torch.equal(net.head.out.weight, before)
    other = model()
    other.head.register_full_backward_hook(lambda *_: None)
    with pytest.raises(UserError, match="the backward hook on a Head would see parts"):
        cw.Trainer(other, SGD, plan={"chunk_steps": 2}).step(batch())
    for plan in (Plan(replicas=2), Plan(stages=2), Plan(micro_batches=2)):
        with pytest.raises(UserError, match="the backward hook on a Head would see parts"):
            Hooks({}, other, plan).any_registered(None)


# --- Bad numbers


class MeanOfItsOwn(Head):
    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().loss(y, target)
        return total / count * target.numel(), torch.tensor(target.numel())


def test_a_loss_that_divides_by_no_targets_is_told_so() -> None:
    missing = batch()
    assert missing.targets is not None
    missing.targets.fill_(-100)
    words = "the loss that head computes .* is no longer finite; .*, and let the loss be 0 where a part of a batch has no targets"
    for keys in (SGD, SGD | {"sync": "local", "sync_every": 1}):
        trainer = cw.Trainer(model(MeanOfItsOwn()), keys)
        trainer.step(batch())
        with pytest.raises(Diverged, match=words):
            trainer.step(missing)


@pytest.mark.parametrize("own", [False, True], ids=["the spec's optimizer", "an own one"])
def test_a_bad_step_stops_and_harms_nothing(own: bool) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1) if own else None
    trainer = cw.Trainer(net, {} if own else {"lr": 0.1}, optimizer=optimizer)
    trainer.step(batch())
    before = {name: p.clone() for name, p in net.named_parameters()}
    good, bad = batch(2, fresh=False), batch(3, fresh=False)
    bad.inputs[2, 1] = torch.nan
    with pytest.raises(Diverged, match=r"the output that lstm\.l0 computes on rank 0 is no longer finite; lower the learning rate"):
        trainer.step(bad)
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before[name])
    # The lane that went bad begins anew; the others go on.
    assert trainer.step(good).isfinite()


def test_a_bad_step_that_is_known_one_step_later_raises_once() -> None:
    net = model()
    trainer = cw.Trainer(net, {"lr": 0.1})
    trainer.agreement.at_once = False  # as with a GPU
    trainer.step(batch())
    before = {name: p.clone() for name, p in net.named_parameters()}
    bad = batch(3, fresh=False)
    bad.inputs[2, 1] = torch.nan
    trainer.step(bad)
    with pytest.raises(Diverged, match=r"the output that lstm\.l0 computes on rank 0 is no longer finite"):
        trainer.step(batch(2, fresh=False))  # which goes on from what was not finite
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before[name])
    for number in range(3):
        assert trainer.step(batch(4 + number, fresh=False)).isfinite()


# --- Evaluation, and going on


def test_evaluation_is_the_mean_over_all_targets_with_a_carry_of_its_own() -> None:
    net = model()
    trainer = cw.Trainer(net, SGD, plan={"chunk_steps": 4})
    first, second = batch(1), batch(2, fresh=False)
    trainer.step(first)
    assert trainer.state is not None
    carry = [part.clone() for part in flatten(trainer.state)]
    shown: list[tuple[int, ...]] = []
    loss = trainer.evaluate([first, second], observe=lambda out, _: shown.append(tuple(out.shape)))
    y, state = net(first.inputs)
    z, _ = net(second.inputs, state)
    parts = [net.head.loss(out, given.targets) for out, given in ((y, first), (z, second))]
    expected = sum(float(total.detach()) for total, _ in parts) / sum(int(count) for _, count in parts)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert shown == [(4, B, CLASSES), (2, B, CLASSES)] * 2
    assert trainer.state is not None
    assert all(map(torch.equal, flatten(trainer.state), carry))
    assert net.training
    with pytest.raises(UserError, match="the batches contain no targets"):
        trainer.evaluate([cw.Batch.of(first.inputs, torch.full((T, B), -100))])


def test_replicas_exchange_one_message_a_step_and_refuse_an_incomplete_state_together(tmp_path: Path) -> None:
    """Of the state, rank 0 alone had raised, and the others had waited for it."""
    ended = _warm.start([sys.executable, str(Path(__file__).with_name("_two_workers.py")), str(tmp_path)], 2)
    assert ended.code == 0, ended
    said = [(tmp_path / f"{rank}.txt").read_text().splitlines() for rank in range(2)]
    assert said[0] == said[1]
    assert said[0] == ["1 message"] + [
        f"the trainer state is incomplete: it has no {part}; pass what trainer.state_dict() returned on rank 0" for part in PARTS
    ]
