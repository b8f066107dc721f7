"""Finds what an encoder and a head share behind the back of the model, and would no longer share on different stages.

A module or a parameter that is an attribute of both is known to the model, and kept equal. What one of them reaches in another way, through
a list, an object, a closure or a bound method, has a copy on each worker, and what one changes there the other does not see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from carrywave.step.checks.own_modules.module_reads import Place, is_foreign, places
from carrywave.step.checks.own_modules.module_traces import held, same

_DEPTH = 5
_TORCHS = frozenset(vars(nn.Module()))


def hidden_references(encoder: nn.Module, head: nn.Module) -> Iterator[str]:
    """Yield an error for what the encoder reaches of the head, or the head of the encoder."""
    parts = {"encoder": encoder, "head": head}
    for path, other in (("head", "encoder"), ("encoder", "head")):
        registered = {id(each) for each in parts[path].modules()}
        members = {id(each): name or other for name, each in parts[other].named_modules(prefix=other) if id(each) not in registered}
        members |= {id(each): name for name, each in parts[other].named_buffers(prefix=other)}
        for each, _ in _reached(parts[path]):
            if each in members:
                yield (
                    f"{path} ({type(parts[path]).__name__}) reaches {members[each]} through a reference that is not a module's attribute, "
                    "but the two are on different stages, where it is a copy; pass what it needs through the layers, or remove plan.stages"
                )
                return


def shared_objects(encoder: nn.Module, head: nn.Module) -> list[Any]:
    """The containers, and objects of classes of the user's, that both reach."""
    of_encoder = dict(_reached(encoder))
    shared = [value for each, value in _reached(head) if each in of_encoder]
    return [each for each in shared if isinstance(each, dict | list | set | deque) or not is_foreign(type(each).__module__)]


def changed_by(act: Callable[[], object], objects: Sequence[Any]) -> str | None:
    """The class of an object that is changed by this act; None if none is."""
    before = [held(each) for each in objects]
    act()
    return next((type(each).__name__ for each, old in zip(objects, before, strict=True) if not same(old, held(each))), None)


def _reached(root: nn.Module) -> Iterator[tuple[int, Any]]:
    """What a module reaches other than by its registered parameters, buffers and modules."""
    waiting: deque[tuple[Any, int]] = deque()
    for module in root.modules():
        waiting += [(value, _DEPTH) for name, value in vars(module).items() if name not in _TORCHS]
    waiting += [(place.read(), _DEPTH) for place in places([root])]
    seen: set[int] = set()
    while waiting:
        value, depth = waiting.popleft()
        if id(value) in seen or isinstance(value, bool | int | float | complex | str | bytes | None.__class__ | type | ModuleType):
            continue
        seen.add(id(value))
        yield id(value), value
        if not depth or isinstance(value, nn.Module | Tensor):
            continue
        inner: list[Any] = []
        if isinstance(value, Mapping):
            inner = list(value.values())
        elif isinstance(value, list | tuple | set | frozenset | deque):
            inner = list(value)
        elif isinstance(value, MethodType):
            inner = [value.__self__]
        elif isinstance(value, FunctionType):
            inner = [Place("", cell).read() for cell in value.__closure__ or ()]
        elif not is_foreign(type(value).__module__):
            inner = list(getattr(value, "__dict__", {}).values())
        waiting += [(each, depth - 1) for each in inner[:256]]
