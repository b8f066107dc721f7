"""Detects what running a module leaves behind in it, and restores the module.

A cache that is filled once, or a result kept for inspection, is not state: a second run on the same inputs leaves it unchanged. A counter,
a running mean or a growing list is state: it changes again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.step.checks.module_reads import places

_TORCHS = frozenset(vars(nn.Module())) - {"_buffers", "_parameters"} | {"_flat_weights"}
_CONTAINERS = (list, dict, set, deque, OrderedDict)
_DEPTH, _MOST = 4, 256  # how deep to descend into containers and objects, and how many members of each to compare
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Kept:
    """A copy of the current state of a module and its submodules, to be restored later."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = list(root.modules())
        self._attributes = [dict(vars(module)) for module in self._modules]
        self._contents = [
            [(value, _copied(value)) for value in attributes.values() if type(value) in _CONTAINERS] for attributes in self._attributes
        ]
        self._generators = [
            (value, value.get_state()) for each in self._attributes for value in each.values() if isinstance(value, torch.Generator)
        ]
        self._outside = [(place, place.read()) for place in places([root])]
        self._contents.append([(value, _copied(value)) for _, value in self._outside if type(value) in _CONTAINERS])
        self._copies: dict[int, Tensor] = {}
        self._dtype: torch.dtype | None = None

    def copy_tensors(self, dtype: torch.dtype) -> None:
        """Replace parameters and buffers by copies, floating-point ones in this dtype; tied tensors stay tied.

        Gradient hooks are not called meanwhile: those of parameters stay with the originals, and those of modules are removed.
        """
        self._dtype = dtype
        for module in self._modules:
            module._backward_hooks.clear()
            module._backward_pre_hooks.clear()
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    if tensor is not None:
                        store[name] = self._copy(tensor)  # type: ignore[assignment]
            if isinstance(module, nn.RNNBase):
                module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]

    def _copy(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._copies:
            data = tensor.detach().to(self._dtype_of(tensor), copy=True)
            made = nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
            self._copies[id(tensor)] = made
        return self._copies[id(tensor)]

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype

    def rewritten(self, paths: Mapping[str, nn.Module]) -> list[tuple[str, str]]:
        """Parameters and buffers whose values changed, as (module path, name). One that is new or has a new shape is a cache, not state."""
        found: list[tuple[str, str]] = []
        at = {id(module): number for number, module in enumerate(self._modules)}
        for path, module in paths.items():
            contents = {id(store): before for store, before in self._contents[at[id(module)]]}
            for store in (module._parameters, module._buffers):
                for name, old in contents.get(id(store), {}).items():
                    new = store.get(name)
                    if old is not None and new is not None and new.shape == old.shape and not _same(old.detach().to(new.dtype), new):
                        found.append((path, name))
        return found

    def put_back(self) -> None:
        """Restore the modules and generators to their original state."""
        for module, attributes in zip(self._modules, self._attributes, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
        for place, value in self._outside:
            if isinstance(value, _PLAIN):
                place.write(value)
        for value, before in [each for contents in self._contents for each in contents]:
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(before)
        for generator, state in self._generators:
            generator.set_state(state)


class Left:
    """A record of what modules hold, apart from torch's own attributes, and of the variables that their code reads, at one moment."""

    def __init__(self, paths: Mapping[str, nn.Module]) -> None:
        root = next(iter(paths))
        self._outside = [(root, place) for place in places([paths[root]])]
        self._values = self._now(paths)

    def _now(self, paths: Mapping[str, nn.Module]) -> dict[tuple[str, str], Any]:
        return _values(paths) | {(root, f"variable {place.name}"): _held(place.read()) for root, place in self._outside}

    def changed(self, paths: Mapping[str, nn.Module]) -> list[tuple[str, str]]:
        """What differs now, as (module path, attribute)."""
        now = self._now(paths)
        return [at for at in now if at not in self._values or not _same(self._values[at], now[at])]


def _values(paths: Mapping[str, nn.Module]) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for path, module in paths.items():
        if type(module).__module__.startswith("carrywave."):
            continue  # our own modules: what they remember does not affect their results
        for name, value in vars(module).items():
            if name in ("_buffers", "_parameters"):
                found |= {(path, inner): _held(tensor) for inner, tensor in value.items()}
            elif name not in _TORCHS:
                found[path, name] = _held(value)
    return found


def _held(value: Any, depth: int = _DEPTH) -> Any:
    """A copy of a value for later comparison; None if the value cannot be compared."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Generator):
        return value.get_state()
    if not depth or isinstance(value, (nn.Module, type)) or callable(value):
        return None
    if isinstance(value, Mapping):
        return {key: _held(inner, depth - 1) for key, inner in [*value.items()][-_MOST:]}, len(value)
    if isinstance(value, (list, tuple, deque)):
        return [_held(inner, depth - 1) for inner in [*value][-_MOST:]], len(value)
    if isinstance(value, (set, frozenset)):
        return len(value)
    return _held(dict(vars(value)), depth - 1) if hasattr(value, "__dict__") else None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.equal(one, other) or bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other or one != one)


def _copied(value: Any) -> Any:
    return value.copy()
