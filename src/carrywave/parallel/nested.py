"""Converts nested values with tensors to JSON plus named tensors, so that optimizer state can travel between workers without pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carrywave.errors import RunError


def plain(value: Any, where: str) -> Any:
    """The value in Python's own types, with tensors copied to the host; anything else is refused, naming `where` it was found."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.generic):
        return plain(value.item(), where)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {plain(key, where): plain(each, f"{where} {key}") for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(each, where) for each in value)
    if isinstance(value, list):
        return [plain(each, where) for each in value]
    raise RunError(
        f"{where} is a {type(value).__name__}; only tensors, numbers, strings, and lists and dictionaries of these can be saved: "
        "save optimizer.state_dict() yourself"
    )


def pack(value: Any) -> tuple[str, dict[str, Tensor]]:
    """The value as text, and the tensors that the text refers to by number."""
    tensors: dict[str, Tensor] = {}

    def packed(each: Any) -> Any:
        if isinstance(each, Tensor):
            tensors[str(len(tensors))] = each
            return ["tensor", str(len(tensors) - 1)]
        if isinstance(each, Mapping):
            return ["dict", [[packed(key), packed(item)] for key, item in each.items()]]
        if isinstance(each, tuple | list):
            return ["tuple" if isinstance(each, tuple) else "list", [packed(item) for item in each]]
        return ["value", each]

    return json.dumps(packed(value)), tensors


def unpack(text: str, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `pack`."""

    def unpacked(each: Any) -> Any:
        kind, inside = each
        if kind == "tensor":
            return tensors[inside].clone(memory_format=torch.contiguous_format)
        if kind == "dict":
            return {unpacked(key): unpacked(item) for key, item in inside}
        if kind == "value":
            return inside
        items = [unpacked(item) for item in inside]
        return tuple(items) if kind == "tuple" else items

    return unpacked(json.loads(text))
