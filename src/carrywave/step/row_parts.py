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
    found = rows.get(key) or rows.get(key.partition("/")[2])
    return found if found is not None and tensor.dim() else None


def named(tensors: Mapping[str, Tensor], rows: Mapping[str, Rows], *, others: bool = True) -> dict[str, Tensor]:
    """The tensors, those that are split with their rows in their names; without the others if these come from another worker."""
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        own = rows_of(key, tensor, rows)
        if own is not None:
            found[f"{key}/{own.low}-{own.high}"] = tensor
        elif others:
            found[key] = tensor
    return found


def pieces(keys: Iterable[str]) -> dict[str, list[Piece]]:
    """The pieces of each tensor that was written by rows, in their order."""
    found: dict[str, list[Piece]] = {}
    for key in keys:
        if (match := _RANGED.fullmatch(key)) is not None:
            found.setdefault(match[1], []).append((int(match[2]), int(match[3]), key))
    return {name: sorted(parts) for name, parts in found.items()}


def joined(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all workers, each once and whole; what was split is joined in host memory. The first who has a tensor gives it."""
    found: dict[str, Tensor] = {}
    for part in parts:
        found |= {key: tensor for key, tensor in part.items() if key not in found}
    for name, split in pieces(found).items():
        found[name] = torch.cat([found.pop(key).cpu() for _, _, key in split])
    return found


def cut(tensors: Mapping[str, Tensor], rows: Mapping[str, Rows]) -> dict[str, Tensor]:
    """This worker's rows of whole tensors; views of them."""
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        own = rows_of(key, tensor, rows)
        found[key] = tensor if own is None else tensor[own.low : own.high]
    return found


def cutter(rows: Mapping[str, Rows]) -> Callable[[str, Tensor], Tensor]:
    """What a worker keeps of a whole tensor that it received: all of it, or a copy of its own rows."""

    def keep(name: str, tensor: Tensor) -> Tensor:
        own = rows_of(name, tensor, rows)
        return tensor if own is None else tensor[own.low : own.high].clone()

    return keep
