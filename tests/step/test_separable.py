"""Optimizers of the user's own: which of them stages can share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import carrywave as cw
from carrywave.errors import PlanError, UserError
from carrywave.step.checks.separable import check_separable

STAGES, SERIAL = cw.Plan(stages=2), cw.Plan()


class Plain(Optimizer):
    """Momentum by hand."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p].setdefault("kept", torch.zeros_like(p))
                    kept.mul_(group["momentum"]).add_(p.grad)
                    p.sub_(kept, alpha=group["lr"])


class Layerwise(Plain):
    """A trust ratio for each parameter, as LARS has it."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(p.detach().norm() / p.grad.norm())
        super().step()


class Clipping(SGD):
    """Clips the norm over all of them where it is large."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 100.0)
        return super().step(closure)


class Normed(Plain):
    """One step size for all, from a norm over all."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.div_(norm)
        super().step()


class Odd(Plain):
    def __init__(self, params: Any, table: dict[Any, float]) -> None:
        super().__init__(params)
        self.rates = [table[p] for group in self.param_groups for p in group["params"]]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize("kind", [Plain, Layerwise, SGD, Adam, torch.optim.Adafactor, type("Mine", (torch.optim.AdamW,), {})])
def test_each_parameter_by_itself(kind: Any) -> None:
    own = parameters()
    check_separable(kind(own, lr=torch.tensor(0.1) if kind is Adam else 0.1), STAGES)
    assert all(torch.equal(p, torch.ones_like(p)) and p.grad is None for p in own)


@pytest.mark.parametrize("kind", [Clipping, Normed])
def test_a_norm_over_all_parameters_is_refused_under_stages_alone(kind: Any) -> None:
    check_separable(kind(parameters(), lr=0.1), SERIAL)
    check_separable(kind(parameters(), lr=0.1), cw.Plan(replicas=2))
    with pytest.raises(PlanError, match=f"{kind.__name__} updates a parameter differently when there are others"):
        check_separable(kind(parameters(), lr=0.1), STAGES)


def test_one_that_cannot_be_tried_is_refused_under_stages() -> None:
    own = parameters()
    odd = Odd(own, dict.fromkeys(own, 1.0))
    check_separable(odd, SERIAL)
    with pytest.raises(PlanError, match=r"a small Odd could not be tried \(.*table.*\), so it is unknown whether"):
        check_separable(odd, STAGES)


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
