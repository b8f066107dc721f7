"""Notices that something has changed which decides what a user's modules compute: attributes, buffers, frozen parameters, hooks, modes,
`requires_grad`, and the globals and closures that their code reads. Parameters that are trained change at every step and are not looked at.

What is changed once, such as a switch, is always noticed. A number that changes at every step, such as a counter, is not worth a comparison
each time: after its first changes only those count that double their number, unless its sign changes too.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from carrywave.step.checks.own_modules.module_reads import Variable, variables_read_by
from carrywave.step.checks.own_modules.object_walk import PLAIN, TORCHS, Met, Path, own_classes, walk
from carrywave.step.checks.own_modules.stepwise import GLOBAL_HOOKS, HOOKS

ALWAYS = 8  # changes of a value that all count
MOST_STATES = 64  # states of switches to remember
SMALL = 64  # elements of a tensor on the CPU whose values are looked at
_MOST_MARKS = 5000  # values to look at in all


class ModuleChanges:
    """Compares modules, and functions that are used with them, with what they were when they were last tried."""

    def __init__(self, roots: Sequence[nn.Module], functions: Iterable[object] = ()) -> None:
        self._roots, self._functions = list(roots), list(functions)
        self._variables: list[Variable] = []
        self._states: set[Hashable] = set()  # of switches; they keep alive what they name, so that no identity is used again
        self._values: dict[Path, Any] = {}
        self._counts: Counter[Path] = Counter()
        self._due = False

    def due(self) -> bool:
        """True if there is a change that counts. It stays true until `settle`."""
        switches, values = self._now()
        for path in [path for path, value in values.items() if path not in self._values or self._values[path] != value]:
            self._counts[path] += 1
            self._due = self._due or self._counts[path] <= ALWAYS or is_power_of_2(self._counts[path])
        self._values = values
        return self._due or (switches not in self._states and len(self._states) < MOST_STATES)

    def settle(self) -> None:
        """Take the modules as they are now for tried."""
        self._variables = variables_read_by([*self._roots, *self._functions])
        switches, self._values = self._now()
        self._states.add(switches)
        self._due = False

    def marks(self) -> dict[Path, Any]:
        """Everything that is looked at, as it is now, by its path; the first of a path is the number of its root."""
        found, values = self._now()
        switches = dict(found)
        return {path: (switches.get(path), values.get(path)) for path in {**switches, **values}}

    def _now(self) -> tuple[tuple[tuple[Path, Hashable], ...], dict[Path, Any]]:
        marks = _Marks()
        values = [*self._roots, *(variable.read() for variable in self._variables), *self._functions, *GLOBAL_HOOKS]
        marks.note(Met((number,), value) for number, value in enumerate(values))
        return tuple(marks.switches.items()), marks.values


class _Marks:
    """Marks of everything that is looked at, by its path: of switches and signs, and of values."""

    def __init__(self) -> None:
        self.switches: dict[Path, Hashable] = {}
        self.values: dict[Path, Any] = {}
        self._seen: dict[int, Any] = {}
        self._count = 0

    def note(self, roots: Iterable[Met]) -> None:
        """Note values and all that they hold."""
        for met in walk(roots, seen=self._seen):
            self._count += 1
            if self._count > _MOST_MARKS:
                return
            self._mark(met, *marks_of(met.value))
            if isinstance(met.value, nn.Module) and not isinstance(met.value, torch.jit.ScriptModule):  # which cannot be tried either
                self._note_module(met, met.value)

    def _note_module(self, met: Met, module: nn.Module) -> None:
        """Note what a module holds, and the modules in it."""
        for name, parameter in module._parameters.items():
            trained, value = (None, None) if parameter is None else (parameter.requires_grad, _marks_of_tensor(parameter))
            self._mark(Met((*met.path, name), parameter, met.within), trained, value)
        held = {name: value for kind in own_classes(type(module)) for name, value in vars(kind).items() if not name.startswith("__")}
        held |= {name: value for name, value in vars(module).items() if name not in TORCHS} | module._buffers
        held |= {name: each for name, each in module._modules.items() if each is not None}
        hooks = [(store, key, hook) for store in HOOKS for key, hook in getattr(module, store).items()]
        self.note(Met((*met.path, *names), value, met.within) for *names, value in [*held.items(), *hooks])

    def _mark(self, met: Met, switch: Hashable, value: Any) -> None:
        if met.within is None:
            self.switches[met.path], self.values[met.path] = switch, value
        else:  # what comes and goes is no switch
            self.values.setdefault(met.within, {})[met.path] = switch, value


def marks_of(value: Any) -> tuple[Hashable, Any]:
    """What tells whether something was switched, and whether a value has changed, without what it holds."""
    if isinstance(value, bool | str | bytes | None.__class__ | np.bool_ | type):
        return value, None
    if isinstance(value, int | float | np.integer | np.floating):
        return bool(value > 0) - bool(value < 0), value if value == value else None  # NaN differs from itself
    if isinstance(value, Tensor):
        return _marks_of_tensor(value)
    if isinstance(value, np.ndarray):
        return None, (value.shape, value.dtype.hasobject or zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data))
    if isinstance(value, nn.Module):
        return (value, getattr(type(value), "forward", None)), None
    if isinstance(value, FunctionType):
        return value.__code__, None
    if isinstance(value, list | set | frozenset | deque):
        return None, len(value)
    return (None, str(value)) if isinstance(value, PLAIN) else (str(type(value)), None)


def _marks_of_tensor(tensor: Tensor) -> tuple[Hashable, Any]:
    """By value where that is cheap: `.data` changes it without a trace. Elsewhere by torch's counter of changes."""
    if tensor.requires_grad and tensor.is_leaf:
        return None, None
    if tensor.device.type == "cpu" and tensor.numel() <= SMALL and tensor.layout == torch.strided:
        values = tuple(tensor.detach().reshape(-1).tolist())
        return (values, None) if tensor.dtype == torch.bool else (None, values)
    return None, (id(tensor), None if tensor.is_inference() else tensor._version)


def is_power_of_2(number: int) -> bool:
    """True for 1, 2, 4, 8…"""
    return number > 0 and number & (number - 1) == 0
