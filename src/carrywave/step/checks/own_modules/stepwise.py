"""Which modules are known to treat every step of every lane independently: our own, and many of torch's."""

from __future__ import annotations

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# torch modules that treat every step of every lane independently, whatever their arguments. LayerNorm is handled separately, because it may
# normalize over more than the last axis.
STEPWISE: frozenset[type[nn.Module]] = frozenset(
    {nn.Identity, nn.Linear, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU}
    | {nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid}
    | {nn.Embedding}
)


def stepwise(module: nn.Module) -> bool:
    """True if this module and all its submodules are known to treat every step of every lane independently."""
    return all(_stepwise(each) for each in module.modules())


def _stepwise(module: nn.Module) -> bool:
    kind = type(module)
    ours = kind.__module__.startswith("carrywave.")
    if (
        any(getattr(module, name) for name in HOOKS)
        or "forward" in vars(module)
        or any(p._backward_hooks for p in module._parameters.values() if p is not None)
    ):
        return False
    if isinstance(module, nn.LayerNorm) and kind is nn.LayerNorm:
        return len(module.normalized_shape) == 1
    return ours or kind in STEPWISE
