"""Selects the part of a trainer's state that each worker writes into a snapshot, and restores it from one.

Replicas hold the same parameters and optimizer state, so each writes a share of them, about equal in bytes; what several stages hold is
written by the first of them. Each worker writes the carry of its own layers and lanes. Of replicas that train on their own,
`replica_parts` says what they share and what not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor, nn

from carrywave.errors import RunError
from carrywave.model.model import Model
from carrywave.model.parameter_placement import homes
from carrywave.model.portable_names import EXPORTED, outside
from carrywave.model.state import State
from carrywave.runs.checkpoint import replica_parts
from carrywave.runs.checkpoint.atomic_files import Form
from carrywave.runs.checkpoint.snapshot import Groups, Stored, load_weights, ranged, weights_metadata
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.trainer import Trainer
from carrywave.step.trainer_state import carry_state, carry_tensors
from carrywave.step.worker_setup import tensors_of


def part_of(trainer: Trainer, lanes: int) -> Groups:
    """This worker's part of a snapshot: its share of the parameters and the optimizer state, and the carry that it holds."""
    names = _owned(trainer)
    trained = [(name, p) for name, p in trainer.named if name in names]
    groups: Groups
    if trainer.sync is not None:
        groups = replica_parts.shared_part(trainer, names)
    else:
        state = optimizers.state_tensors(trainer.optimizer, trained)
        groups = {"parameters": {name: tensor for name, tensor in trainer.parameters().items() if name in names}, "optimizer": state}
    mine = _dealt(groups, trainer.mesh.replica, trainer.plan.replicas)
    if trainer.sync is not None:
        mine["replica"] = replica_parts.local_part(trainer, names)
    low, high = trainer.mesh.share().bounds(lanes)
    carry = carry_tensors(trainer.state, trainer.stage) if trainer.keep_state else {}
    return mine | {"carry": {ranged(name, low, high): tensor for name, tensor in carry.items()}}


def _owned(trainer: Trainer) -> Collection[str]:
    """The names of the tensors that this stage is the first to hold."""
    model, plan = trainer.model, trainer.plan
    if not isinstance(model, Model):
        return trainer.parameters().keys()
    edges = plan.edges(model.units)
    held_by_all = {model.units - 1} if plan.shares_head else set()

    def first(units: Collection[int]) -> int:
        return 0 if held_by_all & set(units) else sum(min(units) >= edge for edge in edges[1:-1])

    return {name for name, units in homes(model).items() if first(units) == trainer.mesh.stage}


def _dealt(groups: Groups, index: int, of: int) -> Groups:
    """One of several shares, about equal in bytes. Depends only on names and sizes, so that all holders of the same tensors agree."""
    items = [(tensor.nbytes, group, name) for group, tensors in groups.items() for name, tensor in tensors.items()]
    loads = [0] * of
    mine: set[tuple[str, str]] = set()
    for num_bytes, group, name in sorted(items, key=lambda item: (-item[0], *item[1:])):
        least = loads.index(min(loads))
        loads[least] += num_bytes
        if least == index:
            mine.add((group, name))
    return {group: {name: tensor for name, tensor in tensors.items() if (group, name) in mine} for group, tensors in groups.items()}


def load_state(trainer: Trainer, stored: Stored, lanes: int) -> None:
    """Load a trainer's part of a snapshot: the parameters, the optimizer state and the carry that it holds."""
    parameters = trainer.parameters()
    # Everything in the manifest is checked before any tensor is read.
    check_forms(parameters, stored.manifest.forms("parameters"), "the snapshot", whole=tensors_of(trainer.model).keys())
    states = _local_states(trainer, stored)
    if trainer.sync is not None:
        replica_parts.check_size(trainer, stored)
    trainer.state = local_state(stored, trainer, lanes)
    load_parameters(parameters, stored.read("parameters", parameters.keys()))
    if trainer.sync is None:
        saved = bool(stored.manifest.forms("optimizer"))
        optimizers.load_state(trainer.optimizer, trainer.named, stored.read("optimizer", states), averages=saved)
    else:
        replica_parts.load(trainer, stored, {name for name, _ in trainer.model.named_parameters()} - dict(trainer.named).keys())


def _local_states(trainer: Trainer, stored: Stored) -> list[str]:
    """The optimizer tensors that this worker loads: all but those of parameters on other workers. Refuses one that is larger than its
    parameter, before memory is taken.
    """
    elsewhere = {name for name, _ in trainer.model.named_parameters()} - dict(trainer.named).keys()
    sizes = {name: parameter.numel() for name, parameter in trainer.named}
    wanted: list[str] = []
    for key, (_, shape) in stored.manifest.forms("optimizer").items():
        name = key.partition("/")[2]
        if name in elsewhere:
            continue
        if math.prod(shape) > max(1, sizes.get(name, 0)):
            raise RunError(
                f"the snapshot's optimizer state {key} has shape {list(shape)}, which matches no parameter of this run; "
                "resume with the train.optimizer, train.precision and model it was made with"
            )
        wanted.append(key)
    return wanted


def local_state(stored: Stored, trainer: Trainer, lanes: int) -> State | None:
    """This worker's lanes and layers of the carry in a snapshot; None if it has no carry."""
    forms = stored.manifest.forms("carry")
    if not forms:
        return None
    wanted = carry_tensors(trainer.stage.start(1, trainer.device), trainer.stage)
    for name, one in wanted.items():
        pieces = stored.pieces(name)
        if pieces[-1][1] != lanes:
            raise RunError(f"the snapshot has the carry of {pieces[-1][1]} lanes, but batch.lanes={lanes}; use the spec it was made with")
        for start, end, key in pieces:
            shape = forms[key][1]
            if shape != (one.shape[0], end - start, *one.shape[2:]):
                raise RunError(
                    f"the snapshot's carry {key} has shape {list(shape)}, which does not match the model; use the spec it was made with"
                )
    low, high = trainer.mesh.share().bounds(lanes)
    return carry_state({name: stored.lanes(name, low, high) for name in wanted}, trainer.device, trainer.stage)


def check_forms(held: Mapping[str, Tensor], stored: Mapping[str, Form], where: str, *, whole: Collection[str]) -> None:
    """Refuse tensors whose names, shapes or dtypes are not the model's. `whole`: the names in the whole model; `held` is a part of it."""
    for name, tensor in held.items():
        if name not in stored:
            raise RunError(f"{where} is from another model: it has no {name}; use the spec it was made with")
        expected = tensor.dtype, tuple(tensor.shape)
        if stored[name] != expected:
            theirs, ours = (f"{list(shape)} {str(dtype).removeprefix('torch.')}" for dtype, shape in (stored[name], expected))
            raise RunError(f"{where} has {name} as {theirs}, expected {ours}; use the spec it was made with")
    if extra := sorted(stored.keys() - set(whole)):
        raise RunError(f"{where} has {extra[0]}, which the model does not have; use the spec it was made with")


def load_parameters(held: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Copy tensors by name, whose forms were checked before."""
    for name, tensor in held.items():
        tensor.copy_(stored[name])


def take_weights(model: nn.Module, path: Path, *, ignored: str | None = None) -> None:
    """Load a weights file into a model, or those of its units that this worker holds; the tensor `ignored` keeps its value."""
    held = {name: tensor for name, tensor in tensors_of(model).items() if name != ignored and not tensor.is_meta}
    load_parameters(held, read_weights(model, path, ignored=ignored, wanted=held.keys()))


def read_weights(model: nn.Module, path: Path, *, ignored: str | None = None, wanted: Collection[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a weights file, or those `wanted`, checked against the whole model, including what other workers hold."""
    tensors = {name: tensor for name, tensor in tensors_of(model).items() if name != ignored}
    expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    renamed = None
    if isinstance(model, Model) and EXPORTED in weights_metadata(path):
        renamed = {theirs: ours for ours, theirs in outside(tensors, model.lstm).items()}
    return load_weights(path, expected, ignored, renamed=renamed, wanted=wanted)
