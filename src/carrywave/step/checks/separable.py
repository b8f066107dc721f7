"""Checks that a user's optimizer can update parts of a model on different workers, that is, treats each parameter independently.

torch's optimizers do, except LBFGS. For others, a small instance with the same class and options is tried: two parameters stepped together
must end up where each ends up alone, even when one gradient is so large that a norm over both would be clipped.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from carrywave.errors import PlanError, UserError
from carrywave.plan.plan import Plan

STEPS = 3
SIZES = (1.0, 1e-4, 1e4)  # scale of the second parameter's gradient


def check_separable(optimizer: Optimizer, plan: Plan) -> None:
    """Refuse an optimizer that cannot take a step here at all, or cannot do so across the stages of this plan."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise UserError(f"{kind} evaluates the loss several times per step, but a step here evaluates it once; use for example SGD or Adam")
    if isinstance(optimizer, SparseAdam):
        raise UserError(f"{kind} takes only sparse gradients, but gradients are dense here; use Adam")
    if plan.stages == 1 or type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]:
        return
    try:
        with torch.random.fork_rng(devices=[]):
            separable = all(_separable(optimizer, size) for size in SIZES)
    except Exception as error:
        raise PlanError(
            f"a small {kind} could not be tried ({' '.join(str(error).split())[:100]}), so it is unknown whether it can update "
            f"parts of the model on {plan.stages} stages; use an optimizer of torch.optim, or only replicas"
        ) from error
    if not separable:
        raise PlanError(
            f"{kind} updates a parameter differently when there are others (for example, by a norm over all of them), but each of the "
            f"{plan.stages} stages holds only part of the model; use train.clip for a norm over all parameters, or only replicas"
        )


def _separable(optimizer: Optimizer, size: float) -> bool:
    together = _parameters()
    _steps(_like(optimizer, together), together, size)
    apart = _parameters()
    for number, parameter in enumerate(apart):
        _steps(_like(optimizer, [parameter]), [parameter], size, first=number)
    # Foreach and fused kernels may sum in a different order; a norm over both parameters would change the result far more.
    return all(torch.allclose(one, other, rtol=1e-9, atol=1e-12) for one, other in zip(together, apart, strict=True))


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(_numbers(3, 2, 0.5)), nn.Parameter(_numbers(4, 3, 0.1))]


def _numbers(rows: int, columns: int, start: float) -> Tensor:
    return torch.arange(rows * columns, dtype=torch.float64).reshape(rows, columns).add(start).cos()


def _steps(optimizer: Optimizer, parameters: list[nn.Parameter], size: float, first: int = 0) -> None:
    for step in range(STEPS):
        for number, parameter in enumerate(parameters, start=first):
            rows, columns = parameter.shape
            parameter.grad = _numbers(rows, columns, 1.0 + step) * (size if number else 1.0)
        torch.default_generator.manual_seed(step)  # an optimizer that draws noise must draw the same noise each time
        optimizer.step()


def _like(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    """A new optimizer of the same class and options over other parameters."""
    kind = type(optimizer)
    group = next((group for group in optimizer.param_groups if group["params"]), optimizer.param_groups[0])
    options = {name: _plain(value) for name, value in group.items() if name not in ("params", "param_names", "initial_lr")}
    taken = inspect.signature(kind.__init__).parameters
    every = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    given = {name: _plain(value) for name, value in optimizer.defaults.items() if every or name in taken}
    return kind([{**options, "params": parameters}], **given)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and not value.dim() else copy.deepcopy(value)
