"""What a snapshot holds of a trainer: gathered on rank 0, keyed by parameter, layer and lane, so that any plan can go on from it."""

from __future__ import annotations

from typing import Any

from carrywave.runs.checkpoint import replica_parts
from carrywave.runs.checkpoint.snapshot import Tensors, under
from carrywave.step.trainer import Trainer

PARTS = ("weights", "optimizer", "carry", "scaler")  # of a trainer's state, that are tensors


def state_of(trainer: Trainer, lanes: int) -> tuple[Tensors, dict[str, Any]]:
    """On rank 0, the state of a trainer as tensors, and the rest of it; empty on other ranks. Collective."""
    if trainer.sync is not None:
        return replica_parts.state_of(trainer, lanes), {}
    state = trainer.state_dict()
    tensors = {f"{part}/{name}": tensor for part in PARTS for name, tensor in state.pop(part, {}).items()}
    return tensors, state


def load_state(trainer: Trainer, tensors: Tensors, rest: dict[str, Any], lanes: int) -> None:
    """Take up the state that rank 0 has read; other ranks give nothing. Collective."""
    if trainer.sync is not None:
        replica_parts.load(trainer, tensors, lanes)
        return
    state = rest | {part: under(f"{part}/", tensors) for part in PARTS}
    # JSON has no tuples, as Adam's betas are.
    for group in rest.get("groups", ()):
        group.update({name: tuple(value) for name, value in group.items() if isinstance(value, list)})
    trainer.load_state_dict(state)
