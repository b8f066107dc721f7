"""Cuts a batch and the state of its lanes into micro-batches of lanes, and joins states again. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.data.loader import Share
from carrywave.kernels.carry import changed
from carrywave.model.state import State

FlatCarry = list[Tensor] | None  # the carry of some lanes as the tensors of `flatten`; None: lanes keep none


def bounds(lanes: int, micro_batches: int) -> list[tuple[int, int]]:
    """The half-open range of lanes of each micro-batch, split the way lanes are split among replicas."""
    return [Share(part, micro_batches).bounds(lanes) for part in range(micro_batches)]


def split_lanes(batch: Batch, micro_batches: int, *, pooled: bool) -> list[Batch]:
    """Cut a batch into micro-batches of its lanes."""
    return [batch.take(low, high, pooled=pooled) for low, high in bounds(batch.lanes.shape[0], micro_batches)]


def split_state(state: State, micro_batches: int, lanes: int) -> list[State]:
    """The state of each micro-batch of the lanes."""
    if micro_batches == 1:
        return [state]
    return [
        State(
            tuple(changed(carry, lambda part, low=low, high=high: part[:, low:high]) for carry in state.carries),
            None if state.acc is None else tuple(tensor[low:high] for tensor in state.acc),
        )
        for low, high in bounds(lanes, micro_batches)
    ]


def join_states(states: Sequence[State]) -> State:
    """The state of all lanes, from the states of their micro-batches."""
    if len(states) == 1:
        return states[0]
    carries = tuple(
        changed(first, lambda *parts: torch.cat(parts, dim=1), *others) for first, *others in zip(*(s.carries for s in states), strict=True)
    )
    accs = [s.acc for s in states if s.acc is not None]
    return State(carries, tuple(torch.cat(parts) for parts in zip(*accs, strict=True)) if accs else None)


def flatten(state: State) -> list[Tensor]:
    """The tensors of a state, in a fixed order."""
    tensors = [tensor for carry in state.carries for tensor in carry]
    return [*tensors, *(state.acc or ()), *([] if state.tail is None else [state.tail])]


def lanes_of(state: State, otherwise: int) -> int:
    """The number of lanes of a state; `otherwise` if the stage has no layers and so no carry."""
    return state.carries[0][0].shape[1] if state.carries else otherwise
