"""Everything a trainer needs to resume elsewhere, as one dictionary: weights, optimizer, carry, loss scale and position.

Everything is keyed by parameter name, layer and global lane, never by rank, so a state written under one plan can be loaded under another.
`torch.save` writes it, and `torch.load(..., weights_only=True)` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.errors import RunError
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.stage import Stage
from carrywave.model.state import State
from carrywave.parallel.gather import broadcast, collect
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.nested import pack, plain, unpack
from carrywave.parallel.world import all_gather_text, raise_on_all
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.optim import optimizer_state
from carrywave.step.optim.loss_scaler import Scaler
from carrywave.step.worker_setup import HeldStage, check_saved_whole, tensors_of

FORMAT = 2
PARTS = ("weights", "optimizer", "groups", "own_optimizer", "kind", "carry", "scaler", "position")  # of a state, besides its format
_MAPPINGS = ("weights", "optimizer", "carry", "scaler", "position")


@dataclass(frozen=True)
class Position:
    """Where a trainer stands between two steps: all that a step goes on from besides weights and optimizer. A value, passed into a step and
    returned by it: a step that fails has not moved it, so that it can be taken again.
    """

    carry: list[Tensor] | None = (
        None  # of this worker's lanes and layers, as `Stage.parts` lists them; None: there is nothing to go on from
    )
    lanes: tuple[int, ...] | None = None  # those whose carry is kept, over all workers
    counted: int = 0  # batches so far without a step number of their own: every batch needs its own dropout masks


@dataclass(frozen=True)
class Stateful:
    """What of a worker has a state."""

    model: Model | OpaqueModel
    held: HeldStage
    mesh: Mesh
    optimizer: torch.optim.Optimizer
    user_optimizer: bool
    scaler: Scaler | None
    keep_state: bool

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and saved buffer that this worker holds, by name."""
        return {name: tensor for name, tensor in tensors_of(self.model).items() if not tensor.is_meta}


def whole_weights(worker: Stateful) -> dict[str, Tensor]:
    """On rank 0, the weights of the whole model, each once; empty on other ranks. Collective: every rank must call it."""
    weights = _of_all_stages(worker.mesh, worker.tensors())
    return {name: weights[name] for name in tensors_of(worker.model) if name in weights}


def _of_all_stages(mesh: Mesh, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On rank 0, what the stages of the first replica have; the first who has a tensor gives it."""
    found: dict[str, Tensor] = {}
    for part in collect(mesh.world, dict(tensors) if mesh.replica == 0 else {}):
        found |= {key: tensor for key, tensor in part.items() if key not in found}
    return found


def under_all_names(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the weights, with a tied tensor under each of its names, as `load_state_dict` needs them. What a worker holds itself would
    go on being trained otherwise, and what it received would not.
    """
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors}
    copies = {name: tensor.clone() for name, tensor in weights.items()}
    return {name: copies[of] for name, of in names.items() if of in copies}


def state_dict(worker: Stateful, position: Position) -> dict[str, Any]:
    """On rank 0, the state in host memory; empty on other ranks. Collective: every rank must call it."""
    check_saved_whole(worker.model)
    mesh, optimizer, lanes = worker.mesh, worker.optimizer, position.lanes
    weights = whole_weights(worker)
    user_state = _user_optimizer(worker) if worker.user_optimizer else None
    own = {} if worker.user_optimizer else optimizers.state_tensors(optimizer, worker.held.parameters.items())
    states = _of_all_stages(mesh, own)
    low, high = mesh.share().bounds(len(lanes or ()))
    # With fewer lanes than replicas, some have only a placeholder.
    kept = position.carry if worker.keep_state and low < high else None
    local_carry = dict(zip(carry_names(worker.held.stage), kept, strict=True)) if kept else {}
    carries = collect(mesh.world, {f"{name}/{low}": tensor for name, tensor in local_carry.items()})
    if mesh.world.rank:
        return {}
    return {
        "format": FORMAT,
        "weights": _on_host(weights),
        "optimizer": _on_host(states),
        "groups": [_settings(group) for group in optimizer.param_groups] if user_state is None else [],
        "own_optimizer": user_state,
        "kind": type(optimizer).__name__,
        "carry": _on_host(_joined(carries)),
        "scaler": {} if worker.scaler is None else _on_host(worker.scaler.tensors()),
        "position": {"batches": position.counted, "lanes": None if lanes is None else list(lanes)},
    }


def load_state_dict(worker: Stateful, given: Mapping[str, Any]) -> Position:
    """Resume from what `state_dict` returned; returns where to go on. Collective: every rank must call it; rank 0's argument is used, the
    others' is ignored.
    """
    world, optimizer, scaler = worker.mesh.world, worker.optimizer, worker.scaler
    text, tensors = "", dict[str, Tensor]()
    with raise_on_all(world, same_message=True):
        if world.rank == 0:
            _check(given, optimizer, user_optimizer=worker.user_optimizer)
            text, tensors = pack(given)
    text = all_gather_text(world, text)[0]
    state = unpack(text, broadcast(world, tensors))
    with raise_on_all(world):
        # Anything that can be refused comes before the weights change.
        _check_weights(worker, state["weights"])
        carry = _local_carry(worker, state["carry"])
        if not worker.user_optimizer and len(state["groups"]) != len(optimizer.param_groups):
            many = len(state["groups"])
            raise RunError(
                f"the state has {many} parameter groups, but the spec's optimizer has one; pass the state of a trainer with one group"
            )
        if scaler is not None:
            scaler.check(state["scaler"])
    with raise_on_all(world):
        if worker.user_optimizer:
            optimizer_state.load(optimizer, worker.held.parameters, state["own_optimizer"])
        else:
            _take_optimizer(worker, state["optimizer"], state["groups"])
    if scaler is not None:
        scaler.load(state["scaler"])
    with torch.no_grad():
        for name, tensor in worker.tensors().items():
            tensor.copy_(state["weights"][name])
    lanes = state["position"]["lanes"]
    return Position(carry, None if lanes is None else tuple(lanes), int(state["position"]["batches"]))


def carry_tensors(state: State | None, stage: Stage | OpaqueModel) -> dict[str, Tensor]:
    """The carry by layer and part; its second dimension is the lanes, in global order."""
    if state is None:
        return {}
    return dict(zip(carry_names(stage), (tensor for carry in state.carries for tensor in carry), strict=True))


def carry_names(stage: Stage | OpaqueModel) -> list[str]:
    """The names of the tensors of a stage's carry, in their order."""
    return [f"lstm.l{layer}.{part}" for layer, part in stage.parts]


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
    if not isinstance(given, Mapping) or given.get("format") != FORMAT:
        raise RunError("not a trainer state; pass what trainer.state_dict() returned on rank 0")
    lacks = [part for part in PARTS if part not in given or (part in _MAPPINGS and not isinstance(given[part], Mapping))]
    lacks += [f"position {name}" for name in ("batches", "lanes") if not lacks and name not in given["position"]]
    if lacks:
        raise RunError(f"the trainer state is incomplete: it has no {lacks[0]}; pass what trainer.state_dict() returned on rank 0")
    if (given["own_optimizer"] is not None) != user_optimizer:
        kinds = ("your own optimizer", "the spec's optimizer")
        state_kind, trainer_kind = kinds if given["own_optimizer"] is not None else kinds[::-1]
        raise RunError(f"the state is from a trainer with {state_kind}, but this one has {trainer_kind}; use the same in both")
    # With Adam's settings, AdamW would be Adam.
    if (kind := given["kind"]) != type(optimizer).__name__:
        raise RunError(
            f"the state is from a trainer whose optimizer is {kind}, but this one has {type(optimizer).__name__}; use the same in both, or "
            'create the trainer from a model with state["weights"] alone'
        )


def _user_optimizer(worker: Stateful) -> optimizer_state.Saved | None:
    """The state of the user's optimizer; None except on rank 0."""
    world, has_part = worker.mesh.world, worker.mesh.replica == 0
    with raise_on_all(world):
        text, tensors = pack(optimizer_state.saved(worker.optimizer, worker.held.parameters) if has_part else None)
    texts, collected = all_gather_text(world, text), collect(world, tensors)
    if world.rank:
        return None
    parts = [part for part in map(unpack, texts, collected) if part is not None]
    return optimizer_state.joined(parts, [name for name, _ in worker.model.named_parameters()])


def _check_weights(worker: Stateful, given: Mapping[str, Tensor]) -> None:
    parameters = worker.tensors()
    whole = tensors_of(worker.model).keys()
    for name, tensor in parameters.items():
        saved = given.get(name)
        if saved is None or saved.shape != tensor.shape or saved.dtype != tensor.dtype:
            description = "nothing" if saved is None else f"{list(saved.shape)} {saved.dtype}"
            raise RunError(
                f"the state has {description} for {name}, but the model has {list(tensor.shape)} {tensor.dtype}; pass a state of this model"
            )
    if extra := sorted(given.keys() - whole):
        raise RunError(f"the state has {extra[0]}, which the model does not have; pass a state of this model")


def _take_optimizer(worker: Stateful, given: Mapping[str, Tensor], groups: Sequence[Mapping[str, Any]]) -> None:
    """Load the state of an optimizer that we built."""
    held, optimizer = worker.held.parameters, worker.optimizer
    elsewhere = {name for name, _ in worker.model.named_parameters()} - held.keys()
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


def _local_carry(worker: Stateful, carry: Mapping[str, Tensor]) -> list[Tensor] | None:
    """The carry of this worker's lanes and layers."""
    if not carry or not worker.keep_state:
        return None
    first = next(iter(carry.values()))
    low, high = worker.mesh.share().bounds(first.shape[1])
    wanted = carry_tensors(worker.held.stage.start(high - low, worker.mesh.device), worker.held.stage)
    local: list[Tensor] = []
    for name, tensor in wanted.items():
        saved = carry.get(name)
        if saved is None or saved[:, low:high].shape != tensor.shape:
            raise RunError(f"the carry of {name} in the state does not match the model; pass a state of this model")
        local.append(saved[:, low:high].to(worker.mesh.device, tensor.dtype))
    return local


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group, with a learning rate on a GPU converted to a number."""
    numbers = {name: float(value) if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"}
    return {name: plain(value, f"the optimizer group setting {name}") for name, value in numbers.items()}
