"""Finds what the encoder, the layers and the head share behind the back of the model, and would no longer share on different stages.

A module or a parameter that is an attribute of both is known to the model, and its weights are kept equal. What one of them reaches in
another way, through a list, an object, a closure or a bound method, is empty on other workers or a copy. What one changes there, or in
other attributes of a module that both have, such as a result kept for a skip connection, the other does not see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.step.checks.own_modules.module_reads import reached_by
from carrywave.step.checks.own_modules.module_traces import held, same
from carrywave.step.checks.own_modules.object_walk import PLAIN, TORCHS, Path, is_users
from carrywave.step.checks.own_modules.stepwise import stepwise


def hidden_reference(parts: Mapping[str, nn.Module]) -> str | None:
    """An error for what one part of a model, such as the head, reaches of another, by their paths; None if there is nothing."""
    for path, part in parts.items():
        registered = {id(each) for _, each in _members(path, part)}
        others = {id(each): name for other in parts.keys() - {path} for name, each in _members(other, parts[other])}
        reached = [each for value in _reached(part).values() for each in (value.modules() if isinstance(value, nn.Module) else [value])]
        name = next((others[id(each)] for each in reached if id(each) in others and id(each) not in registered), None)
        if name is not None:
            return (
                f"{path} ({type(part).__name__}) reaches {name} through a reference that is not a module's attribute, but on different "
                "stages one has only an empty or an old copy of the other; make it an attribute of the module that reads it, if that needs "
                "its weights and no results, or remove plan.stages"
            )
    return None


def shared_memory(parts: Mapping[str, nn.Module]) -> str | None:
    """An error for two tensors of a model that are different objects in the same memory, on parts that stages would separate: what one
    learns, the other has too, as long as they are in one process. None if there are none.
    """
    found: list[tuple[int, int, str, str, Tensor]] = []  # begin and end in memory, part and name
    for path, part in parts.items():
        reached = [(f"{path} ({type(part).__name__})", each) for each in _reached(part).values()]
        for name, each in [*_members(path, part), *reached]:
            if isinstance(each, Tensor) and each.numel() and not each.is_meta and each.layout == torch.strided:
                last = sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
                found.append((each.data_ptr(), each.data_ptr() + (last + 1) * each.element_size(), path, name, each))
    found.sort(key=lambda each: each[:4])
    for number, (_, end, path, name, tensor) in enumerate(found):
        for begin, _, other, its_name, each in found[number + 1 :]:
            if begin >= end:
                break
            if each is not tensor and (other != path or path == "lstm") and name != its_name:
                return (
                    f"{name} and {its_name} are two tensors in the same memory, but on different stages a change of one would not reach "
                    "the other; make them one parameter (head.weight = encoder.weight, not .data), or remove plan.stages"
                )
    return None


def _members(path: str, part: nn.Module) -> list[tuple[str, object]]:
    return [*part.named_modules(prefix=path), *part.named_parameters(prefix=path), *part.named_buffers(prefix=path)]


def shared_objects(encoder: nn.Module, head: nn.Module) -> list[Any]:
    """The modules of both, and the containers and objects of the user's classes that both reach. The code of known modules reads none."""
    if stepwise(encoder) or stepwise(head):
        return []
    of_encoder, of_both = _reached(encoder), set(encoder.modules()) & set(head.modules())
    shared = [value for each, value in _reached(head).items() if each in of_encoder]
    objects = [each for each in shared if not isinstance(each, nn.Module)]
    return [*of_both, *(each for each in objects if isinstance(each, dict | list | set | deque | FunctionType) or is_users(each))]


def changed_by(act: Callable[[], object], objects: Sequence[Any]) -> str | None:
    """The class of an object that is changed by this act; None if none is."""
    before = [_held(each) for each in objects]
    act()
    return next((type(each).__name__ for each, old in zip(objects, before, strict=True) if not same(old, _held(each))), None)


def _held(value: Any) -> dict[Path, Any]:
    """What an object holds; of a module all but its parameters and the modules in it."""
    own = (
        {name: each for name, each in vars(value).items() if name not in TORCHS} | value._buffers if isinstance(value, nn.Module) else value
    )
    return held(own)


def _reached(root: nn.Module) -> dict[int, Any]:
    """What a module reaches other than by its registered parameters, buffers and modules, by identity."""
    return {id(met.value): met.value for met in reached_by([root]) if not isinstance(met.value, PLAIN)}
