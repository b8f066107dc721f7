"""Detects changes to the values baked into a captured step: plain attributes of modules, and settings of optimizer groups.

A replay runs no Python, so if a module anneals a number, or its author changes one, a replay would still use the old value. In our modules
and torch's, everything that decides what runs is an attribute, and is checked before every replay. In other modules it may be anything,
such as a global or a file, and forward hooks are code too: steps with such modules or hooks are not captured unless the user asks for it.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from carrywave.model.opaque_model import OpaqueModel

MOST = 256  # numbered states to remember
_TORCHS = frozenset(vars(nn.Module())) - {"training"} | {"_flat_weights"}  # attributes of modules that are torch's own affair
_PLAIN = (bool, int, float, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def ours(model: nn.Module) -> bool:
    """True if a model runs only our code or torch's. A `OpaqueModel` model has a user-defined loss, so it never qualifies."""
    return not isinstance(model, OpaqueModel) and all(_ours(module) for module in model.modules())


def _ours(module: nn.Module) -> bool:
    standard = type(module).__module__.startswith(("carrywave.", "torch.nn."))
    return standard and "forward" not in vars(module) and not any(getattr(module, name) for name in _HOOKS)


class Watch:
    """Detects in microseconds whether anything has changed. With `strict`, no user code of any kind may be captured.

    `requires_grad` is not watched: the trainer tracks it, and discards its captured graphs when it changes.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None, *, strict: bool = True) -> None:
        self._model, self._optimizer, self._strict = model, optimizer, strict
        # The values are stored too: keeping them alive prevents their ids from being reused.
        self._versions: dict[tuple[object, ...], tuple[int, list[Any]]] = {}
        self._next = 0
        self._look()

    def version(self) -> int | None:
        """A number for the current state, the same again if a change is reverted; None if the step must not be captured."""
        # Compare by identity: an attribute that nobody reassigned is still the same object, and comparing tensors by value could read the
        # device.
        if (
            all(map(operator.is_, [each.get(name) for each, name in self._places], self._values))
            and [len(each) for each in self._sizes] == self._lengths
            and [each.data_ptr() for each in self._tensors] == self._addresses
        ):
            return self._version
        self._look()
        return self._version

    def _look(self) -> None:
        modules = list(self._model.modules())
        attributes: list[dict[str, Any]] = [vars(module) for module in modules]
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        stores: list[dict[str, Any]] = [store for module in modules for store in (module._parameters, module._buffers)]
        self._places = [(each, name) for each in attributes for name, value in each.items() if name not in _TORCHS and _plain(value)]
        self._places += [(group, name) for group in groups for name in group if name != "params"]
        self._places += [(store, name) for store in stores for name in store]
        self._values = [each.get(name) for each, name in self._places]
        self._sizes = [*attributes, *(getattr(module, name) for module in modules for name in (*_HOOKS, "_modules"))]
        self._lengths = [len(each) for each in self._sizes]
        self._tensors: list[Tensor] = [tensor for store in stores for tensor in store.values() if tensor is not None]
        self._addresses = [each.data_ptr() for each in self._tensors]
        fingerprint = (*map(_hashable, self._values), *self._lengths, *self._addresses)
        if len(self._versions) > MOST:
            self._versions.clear()
        self._next += 1
        number, _ = self._versions.setdefault(fingerprint, (self._next, self._values))
        self._version = None if self._strict and not ours(self._model) else number


def _plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_plain, value)))


def _hashable(value: object) -> object:
    """The value with its type, so that 1 differs from True; for anything that is not plain, its identity."""
    return (type(value), value) if _plain(value) else id(value)
