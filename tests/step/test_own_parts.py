"""What surrounds a user's modules: dropout beside them, past values, replaced methods and parts, hooks, tensors that are tied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.data.batch import Batch
from carrywave.errors import PlanError, UserError
from carrywave.model.model import Model
from carrywave.plan.plan import Plan
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.checks.hooks import Hooks
from carrywave.step.trainer import Trainer
from carrywave.step.worker_setup import _check_plan


def tied_by_data(net: Model) -> None:
    net.head.weight.data = net.encoder.weight.data


def tied_layers(net: Model) -> None:
    net.lstm.weight_hh_l1.data = net.lstm.weight_hh_l0.data


@pytest.mark.parametrize("tie", [tied_by_data, tied_layers])
def test_tensors_that_share_their_memory_are_not_separated(tie: Callable[[Model], None]) -> None:
    """In one process a change of one is a change of the other; stages would have copies."""
    net = square()
    tie(net)
    with pytest.raises(PlanError, match=r"two tensors in the same memory; make them one parameter"):
        _check_plan(net, Plan(stages=2), TrainSpec())


class Linear(nn.Linear):
    """A head of the user's."""

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (self(y).square().sum(-1) - target).square().sum(), torch.tensor(target.numel())


def square() -> Model:
    return cw.Model(nn.Linear(4, 4), cw.LSTM(4, 4, num_layers=2), Linear(4, 4))


@pytest.mark.parametrize("part", ["model", "lstm"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
@pytest.mark.parametrize("late", [False, True])
def test_a_hook_that_would_not_be_called_is_refused(part: str, kind: str, late: bool) -> None:
    """On the encoder and the head they are called; around the layers, which a trainer runs individually, they are not."""
    net = square()
    given = Batch.of(torch.zeros(3, 2, 4), torch.zeros(3, 2))
    trainer = Trainer(net, {}, device="cpu") if late else None
    getattr(net if part == "model" else net.lstm, kind)(lambda *_: None)
    with pytest.raises(UserError, match=r"the hook on the (model \(Model|layers \(LSTM)\) would not be called; register it on the encoder"):
        (trainer or Trainer(net, {}, device="cpu")).step(given)


def clip_norm(optimizer: torch.optim.Optimizer, *_: object) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


def test_a_hook_on_the_optimizers_step_is_refused_where_it_would_see_a_part() -> None:
    net = square()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(clip_norm)
    parameters = dict(net.named_parameters())
    assert Hooks(parameters, net, Plan(replicas=2)).any_registered(optimizer)
    with pytest.raises(UserError, match=r"would see only the parameters of a stage; use train.clip for a norm over all"):
        Hooks(parameters, net, Plan(stages=2)).any_registered(optimizer)
    vouched = torch.optim.SGD(net.parameters(), lr=0.1)
    vouched.register_step_post_hook(Vouched())
    assert Hooks(parameters, net, Plan(stages=2)).any_registered(vouched)


class Vouched:
    """A hook that treats each parameter by itself."""

    splittable = True

    def __call__(self, *_: object) -> None:
        pass


class Extra(nn.Identity):
    def get_extra_state(self) -> object:
        return {"calls": 3}


def test_a_state_that_would_not_be_saved_is_refused_where_it_is_saved(tmp_path: Path) -> None:
    """It trains, but neither a state nor a run would have it."""
    net = cw.Model(Extra(), cw.LSTM(4, 4), Linear(4, 4))
    trainer = Trainer(net, {}, device="cpu")
    trainer.step(Batch.of(torch.zeros(4, 2, 4), torch.zeros(4, 2)))
    words = r"encoder \(Extra\) has a state of its own .*; keep it in a buffer"
    with pytest.raises(UserError, match=words):
        trainer.state_dict()
    with pytest.raises(UserError, match=words):
        cw.fit(net, (torch.zeros(40, 3, 4), torch.zeros(40, 3).long()), task="tagging", batch={"tokens": 64}, run=tmp_path / "run")


def test_a_part_that_is_replaced_or_a_forward_that_would_be_ignored_is_refused() -> None:
    net, given = square(), Batch.of(torch.zeros(3, 2, 4), torch.zeros(3, 2))
    trainer = Trainer(net, {}, device="cpu")
    trainer.step(given)
    net.head = Linear(4, 4)
    with pytest.raises(UserError, match=r"model\.head was replaced after the trainer was created"):
        trainer.step(given)

    class Changed(cw.Model):
        def forward(self, *args: Any, **options: Any) -> Any:
            return super().forward(*args, **options)

    class ChangedLSTM(cw.LSTM):
        def forward(self, *args: Any, **options: Any) -> Any:
            return super().forward(*args, **options)

    with pytest.raises(UserError, match="the forward of Changed would be ignored"):
        Trainer(Changed(nn.Tanh(), cw.LSTM(4, 4), Linear(4, 4)), {}, device="cpu")
    with pytest.raises(UserError, match="the forward of ChangedLSTM would be ignored"):
        Trainer(cw.Model(nn.Tanh(), ChangedLSTM(4, 4), Linear(4, 4)), {}, device="cpu")
