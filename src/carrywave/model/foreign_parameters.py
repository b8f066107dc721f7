"""Detects parameters that a loss depends on but the model does not own, from the leaves of the autograd graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.errors import UserError

_DERIVATIVE = ", or, if it was made to differentiate by it, use torch.func.grad, which needs no such tensor"


def leaves(root: Tensor) -> Iterator[Tensor]:
    """Yield every leaf that backward from `root` would reach."""
    if root.grad_fn is None:
        if root.requires_grad:
            yield root
        return
    seen: set[Any] = set()
    waiting: list[Any] = [root.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            yield variable
        waiting += [following for following, _ in node.next_functions]


class Audit:
    """Rejects results that depend on parameters outside the model: their gradients would not be summed, divided or clipped."""

    def __init__(self, model: nn.Module, reads: Callable[[], Any]) -> None:
        self.parameter_ids = {id(p) for p in model.parameters()}
        # Those that this worker gave up to another stage, as who still refers to them sees them.
        self.given_up = {id(p.stands_for()): name for name, p in model.named_parameters() if hasattr(p, "stands_for")}
        self.reads = reads  # returns the loss function, which is searched for the name of a foreign tensor
        self.entered: list[Tensor] = []  # kept alive: the id of a freed tensor may be reused

    def enter(self, *tensors: Any) -> None:
        """Register tensors that belong to the step: inputs, carries, activations from the previous stage."""
        self.entered += [leaf for tensor in tensors if isinstance(tensor, Tensor) for leaf in leaves(tensor)]

    def __call__(self, root: Any) -> None:
        """Raise if a result depends on a foreign tensor."""
        if not isinstance(root, Tensor) or not torch.is_grad_enabled():
            return
        entered_ids = {id(tensor) for tensor in self.entered}
        for leaf in leaves(root):
            if id(leaf) not in self.parameter_ids and id(leaf) not in entered_ids:
                if id(leaf) in self.given_up:
                    raise UserError(
                        f"the loss depends on {self.given_up[id(leaf)]}, which another stage holds, through a reference that does not show "
                        "that two units share it; make it an attribute of the module that reads it (self.name = the parameter), which is "
                        "then kept equal on both stages, or train without plan.stages"
                    )
                name = _name(leaf, self.reads())
                raise UserError(
                    f"the loss depends on {name or 'a tensor'} of shape {list(leaf.shape)}, which is not a parameter of the model: "
                    "its gradient would be neither summed nor divided; make it a parameter of the head or the encoder "
                    f"(self.{name or 'name'} = nn.Parameter(...)){'' if isinstance(leaf, nn.Parameter) else _DERIVATIVE}"
                )


def _name(tensor: Tensor, function: Any) -> str:
    """The name by which a function refers to a tensor; empty if it cannot be found."""
    namespaces: list[dict[str, Any]] = []
    if isinstance(function, nn.Module):
        namespaces.append(dict(function.named_parameters()))
    bound = getattr(function, "__self__", None)
    if bound is not None:
        namespaces.append(dict(bound.named_parameters()) if isinstance(bound, nn.Module) else dict(vars(bound)))
    if inspect.isroutine(function):
        try:
            seen = inspect.getclosurevars(inspect.unwrap(function))
        except (TypeError, ValueError):
            return ""
        namespaces += [dict(seen.nonlocals), dict(seen.globals)]
    return next((name for names in namespaces for name, value in names.items() if value is tensor), "")
