"""What a recording of a step has built in, besides the tensors that it reads: numbers and switches in modules and in an optimizer's groups.

A replay runs no Python. So a module that anneals a number, or whose author changes one, would be replayed as it was. In modules of ours and
of torch everything that decides what runs is an attribute, and is looked at before every replay. Elsewhere it may be anything, a global or
a file, and forward hooks are code too: steps with such modules or hooks are not recorded unless the user says so.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from carrywave.model.opaque_model import Whole

MOST = 256  # states that are remembered by number
_PLAIN = (bool, int, float, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TORCHS = frozenset(vars(nn.Module())) - {"training"}


def ours(model: nn.Module) -> bool:
    """Whether all that runs in a model is code of ours or of torch. A model of one piece has a loss of the user's own."""
    return not isinstance(model, Whole) and all(_ours(module) for module in model.modules())


def _ours(module: nn.Module) -> bool:
    known = type(module).__module__.startswith(("carrywave.", "torch.nn."))
    return known and "forward" not in vars(module) and not any(getattr(module, name) for name in _HOOKS)


class Watch:
    """Says whether anything has changed, in some microseconds. `strict`: user code of any kind is not to be recorded.

    Which parameters are trained is not looked at: who trains them follows that, and begins anew.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None, *, strict: bool = True) -> None:
        self._model, self._optimizer, self._strict = model, optimizer, strict
        # With what they were found in, so that no other object gets the place of one of them.
        self._known: dict[tuple[object, ...], tuple[int, list[Any]]] = {}
        self._next = 0
        self._look()

    def version(self) -> int | None:
        """The number of what is there now: the same if it is changed back. None: it is not to be recorded."""
        # By identity, because an attribute that nobody has set anew is the same object, and comparing could ask a tensor.
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
        own: list[dict[str, Any]] = [vars(module) for module in modules]
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        stores: list[dict[str, Any]] = [store for module in modules for store in (module._parameters, module._buffers)]
        self._places = [(each, name) for each in own for name, value in each.items() if name not in _TORCHS and _plain(value)]
        self._places += [(group, name) for group in groups for name in group if name != "params"]
        self._places += [(store, name) for store in stores for name in store]
        self._values = [each.get(name) for each, name in self._places]
        self._sizes = [*own, *(getattr(module, name) for module in modules for name in (*_HOOKS, "_modules"))]
        self._lengths = [len(each) for each in self._sizes]
        self._tensors: list[Tensor] = [tensor for store in stores for tensor in store.values() if tensor is not None]
        self._addresses = [each.data_ptr() for each in self._tensors]
        found = (*map(_hashable, self._values), *self._lengths, *self._addresses)
        if len(self._known) > MOST:
            self._known.clear()
        self._next += 1
        number, _ = self._known.setdefault(found, (self._next, self._values))
        self._version = None if self._strict and not ours(self._model) else number


def _plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_plain, value)))


def _hashable(value: object) -> object:
    """A number and its type, so that 1 is not True; of anything else which object it is."""
    return (type(value), value) if _plain(value) else id(value)
