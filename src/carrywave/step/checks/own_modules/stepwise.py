"""Which modules are known to treat every step of every lane independently: our own, and many of torch's."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# torch modules that treat every step of every lane independently, whatever their arguments. LayerNorm is handled separately, because it may
# normalize over more than the last axis.
STEPWISE: frozenset[type[nn.Module]] = frozenset(
    {nn.Identity, nn.Linear, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU}
    | {nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid}
    | {nn.Embedding}
)


GLOBAL_HOOKS = [getattr(torch_module, f"_global{name}") for name in HOOKS]  # called for every module


METHODS = ("forward", "loss", "score", "start", "pool", "over_steps")  # that a step calls


def stepwise(module: nn.Module) -> bool:
    """True if this module and all its submodules are known to treat every step of every lane independently."""
    return not any(GLOBAL_HOOKS) and all(_stepwise(each) for each in module.modules())


def _stepwise(module: nn.Module) -> bool:
    kind = type(module)
    ours = kind.__module__.startswith("carrywave.")
    if (
        any(getattr(module, name) for name in HOOKS)
        or any(name in vars(module) or not _is_original(getattr(kind, name, None)) for name in METHODS)
        or any(p._backward_hooks for p in module._parameters.values() if p is not None)
    ):
        return False
    if isinstance(module, nn.LayerNorm) and kind is nn.LayerNorm:
        return len(module.normalized_shape) == 1
    return ours or kind in STEPWISE


def _is_original(method: object) -> bool:
    """True for what torch or we have written: someone may have put another in its place."""
    return method is None or str(getattr(method, "__globals__", {}).get("__name__")).startswith(("torch.", "carrywave."))
