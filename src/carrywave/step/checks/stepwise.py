"""Which modules need no trial: ours, many of torch's, and those whose owner promises that no step and no lane depends on another."""

from __future__ import annotations

from torch import nn

from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel

SPLITTABLE = "splittable"  # an attribute that a user sets on an encoder, layers, a head, a module in one piece or a hook: a promise
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
METHODS = ("forward", "loss", "score", "start", "pool", "over_steps")  # that a step calls
# torch modules that treat every step of every lane independently, whatever their arguments. LayerNorm is handled separately, because it may
# normalize over more than the last axis.
STEPWISE: frozenset[type[nn.Module]] = frozenset(
    {nn.Identity, nn.Linear, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU}
    | {nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid}
)


def own_modules(model: Model | OpaqueModel) -> list[str]:
    """The parts of a model that are a user's own and come without a promise, as messages name them. The loss of an `OpaqueModel` may be any
    function, so it is always one.
    """
    if isinstance(model, OpaqueModel):
        parts: dict[str, nn.Module] = {"module": model.module}
    else:
        given = {"encoder": model.encoder, "lstm": model.lstm, "head": model.head}
        own_cell = not model.lstm.cell.step.__module__.startswith("carrywave.")
        parts = {name: part for name, part in given.items() if not stepwise(part) or (own_cell and name == "lstm")}
    return [f"{name} ({type(part).__name__})" for name, part in parts.items() if getattr(part, SPLITTABLE, False) is not True]


def stepwise(module: nn.Module) -> bool:
    """True if this module and all its submodules are known to treat every step of every lane independently."""
    return all(_stepwise(each) for each in module.modules())


def _stepwise(module: nn.Module) -> bool:
    kind = type(module)
    if (
        any(getattr(module, name) for name in HOOKS)
        or any(name in vars(module) for name in METHODS)
        or any(p._backward_hooks for p in module._parameters.values() if p is not None)
    ):
        return False
    if isinstance(module, nn.LayerNorm) and kind is nn.LayerNorm:
        return len(module.normalized_shape) == 1
    if isinstance(module, nn.Embedding) and kind is nn.Embedding:  # by default, it changes and counts no rows
        return module.max_norm is None and not module.scale_grad_by_freq
    return kind in STEPWISE or kind.__module__.startswith("carrywave.")
