"""Notices which attributes of a model a user's loop has set between two steps, so that workers can compare it: what only one of them sets
would be trained with by that one alone.

What steps and evaluations themselves leave behind in an attribute is the last piece's, on every worker another, and is not looked at; nor
is what no code of a step reads, such as a history of losses, nor parameters and saved buffers, which are compared as weights, objects of
libraries, such as a tracker that only one worker has, and parts that their owner vouches for.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import nn

from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.step.checks.own_modules.module_changes import marks_of
from carrywave.step.checks.own_modules.module_reads import attributes_read_by, is_library, is_unread
from carrywave.step.checks.own_modules.object_walk import PLAIN, TORCHS, Met, Path, own_classes, walk
from carrywave.step.checks.own_modules.parts import VOUCHED
from carrywave.step.checks.own_modules.stepwise import HOOKS

_MOST = 5000  # values to look at in all
_NOT_SET = TORCHS | {"training"}  # attributes of modules that are looked at as what they are, or not at all

Marks = dict[Path, list[Any]]  # by the path of the module, the name of its attribute, and the names in it


class BetweenSteps:
    """Compares the attributes of a model with what they were after the last step or evaluation."""

    def __init__(self, model: nn.Module) -> None:
        names = ("encoder", "lstm", "head") if isinstance(model, Model) else ("module",) if isinstance(model, OpaqueModel) else ()
        self._parts: dict[str, nn.Module] = {name: getattr(model, name) for name in names}
        self._functions = [model.given_loss] if isinstance(model, OpaqueModel) else []
        self._left: set[Path] = set()  # behind, by steps
        self._after = self._before = self._now()

    def changes(self, *, modes: bool) -> list[str]:
        """What has been set since the last step, with its value if that is a number. `modes`: and all that is in evaluation mode."""
        self._before = self._now()
        set_since = self._read(_differing(self._after, self._before).keys() - self._left)
        evaluating = [f"{path}.training False" for path, module in self._modules() if not module.training] if modes else []
        found = [*evaluating, *(f"{'.'.join(map(str, path))}{_worded(self._before.get(path, []))}" for path in set_since)]
        vouched = {path for path, part in self._parts.items() if getattr(part, VOUCHED, False) is True}
        return sorted(each for each in found if each.partition(".")[0] not in vouched)

    def settle(self) -> None:
        """A step or an evaluation that began at the last look has ended."""
        self._after = self._now()
        self._left |= _differing(self._before, self._after).keys()

    def _read(self, paths: set[Path]) -> set[Path]:
        """Those that a step may read."""
        read = attributes_read_by([*self._parts.values(), *self._functions]) if paths else None
        owners = dict(self._modules()) if paths else {}
        return {path for path in paths if not is_unread(owners.get(path[0]), path[1], read)}

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        return (each for path, part in self._parts.items() for each in part.named_modules(prefix=path))

    def _now(self) -> Marks:
        found: Marks = {}
        held: list[Met] = []  # what may hold something else
        for path, module in self._modules():
            for name, value in _attributes(module).items():
                if isinstance(value, PLAIN):  # nearly all, at every step
                    found[path, name] = [value]
                else:
                    held.append(Met((path, name), value))
        for met in islice(self._met(held), _MOST):
            found.setdefault(met.within or met.path, []).append(_mark(met.value))
        return found

    def _met(self, held: list[Met]) -> Iterator[Met]:
        libraries: set[Path] = set()
        for met in walk(held, foreign=False):
            if any(met.path[:end] in libraries for end in range(2, len(met.path))):
                continue
            if is_library(met.value):
                libraries.add(met.path)
            yield met


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What decides what a module computes, beside what it has registered."""
    of_classes = {
        name: value
        for kind in own_classes(type(module))
        for name, value in vars(kind).items()
        if isinstance(value, PLAIN) and not name.startswith("__")
    }
    own = vars(module)
    passing = {name: module._buffers.get(name) for name in module._non_persistent_buffers_set}
    return of_classes | passing | {store: len(own[store]) for store in HOOKS} | {name: own[name] for name in own.keys() - _NOT_SET}


def _mark(value: object) -> Any:
    return value if isinstance(value, PLAIN) and value == value else marks_of(value)


def _differing(first: Marks, second: Marks) -> dict[Path, None]:
    return {} if first == second else {name: None for name in {**first, **second} if first.get(name) != second.get(name)}


def _worded(marks: list[Any]) -> str:
    """The number that an attribute is; nothing about all else, in which workers may differ."""
    alone = marks[0] if len(marks) == 1 else None
    return f" {alone!r}" if isinstance(alone, bool | int | float) else ""
