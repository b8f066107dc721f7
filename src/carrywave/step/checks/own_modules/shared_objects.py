"""Finds what an encoder and a head share behind the back of the model, and would no longer share on different stages.

A module or a parameter that is an attribute of both is known to the model, and kept equal. What one of them reaches in another way, through
a list, an object, a closure or a bound method, has a copy on each worker, and what one changes there the other does not see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from carrywave.step.checks.own_modules.module_reads import variables_read_by
from carrywave.step.checks.own_modules.module_traces import held, same
from carrywave.step.checks.own_modules.object_walk import PLAIN, TORCHS, Met, is_users, walk
from carrywave.step.checks.own_modules.stepwise import stepwise


def hidden_references(encoder: nn.Module, head: nn.Module) -> Iterator[str]:
    """Yield an error for what the encoder reaches of the head, or the head of the encoder."""
    parts = {"encoder": encoder, "head": head}
    for path, other in (("head", "encoder"), ("encoder", "head")):
        registered = {id(each) for each in parts[path].modules()}
        members = {id(each): name or other for name, each in parts[other].named_modules(prefix=other) if id(each) not in registered}
        members |= {id(each): name for name, each in parts[other].named_buffers(prefix=other)}
        for each in _reached(parts[path]):
            if each in members:
                yield (
                    f"{path} ({type(parts[path]).__name__}) reaches {members[each]} through a reference that is not a module's attribute, "
                    "but the two are on different stages, where it is a copy; pass what it needs through the layers, or remove plan.stages"
                )
                return


def shared_objects(encoder: nn.Module, head: nn.Module) -> list[Any]:
    """The containers, and objects of classes of the user's, that both reach. The code of known modules reads none."""
    if stepwise(encoder) or stepwise(head):
        return []
    of_encoder = _reached(encoder)
    shared = [value for each, value in _reached(head).items() if each in of_encoder]
    return [each for each in shared if isinstance(each, dict | list | set | deque) or is_users(each)]


def changed_by(act: Callable[[], object], objects: Sequence[Any]) -> str | None:
    """The class of an object that is changed by this act; None if none is."""
    before = [held(each) for each in objects]
    act()
    return next((type(each).__name__ for each, old in zip(objects, before, strict=True) if not same(old, held(each))), None)


def _reached(root: nn.Module) -> dict[int, Any]:
    """What a module reaches other than by its registered parameters, buffers and modules."""
    roots = [value for module in root.modules() for name, value in vars(module).items() if name not in TORCHS]
    roots += [variable.read() for variable in variables_read_by([root])]
    return {
        id(met.value): met.value for met in walk((Met((), value) for value in roots), foreign=False) if not isinstance(met.value, PLAIN)
    }
