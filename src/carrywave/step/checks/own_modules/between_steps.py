"""Notices which attributes of a model a user's loop has set between two steps, so that workers can compare it: what only one of them sets
would be trained with by that one alone.

What steps and evaluations themselves leave behind in an attribute is the last piece's, on every worker another, and is not looked at; nor
is what no code of a step reads, such as a history of losses, nor parameters and saved buffers, which are compared as weights, objects of
libraries, such as a tracker that only one worker has, and parts that their owner vouches for. A dict that steps add to is a cache: entries
that come and go in it are not looked at either. Of what steps read elsewhere, numbers and settings are looked at: variables outside of the
model, attributes of its classes, and those of a loss.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from itertools import islice
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.step.checks.own_modules.module_changes import marks_of
from carrywave.step.checks.own_modules.module_reads import attributes_read_by, is_library, is_unread, variables_read_by
from carrywave.step.checks.own_modules.object_walk import GROUPS, PLAIN, TORCHS, Met, Path, is_users, own_classes, walk
from carrywave.step.checks.own_modules.parts import VOUCHED
from carrywave.step.checks.own_modules.stepwise import HOOKS
from carrywave.step.checks.own_modules.unregistered_values import bytes_of

_MOST = 5000  # values to look at in all
_VARIABLE = "the variable"
_SETTINGS = (*PLAIN, Mapping, ContextVar, FunctionType, *GROUPS)  # variables that are looked at
_NOT_SET = TORCHS | {"training"}  # attributes of modules that are looked at as what they are, or not at all
_MEMBERS = (property, staticmethod, classmethod, type)  # of classes

# What steps leave behind in a module, by the names from there: those of one trainer are those of others that train it, too.
_LEFT: WeakKeyDictionary[nn.Module, set[Path]] = WeakKeyDictionary()

Marks = dict[Path, list[Any]]  # by the path of the module, the name of its attribute, and the names in it


class BetweenSteps:
    """Compares the attributes of a model with what they were after the last step or evaluation."""

    def __init__(self, model: nn.Module) -> None:
        names = ("encoder", "lstm", "head") if isinstance(model, Model) else ("module",) if isinstance(model, OpaqueModel) else ()
        self._parts: dict[str, nn.Module] = {name: getattr(model, name) for name in names}
        self._functions = [model.given_loss] if isinstance(model, OpaqueModel) else []
        self._variables = variables_read_by([*self._parts.values(), *self._functions])
        outside: list[tuple[str, str, object]] = [(_VARIABLE, each.name, each.read()) for each in self._variables]
        outside += [("loss", "", each) for each in self._functions]
        for place, name, value in outside:
            if isinstance(value, nn.Module) and not isinstance(value, Model):
                self._parts[f"{place} {name}".strip()] = value
        self._left: set[Path] = set()  # behind, by steps, in no module
        self._grown: set[Path] = set()  # what steps have added to
        self._after = self._before = self._marks(*self._look())

    def changes(self, *, modes: bool) -> list[str]:
        """What has been set since the last step, with its value if that is a number. `modes`: and all that is in evaluation mode."""
        plain, held = self._look()
        self._before = self._marks(plain, held)
        differing = _differing(self._after, self._before)
        left = self._left_behind() if differing else set()
        set_since = self._read({path for path in differing if path not in left and not self._cached(path)}, held)
        evaluating = [f"{path}.training False" for path, module in self._modules() if not module.training] if modes else []
        values = self._values(set_since, held)
        found = [*evaluating, *(f"{_named(path)}{_worded(self._before.get(path, []), values.get(path))}" for path in set_since)]
        vouched = {path for path, part in self._parts.items() if getattr(part, VOUCHED, False) is True}
        return sorted(each for each in found if each.partition(".")[0] not in vouched)

    def settle(self) -> None:
        """A step or an evaluation that began at the last look has ended."""
        self._after = self._marks(*self._look())
        left = _differing(self._before, self._after).keys()
        owners = dict(self._modules()) if left else {}
        for path in left:
            if path[0] in owners:
                _LEFT.setdefault(owners[path[0]], set()).add(path[1:])
            else:
                self._left.add(path)
        self._grown |= {path[:-1] for path in left if len(path) > 2 and path not in self._before}

    def _left_behind(self) -> set[Path]:
        """What steps have ever left behind."""
        return self._left | {(path, *names) for path, module in self._modules() for names in _LEFT.get(module, ())}

    def _cached(self, path: Path) -> bool:
        """True for an entry that has come or gone where steps add some."""
        return path[:-1] in self._grown and (path in self._before) != (path in self._after)

    def _read(self, paths: set[Path], held: list[Met]) -> set[Path]:
        """Those that a step may read."""
        read = attributes_read_by([*self._parts.values(), *self._functions]) if paths else None
        owners = dict(self._modules()) if paths else {}
        values = {met.path: met.value for met in held} if paths else {}
        return {
            path
            for path in paths
            if not is_unread(owners.get(path[0]), path[1], read) and not _is_unread_inside(values.get(path[:2]), path, read)
        }

    def _values(self, paths: set[Path], held: list[Met]) -> dict[Path, int]:
        """Checksums of the numbers in these, other than single ones: both workers may have set them, but not to the same."""
        found: dict[Path, int] = {}
        for met in self._met(held) if paths else ():
            path = met.within or met.path
            data = bytes_of(met) if path in paths else None
            if data is not None:
                found[path] = zlib.crc32(data, found.get(path, 0))
        return found

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        met: set[nn.Module] = set()
        return (each for path, part in self._parts.items() for each in part.named_modules(met, prefix=path))

    def _look(self) -> tuple[Marks, list[Met]]:
        """What is looked at: plain values, and what may hold something else."""
        found: Marks = {}
        held: list[Met] = []
        given = [((path, name), value) for path, module in self._modules() for name, value in _attributes(module).items()]
        given += [((_VARIABLE, each.name), value) for each in self._variables if isinstance(value := each.read(), _SETTINGS)]
        for each in self._functions:  # an object's or a function's own; those of a method are its object's affair
            own = {} if isinstance(each, nn.Module) else getattr(each, "__dict__", {})
            given += [(("loss", name), value) for name, value in own.items() if isinstance(value, PLAIN)]
        for path, value in given:
            value = value.__code__ if path[0] == _VARIABLE and isinstance(value, FunctionType) else value
            if isinstance(value, (*PLAIN, CodeType)):  # nearly all, at every step
                found[path] = [value]
            else:
                held.append(Met(path, value))
        return found, held

    def _marks(self, plain: Marks, held: list[Met]) -> Marks:
        found = dict(plain)
        for met in islice(self._met(held), _MOST):
            found.setdefault(met.within or met.path, []).append(_mark(met.value))
        return found

    def _met(self, held: list[Met]) -> Iterator[Met]:
        libraries: set[Path] = set()
        for met in walk(held, foreign=False):
            if libraries and any(met.path[:end] in libraries for end in range(2, len(met.path))):
                continue
            if not isinstance(met.value, PLAIN) and is_library(met.value):
                libraries.add(met.path)
            yield met


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What decides what a module computes, beside what it has registered."""
    of_classes = {
        name: value.__code__ if isinstance(value, FunctionType) else value
        for kind in reversed(own_classes(type(module)))  # an attribute of a class hides that of its base
        for name, value in vars(kind).items()
        if not name.startswith("__") and not isinstance(value, _MEMBERS)
    }
    own = vars(module)
    passing = {name: module._buffers.get(name) for name in module._non_persistent_buffers_set}
    return of_classes | passing | {store: len(own[store]) for store in HOOKS} | {name: own[name] for name in own.keys() - _NOT_SET}


def _mark(value: object) -> Any:
    return value if isinstance(value, PLAIN) and value == value else marks_of(value)


def _differing(first: Marks, second: Marks) -> dict[Path, None]:
    return {} if first == second else {name: None for name in {**first, **second} if first.get(name) != second.get(name)}


def _named(path: Path) -> str:
    words = ["…" if isinstance(name, int) and name > _MOST else str(name) for name in path]  # what a worker's id() gave
    return ".".join([" ".join(words[:2]), *words[2:]] if path[0] == _VARIABLE else words)


def _is_unread_inside(value: object, path: Path, read: set[str] | None) -> bool:
    """True for an attribute of an object in this value, or an entry of a variable, that no code of a step reads by its name: other code
    keeps its own there.
    """
    if read is None or not isinstance(path[-1], str):
        return False
    for name in path[2:]:
        if isinstance(value, Mapping) and (path[0] != _VARIABLE or name in read):
            value = value.get(name)
        elif isinstance(value, Mapping) or (is_users(value) and not isinstance(value, type) and name not in {*read, "__class__"}):
            return isinstance(name, str)
        else:
            value = getattr(value, str(name), None) if is_users(value) else None
    return False


def _worded(marks: list[Any], checksum: int | None) -> str:
    """The number that an attribute is, or a checksum of its numbers; nothing about all else, in which workers may differ."""
    alone = marks[0] if len(marks) == 1 else None
    if isinstance(alone, bool | int | float):
        return f" {alone!r}"
    return "" if checksum is None else f" (checksum {checksum:08x})"
