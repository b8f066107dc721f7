"""What the code of a user's modules reads from outside of them: globals of its file, and variables of the functions around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

_FOREIGN = ("torch.", "carrywave.", "numpy.", "builtins")


class Place(NamedTuple):
    """Where a value lies that code reads: a name in the globals of a file, or a cell of a closure."""

    name: str
    holder: dict[str, Any] | CellType

    def read(self) -> Any:
        """The value now; None if there is none."""
        if isinstance(self.holder, dict):
            return self.holder.get(self.name)
        try:
            return self.holder.cell_contents
        except ValueError:
            return None  # not assigned yet

    def write(self, value: Any) -> None:
        """Assign the value."""
        if isinstance(self.holder, dict):
            self.holder[self.name] = value
        else:
            self.holder.cell_contents = value


def places(roots: Sequence[object]) -> list[Place]:
    """Those that the code of these modules and functions reads, and the functions that it calls. Modules, classes and functions are not
    values.
    """
    found: dict[tuple[int, str], Place] = {}
    seen: set[int] = set()
    waiting = [function for root in roots for function in _functions(root)]
    while waiting:
        function = waiting.pop()
        if id(function.__code__) in seen or is_foreign(function.__module__):
            continue
        seen.add(id(function.__code__))
        read = [Place(name, function.__globals__) for name in function.__code__.co_names if name in function.__globals__]
        read += [Place(name, cell) for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)]
        for place in read:
            value = place.read()
            if isinstance(value, FunctionType | MethodType):
                waiting += _functions(value)
            elif not isinstance(value, ModuleType | type | nn.Module) and not callable(value):
                found[id(place.holder), place.name] = place
    return list(found.values())


def _functions(root: object) -> Iterator[FunctionType]:
    """The code of a function, or of a module and its submodules: methods, and functions among their attributes and hooks."""
    if isinstance(root, MethodType):
        root = root.__func__
    if isinstance(root, FunctionType):
        yield root
    elif isinstance(root, nn.Module):
        for module in root.modules():
            hooks = [hook for store in (module._forward_hooks, module._forward_pre_hooks) for hook in store.values()]
            own = [*vars(module).values(), *hooks]
            methods = [value for kind in type(module).__mro__ if not is_foreign(kind.__module__) for value in vars(kind).values()]
            for value in (*own, *methods):
                if isinstance(value, FunctionType | MethodType):
                    yield from _functions(value)


def is_foreign(name: str | None) -> bool:
    """True for code that is not the user's."""
    return f"{name}.".startswith(_FOREIGN)
