"""Handles hooks that a user has registered on parameters: decides when to call them, and refuses those that cannot work with a split step.

A step runs backward once per chunk and defers some weight gradients, so torch would call a hook with part of a sum, or with nothing. The
trainer therefore calls `register_post_accumulate_grad_hook` hooks itself: once per step, when the gradient is what the optimizer will see
(summed over workers, divided, clipped). Hooks on the optimizer (`register_step_pre_hook`) are called by the optimizer at the same point;
they may use a norm over all parameters, so they are refused where a worker has only some of these, unless their owner promises that they
do not. `register_hook` hooks and modules' backward hooks are called by torch: if the plan cuts nothing they see the undivided sum over all
lanes; otherwise they are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from carrywave.errors import UserError
from carrywave.plan.plan import Plan
from carrywave.step.checks.stepwise import SPLITTABLE

Hook = Callable[[Tensor], None]
_OF_STEPS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Hooks:
    """The hooks on the parameters and modules that one worker holds. `plan`: of those who share a step."""

    def __init__(self, held: Mapping[str, nn.Parameter], model: nn.Module, plan: Plan) -> None:
        self.held, self.parameters = held, list(held.values())
        self.modules = list(model.modules())
        self.is_cut = plan.workers > 1 or plan.micro_batches > 1 or plan.chunk_steps is not None
        self.splits_layers = plan.stages > 1
        self.waiting: list[tuple[nn.Parameter, list[Hook]]] = []

    def any_registered(self, optimizer: object) -> bool:
        """True if there are any hooks, which a captured step would not call. Refuses hooks that cannot work under this plan."""
        of_steps = [each for name in _OF_STEPS for each in getattr(optimizer, name, {}).values()]
        of_parameters = [p for p in self.parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
        of_modules = [each for each in self.modules if each._backward_hooks or each._backward_pre_hooks]
        if not of_steps and not of_parameters and not of_modules:
            return False
        if self.splits_layers and not all(getattr(hook, SPLITTABLE, False) is True for hook in of_steps):
            raise UserError(
                "a hook on the optimizer's step would see only the parameters of a stage; use train.clip for a norm over all, or, if it "
                f"treats each by itself, set hook.{SPLITTABLE} = True"
            )
        inside = [f"the hook on the gradient of {name} (register_hook)" for name, p in self.held.items() if p._backward_hooks]
        inside += [f"the backward hook on a {type(each).__name__}" for each in of_modules]
        if inside and self.is_cut:
            raise UserError(
                f"{inside[0]} would see parts of a gradient where a plan cuts; use register_post_accumulate_grad_hook on the parameter"
            )
        return bool(of_steps or inside or self._with_users())

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Inside this context torch does not call the user's post-accumulate hooks; `call` does."""
        taken: list[tuple[dict[int, Any], dict[int, Any]]] = []
        for parameter in self._with_users():
            users, hooks = _users(parameter), parameter._post_accumulate_grad_hooks
            taken.append((hooks, dict(hooks)))
            for key in users:
                del hooks[key]
            self.waiting.append((parameter, list(users.values())))
        try:
            yield
        finally:
            self.waiting = []
            for hooks, before in taken:
                added = {key: hook for key, hook in hooks.items() if key not in before}
                hooks.clear()
                hooks.update(before | added)

    def _with_users(self) -> list[nn.Parameter]:
        """The parameters that have hooks of the user's, of which there are hardly ever any."""
        return [p for p in self.parameters if p._post_accumulate_grad_hooks and _users(p)]

    def call(self) -> None:
        """Call the deferred hooks, now that every gradient is final."""
        for parameter, hooks in self.waiting:
            for hook in hooks:
                if parameter.grad is not None:
                    hook(parameter)


def _users(parameter: nn.Parameter) -> dict[int, Hook]:
    """The hooks that are not ours, by handle id."""
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    return {key: hook for key, hook in hooks.items() if not getattr(hook, "is_ours", False)}
