"""Notices that something has changed which decides what a user's modules compute: attributes, buffers, frozen parameters, hooks, modes,
`requires_grad`, and the globals and closures that their code reads. Parameters that are trained change at every step and are not looked at.

What is changed once, such as a switch, is always noticed. A number that changes at every step, such as a counter, is not worth a comparison
each time: after the first changes at its place only those count that double their number, unless its sign changes too.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from carrywave.step.checks.own_modules.module_reads import Place, is_foreign, own_classes, places

ALWAYS = 8  # changes of a value that all count
MOST_STATES = 64  # states of switches to remember
SMALL = 64  # elements of a tensor on the CPU whose values are looked at
_DEPTH, _MOST, _MOST_MARKS = 5, 64, 5000  # how deep to descend, how many members of a container to look at, and how many values in all
_TORCHS = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModuleChanges:
    """Compares modules, and functions that are used with them, with what they were when they were last tried."""

    def __init__(self, roots: Sequence[nn.Module], functions: Iterable[object] = ()) -> None:
        self._roots, self._functions = list(roots), list(functions)
        self._places: list[Place] = []
        self._states: set[Hashable] = set()  # of switches; they keep alive what they name, so that no identity is used again
        self._values: dict[str, Any] = {}
        self._counts: Counter[str] = Counter()
        self._due = False

    def due(self) -> bool:
        """True if there is a change that counts. It stays true until `settle`."""
        switches, values = self._now()
        for place in [place for place, value in values.items() if place not in self._values or self._values[place] != value]:
            self._counts[place] += 1
            self._due = self._due or self._counts[place] <= ALWAYS or is_power_of_2(self._counts[place])
        self._values = values
        return self._due or (switches not in self._states and len(self._states) < MOST_STATES)

    def settle(self) -> None:
        """Take the modules as they are now for tried."""
        self._places = places([*self._roots, *self._functions])
        switches, self._values = self._now()
        self._states.add(switches)
        self._due = False

    def _now(self) -> tuple[Hashable, dict[str, Any]]:
        marks = _Marks()
        for number, root in enumerate(self._roots):
            marks.note_module(root, str(number))
        for number, value in enumerate([*(place.read() for place in self._places), *self._functions]):
            marks.note(value, f"read {number}")
        return tuple(marks.switches.items()), marks.values


class _Marks:
    """Marks of everything that is looked at, by its place: of switches and signs, and of values."""

    def __init__(self) -> None:
        self.switches: dict[str, Hashable] = {}
        self.values: dict[str, Any] = {}
        self._seen: set[int] = set()
        self._count = 0

    def note_module(self, module: nn.Module, place: str) -> None:
        """Note a module and those in it."""
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        if isinstance(module, torch.jit.ScriptModule):
            self.switches[place] = module  # it cannot be tried either
            return
        self.switches[place] = module, type(module).forward, module.training
        for name, parameter in module._parameters.items():
            self.switches[f"{place}.{name}"] = None if parameter is None else parameter.requires_grad
            if parameter is not None and not parameter.requires_grad:
                self._note_tensor(parameter, f"{place}.{name}")
        own = {name: value for name, value in vars(module).items() if name not in _TORCHS}
        shared = {name: value for kind in own_classes(module) for name, value in vars(kind).items() if not name.startswith("__")}
        for name, value in (shared | own | module._buffers).items():
            self.note(value, f"{place}.{name}")
        for store in _HOOKS:
            for key, hook in getattr(module, store).items():
                self.note(hook, f"{place}.{store}.{key}")
        for name, inner in module._modules.items():
            if inner is not None:
                self.note_module(inner, f"{place}.{name}")

    def note(self, value: Any, place: str, depth: int = _DEPTH) -> None:
        """Note any value."""
        self._count += 1
        if self._count > _MOST_MARKS or not depth:
            return
        if isinstance(value, bool | str | bytes | None.__class__ | np.bool_):
            self.switches[place] = value
        elif isinstance(value, int | float | np.number):
            self.switches[place] = bool(value > 0) - bool(value < 0)
            self.values[place] = value if value == value else None  # NaN differs from itself
        elif isinstance(value, Tensor):
            self._note_tensor(value, place)
        elif isinstance(value, np.ndarray):
            self.values[place] = value.shape, value.dtype.hasobject or zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data)
        elif isinstance(value, nn.Module):
            self.note_module(value, place)
        elif isinstance(value, ModuleType | BuiltinFunctionType | property):
            pass
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            self._note_inside(value, place, depth - 1)

    def _note_inside(self, value: Any, place: str, depth: int) -> None:
        """Note what a function, a class, a container or an object holds."""
        inside: Mapping[Any, Any]
        if isinstance(value, FunctionType):
            self.switches[place] = value.__code__
            inside = dict(enumerate((*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *(value.__closure__ or ()))))
            inside = {key: Place("", cell).read() if hasattr(cell, "cell_contents") else cell for key, cell in inside.items()}
        elif isinstance(value, MethodType):
            inside = {"function": value.__func__, "self": value.__self__}
        elif isinstance(value, partial):
            inside = {"function": value.func, "arguments": value.args, **value.keywords}
        elif isinstance(value, type):
            self.switches[place] = value
            inside = {} if is_foreign(value.__module__) else {key: each for key, each in vars(value).items() if not key.startswith("__")}
        elif isinstance(value, Mapping):
            inside = value
        elif isinstance(value, list | set | frozenset | deque):
            inner = _Marks()  # what comes and goes in them is no switch
            inner._seen = self._seen
            for number, each in enumerate([*value][-_MOST:]):
                inner.note(each, str(number), depth)
            self.values[place] = len(value), inner.switches, inner.values
            return
        elif isinstance(value, tuple):
            inside = dict(enumerate(value))
        else:
            self.switches[place] = str(type(value))
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)]
            inside = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
        for key, each in [*inside.items()][:_MOST]:
            self.note(each, f"{place}.{str(key)[:40]}", depth)

    def _note_tensor(self, tensor: Tensor, place: str) -> None:
        """By value where that is cheap: `.data` changes it without a trace. Elsewhere by torch's counter of changes."""
        if tensor.requires_grad and tensor.is_leaf:
            return
        if tensor.device.type == "cpu" and tensor.numel() <= SMALL and tensor.layout == torch.strided:
            values = tuple(tensor.detach().reshape(-1).tolist())
            (self.switches if tensor.dtype == torch.bool else self.values)[place] = values
        else:
            self.values[place] = id(tensor), None if tensor.is_inference() else tensor._version


def is_power_of_2(number: int) -> bool:
    """True for 1, 2, 4, 8…"""
    return number > 0 and number & (number - 1) == 0
