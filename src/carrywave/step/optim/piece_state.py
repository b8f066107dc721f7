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
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        for key, tensor in state_tensors(optimizer, [(piece.name, piece.part)]).items():
            if key.partition("/")[0] not in COUNTERS:
                tensors[f"{key}:{piece.first}-{piece.last}"] = tensor
            elif piece.first == 0:
                tensors[key] = tensor
    return tensors


def parsed(key: str, parameters: Collection[str]) -> tuple[str, str, tuple[int, int] | None]:
    """Kind of state, parameter and range of a saved name; no range if it is the state of a whole parameter."""
    kind, _, name = key.partition("/")
    if name not in parameters and (match := _RANGE.fullmatch(name)) is not None:
        return kind, match[1], (int(match[2]), int(match[3]))
    return kind, name, None


def needed(key: str, shape: Sequence[int], wanted: Mapping[str, Wanted], parameters: Collection[str]) -> bool:
    """True if a worker must read this saved tensor. Refuses a shape that no parameter of this run can have, before memory is taken."""
    _, name, interval = parsed(key, parameters)
    part = wanted.get(name)
    if part is None and name in parameters:
        return False  # of a parameter on another worker
    size = math.prod(shape)
    if size > max(1, 0 if part is None else part.numel) or (interval is not None and (part is None or interval[1] > part.numel)):
        raise RunError(
            f"the snapshot's optimizer state {key} has shape {list(shape)}, which matches no parameter of this run; "
            "resume with the train.optimizer, train.precision and model it was made with"
        )
    return part is None or interval is None or not part.numel or (interval[0] < part.last and interval[1] > part.first)


def assembled(given: Mapping[str, Tensor], wanted: Mapping[str, Wanted], parameters: Collection[str]) -> dict[str, Tensor]:
    """The state of each wanted range, by kind and parameter, from what was saved: whole, or in pieces of any size.

    Whatever does not fit is passed on as it is: the optimizer refuses it, with a message that names it.
    """
    state: dict[str, Tensor] = {}
    parts: dict[str, list[tuple[int, int, Tensor]]] = {}
    for key, tensor in given.items():
        kind, name, interval = parsed(key, parameters)
        part = wanted.get(name)
        if part is None or kind in COUNTERS:
            state[key] = tensor
        elif interval is not None:
            parts.setdefault(f"{kind}/{name}", []).append((*interval, tensor))
        elif tensor.numel() != part.numel:
            state[key] = tensor
        else:
            state[key] = tensor.reshape(-1)[part.first : part.last].view(part.shape)
    for key, pieces in parts.items():
        part = wanted[key.partition("/")[2]]
        state[key] = _joined(key, sorted(pieces, key=lambda piece: piece[:2]), part)
    return state


def _joined(key: str, pieces: Sequence[tuple[int, int, Tensor]], wanted: Wanted) -> Tensor:
    """One range, from pieces in order, which must cover it without gaps or overlaps."""
    if not wanted.numel:
        return pieces[0][2].view(wanted.shape)
    reached, taken = wanted.first, list[Tensor]()
    for first, last, tensor in pieces:
        if last <= wanted.first or first >= wanted.last:
            continue
        if first > reached or (taken and first != reached) or tensor.shape != (last - first,):
            break
        taken.append(tensor[reached - first : wanted.last - first])
        reached = last
    if reached < wanted.last:
        raise RunError(f"the snapshot does not contain all of the optimizer state {key}; resume from another snapshot or start a new run")
    return torch.cat(taken).view(wanted.shape)
