"""The names under which pieces of optimizer state are saved, and any range of a state put together from what was saved.

The state of a whole parameter is `exp_avg/lstm.weight_ih_l0`; elements 0 to 127 of it are `exp_avg/lstm.weight_ih_l0:0-128`, flat. So what
is saved does not depend on who owned what: a run continues with another number of replicas, with pieces or without. The few numbers that
belong to a parameter as a whole (`step`, `count`) are saved once, by the owner of its first element.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from carrywave.errors import RunError
from carrywave.step.optim.optimizer import state_tensors
from carrywave.step.optim.pieces import Piece

COUNTERS = ("step", "count")  # state with one number for a whole parameter
_RANGE = re.compile(r"(.*):([0-9]{1,18})-([0-9]{1,18})", re.DOTALL)


@dataclass(frozen=True)
class Wanted:
    """The range of a parameter whose state a worker loads: all of it, its rows, or its piece."""

    name: str
    first: int
    last: int
    numel: int  # of the whole parameter
    shape: tuple[int, ...]  # of the state of this range

    @staticmethod
    def whole(name: str, parameter: Tensor) -> Wanted:
        """All of a parameter."""
        return Wanted(name, 0, parameter.numel(), parameter.numel(), tuple(parameter.shape))

    @staticmethod
    def rows(name: str, parameter: Tensor, low: int, of: int) -> Wanted:
        """The rows of a parameter of `of` rows that a worker holds, from row `low` on."""
        size = math.prod(parameter.shape[1:])
        return Wanted(name, low * size, low * size + parameter.numel(), of * size, tuple(parameter.shape))

    @staticmethod
    def piece(piece: Piece) -> Wanted:
        """What one replica owns of a parameter."""
        return Wanted(piece.name, piece.first, piece.last, piece.whole.numel(), (piece.last - piece.first,))


def saved(optimizer: Optimizer, pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """The state of these pieces, under the names of their ranges."""
    found: dict[str, Tensor] = {}
    for piece in pieces:
        for key, tensor in state_tensors(optimizer, [(piece.name, piece.part)]).items():
            if key.partition("/")[0] not in COUNTERS:
                found[f"{key}:{piece.first}-{piece.last}"] = tensor
            elif piece.first == 0:
                found[key] = tensor
    return found


def parsed(key: str, parameters: Collection[str]) -> tuple[str, str, tuple[int, int] | None]:
    """Kind of state, parameter and range of a saved name; no range if it is the state of a whole parameter."""
    kind, _, name = key.partition("/")
    if name not in parameters and (found := _RANGE.fullmatch(name)) is not None:
        return kind, found[1], (int(found[2]), int(found[3]))
    return kind, name, None


def needed(key: str, shape: Sequence[int], wanted: Mapping[str, Wanted], parameters: Collection[str]) -> bool:
    """True if a worker must read this saved tensor. Refuses a shape that no parameter of this run can have, before memory is taken."""
    _, name, span = parsed(key, parameters)
    own = wanted.get(name)
    if own is None and name in parameters:
        return False  # of a parameter on another worker
    size = math.prod(shape)
    if size > max(1, 0 if own is None else own.numel) or (span is not None and (own is None or span[1] > own.numel)):
        raise RunError(
            f"the snapshot's optimizer state {key} has shape {list(shape)}, which matches no parameter of this run; "
            "resume with the train.optimizer, train.precision and model it was made with"
        )
    return own is None or span is None or not own.numel or (span[0] < own.last and span[1] > own.first)


def assembled(given: Mapping[str, Tensor], wanted: Mapping[str, Wanted], parameters: Collection[str]) -> dict[str, Tensor]:
    """The state of each wanted range, by kind and parameter, from what was saved: whole, or in pieces of any size.

    Whatever does not fit is passed on as it is: the optimizer refuses it, with a message that names it.
    """
    found: dict[str, Tensor] = {}
    parts: dict[str, list[tuple[int, int, Tensor]]] = {}
    for key, tensor in given.items():
        kind, name, span = parsed(key, parameters)
        own = wanted.get(name)
        if own is None or kind in COUNTERS:
            found[key] = tensor
        elif span is not None:
            parts.setdefault(f"{kind}/{name}", []).append((*span, tensor))
        elif tensor.numel() != own.numel:
            found[key] = tensor
        else:
            found[key] = tensor.reshape(-1)[own.first : own.last].view(own.shape)
    for key, pieces in parts.items():
        own = wanted[key.partition("/")[2]]
        found[key] = _joined(key, sorted(pieces, key=lambda piece: piece[:2]), own)
    return found


def _joined(key: str, pieces: Sequence[tuple[int, int, Tensor]], own: Wanted) -> Tensor:
    """One range, from pieces in order, which must cover it without gaps or overlaps."""
    if not own.numel:
        return pieces[0][2].view(own.shape)
    place, taken = own.first, list[Tensor]()
    for first, last, tensor in pieces:
        if last <= own.first or first >= own.last:
            continue
        if first > place or (taken and first != place) or tensor.shape != (last - first,):
            break
        taken.append(tensor[place - first : own.last - first])
        place = last
    if place < own.last:
        raise RunError(f"the snapshot does not contain all of the optimizer state {key}; resume from another snapshot or start a new run")
    return torch.cat(taken).view(own.shape)
