"""Notices that something has changed which decides what a user's modules compute: attributes, buffers, hooks, modes, `requires_grad`, and
the globals and closures that their code reads. Parameters change at every step and are not looked at.

What is changed once, such as a switch, is always noticed. A number that changes at every step, such as a counter, is not worth a comparison
each time: after the first changes only every change that doubles their number counts, unless its sign changes too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from carrywave.step.checks.module_reads import Place, is_foreign, places

ALWAYS = 8  # changes of values that all count
MOST_STATES = 64  # states of switches to remember
_DEPTH, _MOST = 3, 64  # how deep to descend into containers and objects, and how many members of each to look at
_TORCHS = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (bool, int, float, str, bytes)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModuleChanges:
    """Compares modules, and functions that are used with them, with what they were when they were last tried."""

    def __init__(self, roots: Sequence[nn.Module], functions: Iterable[object] = ()) -> None:
        self._roots, self._functions = list(roots), list(functions)
        self._places: list[Place] = []
        self._states: set[Hashable] = set()  # of switches
        self._values: Hashable = None
        self._count = 0
        self._due = False

    def due(self) -> bool:
        """True if there is a change that counts. It stays true until `settle`."""
        switches, values = self._now()
        if values != self._values:
            self._values = values
            self._count += 1
            self._due = self._due or self._count <= ALWAYS or is_power_of_2(self._count)
        return self._due or (switches not in self._states and len(self._states) < MOST_STATES)

    def settle(self) -> None:
        """Take the modules as they are now for tried."""
        self._places = places([*self._roots, *self._functions])
        switches, self._values = self._now()
        self._states.add(switches)
        self._due = False

    def _now(self) -> tuple[Hashable, Hashable]:
        marks = _Marks()
        for module in [module for root in self._roots for module in root.modules()]:
            marks.note_module(module)
        for value in [*(place.read() for place in self._places), *self._functions]:
            marks.note(value)
        switches, values = tuple(marks.switches), tuple(marks.values)
        return switches, values if len(self._states) < MOST_STATES else (values, switches)


class _Marks:
    """Marks of everything that is looked at: of switches and signs, and of values."""

    def __init__(self) -> None:
        self.switches: list[Hashable] = []
        self.values: list[Hashable] = []

    def note_module(self, module: nn.Module) -> None:
        self.switches += [id(module), *(tuple(getattr(module, name)) for name in _HOOKS)]
        self.switches += [None if each is None else each.requires_grad for each in module._parameters.values()]
        kinds = [kind for kind in type(module).__mro__ if not is_foreign(kind.__module__)]
        plain = [value for kind in kinds for value in vars(kind).values() if isinstance(value, _PLAIN)]
        own = [value for name, value in vars(module).items() if name not in _TORCHS]
        for value in (*own, *plain, *module._buffers.values()):
            self.note(value)

    def note(self, value: Any, depth: int = _DEPTH, *, switches: bool = True) -> None:
        """`switches`: what is at a place of its own may be one. What is among others in a list is not."""
        to = self.switches if switches else self.values
        to.append(id(type(value)))
        if isinstance(value, bool | str | bytes):
            to.append(value)
        elif isinstance(value, int | float):
            to.append((value > 0) - (value < 0))
            self.values.append(value if value == value else None)  # NaN differs from itself
        elif isinstance(value, Tensor):
            self.values.append((id(value), None if value.is_inference() else value._version))
        elif isinstance(value, nn.Module | type | FunctionType | BuiltinFunctionType):
            to.append(id(value))
        elif isinstance(value, MethodType):
            to.append(id(value.__func__))
        elif depth and isinstance(value, Mapping):
            for each in [*value.values()][:_MOST]:
                self.note(each, depth - 1, switches=switches)
        elif depth and isinstance(value, list | tuple | set | frozenset | deque):
            self.values.append(len(value))
            for each in [*value][-_MOST:]:
                self.note(each, depth - 1, switches=False)
        elif depth and hasattr(value, "__dict__"):
            for each in [*vars(value).values()][:_MOST]:
                self.note(each, depth - 1, switches=switches)


def is_power_of_2(number: int) -> bool:
    """True for 1, 2, 4, 8…"""
    return number > 0 and number & (number - 1) == 0
