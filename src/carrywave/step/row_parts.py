"""Rows of a split vocabulary outside a step: named when they leave a worker, joined to whole tensors, and cut from them again.

A tensor of which a worker holds rows [low, high) is called NAME/low-high; one of the optimizer's, EXP_AVG/NAME/low-high. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from carrywave.model.vocabulary.rows import Rows

_RANGED = re.compile(r"(.+)/(\d+)-(\d+)")

Piece = tuple[int, int, str]  # first row, end, key


def rows_of(key: str, tensor: Tensor, rows: Mapping[str, Rows]) -> Rows | None:
    """The rows that a parameter, or a tensor of the optimizer's state for it, has here; None if it is not split: a step count is not."""
    local_rows = rows.get(key) or rows.get(key.partition("/")[2])
    return local_rows if local_rows is not None and tensor.dim() else None


def named(tensors: Mapping[str, Tensor], rows: Mapping[str, Rows], *, others: bool = True) -> dict[str, Tensor]:
    """The tensors, those that are split with their rows in their names; without the others if these come from another worker."""
    named_tensors: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        local_rows = rows_of(key, tensor, rows)
        if local_rows is not None:
            named_tensors[f"{key}/{local_rows.low}-{local_rows.high}"] = tensor
        elif others:
            named_tensors[key] = tensor
    return named_tensors


def pieces(keys: Iterable[str]) -> dict[str, list[Piece]]:
    """The pieces of each tensor that was written by rows, in their order."""
    by_tensor: dict[str, list[Piece]] = {}
    for key in keys:
        if (match := _RANGED.fullmatch(key)) is not None:
            by_tensor.setdefault(match[1], []).append((int(match[2]), int(match[3]), key))
    return {name: sorted(parts) for name, parts in by_tensor.items()}


def joined(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all workers, each once and whole; what was split is joined in host memory. The first who has a tensor gives it."""
    tensors: dict[str, Tensor] = {}
    for part in parts:
        tensors |= {key: tensor for key, tensor in part.items() if key not in tensors}
    for name, split in pieces(tensors).items():
        tensors[name] = torch.cat([tensors.pop(key).cpu() for _, _, key in split])
    return tensors


def cut(tensors: Mapping[str, Tensor], rows: Mapping[str, Rows]) -> dict[str, Tensor]:
    """This worker's rows of whole tensors; views of them."""
    local_tensors: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        local_rows = rows_of(key, tensor, rows)
        local_tensors[key] = tensor if local_rows is None else tensor[local_rows.low : local_rows.high]
    return local_tensors


def cutter(rows: Mapping[str, Rows]) -> Callable[[str, Tensor], Tensor]:
    """What a worker keeps of a whole tensor that it received: all of it, or a copy of its own rows."""

    def keep(name: str, tensor: Tensor) -> Tensor:
        local_rows = rows_of(name, tensor, rows)
        return tensor if local_rows is None else tensor[local_rows.low : local_rows.high].clone()

    return keep
