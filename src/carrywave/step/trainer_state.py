"""Everything a trainer needs to resume elsewhere, as one dictionary: weights, optimizer, carry, loss scale and position.

Everything is keyed by parameter name, layer and global lane, never by rank, so a state written under one plan can be loaded under another.
`torch.save` writes it, and `torch.load(..., weights_only=True)` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.errors import RunError
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.stage import Stage
from carrywave.model.state import State
from carrywave.parallel.gather import broadcast, collect
from carrywave.parallel.nested import pack, plain, unpack
from carrywave.parallel.world import all_gather_text, raise_on_all
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.optim import optimizer_state
from carrywave.step.sync.user_loop import check_unsaved
from carrywave.step.trainer_view import TrainerView
from carrywave.step.worker_setup import check_saved_whole, tensors_of

FORMAT = 2
_GROUPS = ("weights", "optimizer", "carry", "scaler")


def whole_weights(trainer: TrainerView) -> dict[str, Tensor]:
    """On rank 0, the weights of the whole model, each once; empty on other ranks. Collective: every rank must call it."""
    weights = _each_once(collect(trainer.mesh.world, _local_part(trainer, trainer.parameters())))
    return {name: weights[name] for name in tensors_of(trainer.model) if name in weights}


def _local_part(trainer: TrainerView, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this worker adds to the state of the whole model: all that it holds, if it is in the first replica."""
    return dict(tensors) if trainer.mesh.replica == 0 else {}


def _each_once(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all workers; the first who has one gives it."""
    tensors: dict[str, Tensor] = {}
    for part in parts:
        tensors |= {key: tensor for key, tensor in part.items() if key not in tensors}
    return tensors


def under_all_names(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the weights, with a tied tensor under each of its names, as `load_state_dict` needs them. What a worker holds itself would
    go on being trained otherwise, and what it received would not.
    """
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors}
    copies = {name: tensor.clone() for name, tensor in weights.items()}
    return {name: copies[of] for name, of in names.items() if of in copies}


def state_dict(trainer: TrainerView) -> dict[str, Any]:
    """On rank 0, the state in host memory; empty on other ranks. Collective: every rank must call it."""
    check_unsaved(trainer.spec.sync)
    check_saved_whole(trainer.model)
    trainer.check_unbroken()
    trainer.agreement.settle()
    world = trainer.mesh.world
    weights = whole_weights(trainer)
    user_state = _user_optimizer(trainer) if trainer.user_optimizer else None
    state: dict[str, Tensor] = {}
    if not trainer.user_optimizer:
        state = _local_part(trainer, optimizers.state_tensors(trainer.optimizer, trainer.held.parameters.items()))
    low, high = trainer.mesh.share().bounds(len(trainer.lanes or ()))
    # With fewer lanes than replicas, some have only a placeholder.
    local_carry = carry_tensors(trainer.state, trainer.stage) if trainer.keep_state and low < high else {}
    states, carries = collect(world, state), collect(world, {f"{name}/{low}": tensor for name, tensor in local_carry.items()})
    if world.rank:
        return {}
    return {
        "format": FORMAT,
        "weights": _on_host(weights),
        "optimizer": _on_host(_each_once(states)),
        "groups": [_settings(group) for group in trainer.optimizer.param_groups] if user_state is None else [],
        "own_optimizer": user_state,
        "kind": type(trainer.optimizer).__name__,
        "carry": _on_host(_joined(carries)),
        "scaler": {} if trainer.scaler is None else _on_host(trainer.scaler.tensors()),
        "position": {"batches": trainer.uncounted, "lanes": None if trainer.lanes is None else list(trainer.lanes)},
    }


def load_state_dict(trainer: TrainerView, given: Mapping[str, Any]) -> None:
    """Resume from what `state_dict` returned. Collective: every rank must call it; rank 0's argument is used, the others' is ignored."""
    check_unsaved(trainer.spec.sync)
    world = trainer.mesh.world
    text, tensors = "", dict[str, Tensor]()
    with raise_on_all(world, same_message=True):
        if world.rank == 0:
            _check(given, trainer.optimizer, user_optimizer=trainer.user_optimizer)
            text, tensors = pack(given)
    text = all_gather_text(world, text)[0]
    state = unpack(text, broadcast(world, tensors))
    with raise_on_all(world):
        # Anything that can be refused comes before the weights change.
        _check_weights(trainer, state["weights"])
        carry = _local_carry(trainer, state["carry"])
        if not trainer.user_optimizer and len(state["groups"]) != len(trainer.optimizer.param_groups):
            many = len(state["groups"])
            raise RunError(
                f"the state has {many} parameter groups, but the spec's optimizer has one; pass the state of a trainer with one group"
            )
        if trainer.scaler is not None:
            trainer.scaler.check(state["scaler"])
    with raise_on_all(world):
        if trainer.user_optimizer:
            optimizer_state.load(trainer.optimizer, trainer.held.parameters, state["own_optimizer"])
        else:
            _take_optimizer(trainer, state["optimizer"], state["groups"])
    with raise_on_all(world):
        if trainer.scaler is not None:
            trainer.scaler.load(state["scaler"])
        with torch.no_grad():
            for name, tensor in trainer.parameters().items():
                tensor.copy_(state["weights"][name])
        trainer.lanes = _lanes(state["position"]["lanes"])
        trainer.uncounted = int(state["position"]["batches"])
        trainer.state = carry
    trainer.restart_recordings()


def _lanes(saved: int | list[int] | None) -> tuple[int, ...] | None:
    """The lanes of a saved state; earlier versions saved only how many they were."""
    return None if saved is None else tuple(range(saved)) if isinstance(saved, int) else tuple(saved)


def carry_tensors(state: State | None, stage: Stage | OpaqueModel) -> dict[str, Tensor]:
    """The carry by layer and part; its second dimension is the lanes, in global order."""
    if state is None:
        return {}
    tensors = (tensor for carry in state.carries for tensor in carry)
    return {f"lstm.l{layer}.{part}": tensor for (layer, part), tensor in zip(stage.parts, tensors, strict=True)}


def carry_state(tensors: Mapping[str, Tensor], device: torch.device, stage: Stage | OpaqueModel) -> State:
    """The state of the lanes, from tensors by layer and part."""
    return State(stage.carries([tensors[f"lstm.l{layer}.{part}"].to(device) for layer, part in stage.parts]))


def _joined(carries: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the parts of all workers into whole tensors, in lane order."""
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for part in carries:
        for key, tensor in part.items():
            name, _, low = key.rpartition("/")
            pieces.setdefault(name, []).append((int(low), tensor.cpu()))
    return {name: torch.cat([tensor for _, tensor in sorted(parts, key=lambda pair: pair[0])], dim=1) for name, parts in pieces.items()}


def _check(given: Mapping[str, Any], optimizer: torch.optim.Optimizer, *, user_optimizer: bool) -> None:
    if not isinstance(given, Mapping) or given.get("format") != FORMAT or any(not isinstance(given.get(part), Mapping) for part in _GROUPS):
        raise RunError("not a trainer state; pass what trainer.state_dict() returned on rank 0")
    if (given["own_optimizer"] is not None) != user_optimizer:
        kinds = ("your own optimizer", "the spec's optimizer")
        state_kind, trainer_kind = kinds if given["own_optimizer"] is not None else kinds[::-1]
        raise RunError(f"the state is from a trainer with {state_kind}, but this one has {trainer_kind}; use the same in both")
    # With Adam's settings, AdamW would be Adam. Earlier versions did not save the class.
    if (kind := given.get("kind", type(optimizer).__name__)) != type(optimizer).__name__:
        raise RunError(
            f"the state is from a trainer whose optimizer is {kind}, but this one has {type(optimizer).__name__}; use the same in both, or "
            'create the trainer from a model with state["weights"] alone'
        )


def _user_optimizer(trainer: TrainerView) -> optimizer_state.Saved | None:
    """The state of the user's optimizer; None except on rank 0."""
    world, has_part = trainer.mesh.world, trainer.mesh.replica == 0
    with raise_on_all(world):
        text, tensors = pack(optimizer_state.saved(trainer.optimizer, trainer.held.parameters) if has_part else None)
    texts, collected = all_gather_text(world, text), collect(world, tensors)
    if world.rank:
        return None
    parts = [part for part in map(unpack, texts, collected) if part is not None]
    return optimizer_state.joined(parts, [name for name, _ in trainer.model.named_parameters()])


def _check_weights(trainer: TrainerView, given: Mapping[str, Tensor]) -> None:
    parameters = trainer.parameters()
    whole = tensors_of(trainer.model).keys()
    for name, tensor in parameters.items():
        saved = given.get(name)
        if saved is None or saved.shape != tensor.shape or saved.dtype != tensor.dtype:
            description = "nothing" if saved is None else f"{list(saved.shape)} {saved.dtype}"
            raise RunError(
                f"the state has {description} for {name}, but the model has {list(tensor.shape)} {tensor.dtype}; pass a state of this model"
            )
    if extra := sorted(given.keys() - whole):
        raise RunError(f"the state has {extra[0]}, which the model does not have; pass a state of this model")


def _take_optimizer(trainer: TrainerView, given: Mapping[str, Tensor], groups: Sequence[Mapping[str, Any]]) -> None:
    """Load the state of an optimizer that we built."""
    held, optimizer = trainer.held.parameters, trainer.optimizer
    elsewhere = {name for name, _ in trainer.model.named_parameters()} - held.keys()
    mine = {key: tensor for key, tensor in given.items() if key.partition("/")[2] not in elsewhere}
    # What was trained once and is frozen now keeps its state, for when it is trained again.
    stated = {key.partition("/")[2] for key in mine}
    optimizers.enlarge(optimizer, [(name, p) for name, p in held.items() if name in stated])
    optimizers.load_state(optimizer, held.items(), mine, averages=bool(given))
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for name, value in saved.items():
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)
            else:
                group[name] = value


def _local_carry(trainer: TrainerView, carry: Mapping[str, Tensor]) -> State | None:
    """The carry of this worker's lanes and layers."""
    if not carry or not trainer.keep_state:
        return None
    first = next(iter(carry.values()))
    low, high = trainer.mesh.share().bounds(first.shape[1])
    wanted = carry_tensors(trainer.stage.start(high - low, trainer.device), trainer.stage)
    local: dict[str, Tensor] = {}
    for name, tensor in wanted.items():
        saved = carry.get(name)
        if saved is None or saved[:, low:high].shape != tensor.shape:
            raise RunError(f"the carry of {name} in the state does not match the model; pass a state of this model")
        local[name] = saved[:, low:high].to(tensor.dtype)
    return carry_state(local, trainer.device, trainer.stage)


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group, with a learning rate on a GPU converted to a number."""
    numbers = {name: float(value) if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"}
    return {name: plain(value, f"the optimizer group setting {name}") for name, value in numbers.items()}
