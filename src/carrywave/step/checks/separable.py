"""Checks that a user's optimizer can take the steps of this plan."""

from __future__ import annotations

from torch.optim import LBFGS, Optimizer, SparseAdam

from carrywave.errors import PlanError, UserError
from carrywave.plan.plan import Plan
from carrywave.step.checks.stepwise import SPLITTABLE


def check_separable(optimizer: Optimizer, plan: Plan) -> None:
    """Refuse an optimizer that cannot take a step here at all, or may treat parameters of different stages together, as no norm over all
    of them can be known to one stage. torch's own treat each parameter by itself; others have their owner's promise.
    """
    kind = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise UserError(f"{kind} evaluates the loss several times per step, but a step here evaluates it once; use for example SGD or Adam")
    if isinstance(optimizer, SparseAdam):
        raise UserError(f"{kind} takes only sparse gradients, but gradients are dense here; use Adam")
    known = type(optimizer).__module__.split(".")[:2] == ["torch", "optim"] or getattr(optimizer, SPLITTABLE, False) is True
    if plan.stages > 1 and not known:
        raise PlanError(
            f"{kind} may update parameters together, but a stage has only some; if it treats each alone, set optimizer.{SPLITTABLE} = True"
        )
