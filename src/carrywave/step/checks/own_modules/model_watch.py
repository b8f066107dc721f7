"""Notices that code which only one worker runs, such as a callback, has changed the model: the other workers would go on with another one.

On one device such a change has its effect; on several the answer would be neither that of one device nor anyone's. Weights are looked at by
torch's counter of changes, and everything else that decides what a module computes as `module_changes` does.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from carrywave.model.model import Model
from carrywave.model.modes import TrainingModes
from carrywave.model.opaque_model import OpaqueModel
from carrywave.step.checks.own_modules.module_changes import ModuleChanges
from carrywave.step.checks.own_modules.module_reads import attributes_read_by, is_unread
from carrywave.step.checks.own_modules.parts import VOUCHED


class ModelWatch:
    """Compares a model with what it was at the last look. Parts that their owner vouches for are looked at for their weights alone."""

    def __init__(self, model: Model | OpaqueModel, modes: TrainingModes) -> None:
        self._model, self._modes = model, modes
        parts = (
            {"module": model.module}
            if isinstance(model, OpaqueModel)
            else {name: getattr(model, name) for name in ("encoder", "lstm", "head")}
        )
        own = {name: part for name, part in parts.items() if getattr(part, VOUCHED, False) is not True}
        self._own: dict[str, nn.Module] = own
        self._names = list(own)
        self._functions = [model.given_loss] if isinstance(model, OpaqueModel) else []
        self._changes = ModuleChanges(list(own.values()), self._functions)
        self._before: dict[str, list[Any]] | None = None
        self._trains = True  # False: at the last look, the model was in evaluation mode, as it is after the run's last step

    def begin(self) -> None:
        """Take the model as it is now."""
        if self._before is None:
            self._changes.settle()
        self._before, self._trains = self._now(), self._modes.model.training

    def changed(self) -> str | None:
        """The name of something that has changed since `begin`; None if nothing has. `model.eval()` is undone, as before every step; so is
        `model.train()` if the model was in evaluation mode.
        """
        if self._trains:
            self._modes.resume()
        else:
            self._modes.model.eval()
        before, after = self._before or {}, self._now()
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        read = attributes_read_by([*self._own.values(), *self._functions]) if changed else None
        return next((name for name in changed if not self._unread(name, read)), None)

    def _now(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {name: [_version(weight)] for name, weight in self._model.named_parameters()}
        for path, value in self._changes.marks().items():
            found.setdefault(self._named(path), []).append(value)
        return found

    def _unread(self, name: str, read: set[str] | None) -> bool:
        """True for an attribute that no code of a step reads, such as a history."""
        first, *others = name.split(".")
        module: nn.Module | None = self._own.get(first)
        for each in others:
            if module is None or each not in module._modules:
                return module is not None and each in vars(module).keys() - vars(nn.Module()).keys() and is_unread(module, each, read)
            module = module._modules[each]
        return False

    def _named(self, path: tuple[Any, ...]) -> str:
        first, *others = path
        root = self._names[first] if first < len(self._names) else "a variable that its code reads"
        return ".".join(map(str, [root, *others]))


def _version(weight: nn.Parameter) -> tuple[int, int]:
    return id(weight), weight._version
