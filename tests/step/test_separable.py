"""Optimizers of the user's own: which of them stages can share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import carrywave as cw
from carrywave.errors import PlanError, UserError
from carrywave.step.checks.separable import check_separable

STAGES, SERIAL = cw.Plan(stages=2), cw.Plan()


class Clipping(SGD):
    """Clips the norm over all parameters."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 100.0)
        return super().step(closure)


class Promised(SGD):
    """Treats each parameter by itself, as its owner says."""

    splittable = True


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize("kind", [SGD, Adam, torch.optim.Adafactor, Promised])
def test_those_of_torch_and_of_a_promise_treat_each_parameter_by_itself(kind: Any) -> None:
    check_separable(kind(parameters(), lr=0.1), STAGES)


def test_any_other_is_refused_under_stages_alone() -> None:
    for plan in (SERIAL, cw.Plan(replicas=2)):
        check_separable(Clipping(parameters(), lr=0.1), plan)
    with pytest.raises(PlanError, match=r"Clipping may update parameters together, .* set optimizer\.splittable = True"):
        check_separable(Clipping(parameters(), lr=0.1), STAGES)


@pytest.mark.parametrize("plan", [SERIAL, STAGES])
def test_those_that_no_step_here_suits(plan: cw.Plan) -> None:
    with pytest.raises(UserError, match=r"LBFGS evaluates the loss several times per step.*use for example SGD or Adam"):
        check_separable(torch.optim.LBFGS(parameters()), plan)
    with pytest.raises(UserError, match=r"SparseAdam takes only sparse gradients.*use Adam"):
        check_separable(torch.optim.SparseAdam(parameters()), plan)


def test_a_trainer_asks() -> None:
    module = nn.Linear(3, 2)
    with pytest.raises(UserError, match="LBFGS evaluates the loss several times"):
        cw.Trainer(module, optimizer=torch.optim.LBFGS(module.parameters()), loss=lambda out, target: (out.sum(), target.sum()))
