"""Selects the part of a trainer's state that each worker writes into a snapshot, and restores it from one.

Replicas hold the same parameters and optimizer state, so each writes a share of them, about equal in bytes; what several stages hold is
written by the first of them. If replicas divide the optimizer state (`train.shard_optimizer`), each writes its pieces. Each worker writes
its own rows of a split vocabulary, and the carry of its own layers and lanes. Of replicas that train on their own, `replica_parts` says
what they share and what not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor, nn

from carrywave.errors import RunError
from carrywave.model.model import Model
from carrywave.model.parameter_placement import homes
from carrywave.model.portable_names import EXPORTED, outside
from carrywave.model.state import State
from carrywave.model.vocabulary.rows import Rows
from carrywave.model.vocabulary.split import split_rows, whole_shape
from carrywave.runs.checkpoint import replica_parts
from carrywave.runs.checkpoint.atomic_files import Form, form_of
from carrywave.runs.checkpoint.snapshot import Groups, Stored, load_weights, ranged, weights_metadata
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.optim import piece_state
from carrywave.step.row_parts import cut, named, rows_of
from carrywave.step.trainer import Trainer
from carrywave.step.trainer_state import carry_state, carry_tensors, load_optimizer, wanted_state
from carrywave.step.worker_setup import tensors_of


def part_of(trainer: Trainer, lanes: int) -> Groups:
    """This worker's part of a snapshot: its share of the parameters and the optimizer state, and the carry that it holds."""
    names = _owned(trainer)
    trained = [(name, p) for name, p in trainer.named if name in names]
    groups: Groups
    if trainer.sync is not None:
        groups = replica_parts.shared_part(trainer, names)
    else:
        state = {} if trainer.pieces is not None else optimizers.state_tensors(trainer.optimizer, trained)
        groups = {"parameters": {name: tensor for name, tensor in trainer.parameters().items() if name in names}, "optimizer": state}
    whole: Groups = {}
    split: Groups = {}
    for group, tensors in groups.items():
        whole[group] = {name: t for name, t in tensors.items() if rows_of(name, t, trainer.held.rows) is None}
        split[group] = named({name: t for name, t in tensors.items() if name not in whole[group]}, trainer.held.rows)
    mine = _dealt(whole, trainer.mesh.replica, trainer.plan.replicas)
    mine = {group: tensors | split[group] for group, tensors in mine.items()}
    if trainer.sync is not None:
        mine["replica"] = replica_parts.local_part(trainer, names)
    if trainer.pieces is not None:
        mine["optimizer"] = piece_state.saved(trainer.optimizer, [piece for _, p in trained if (piece := trainer.pieces.of(p)) is not None])
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
    parameters, rows = trainer.parameters(), trainer.held.rows
    # Everything in the manifest is checked before any tensor is read.
    check_forms(parameters, stored.forms("parameters"), "the snapshot", whole=tensors_of(trainer.model).keys(), rows=rows)
    state_rows = _local_state_rows(trainer, stored)
    if trainer.sync is not None:
        replica_parts.check_size(trainer, stored)
    trainer.state = local_state(stored, trainer, lanes)
    load_parameters(parameters, stored.tensors("parameters", {name: _range(rows.get(name)) for name in parameters}), "the snapshot")
    if trainer.sync is None:
        saved = bool(stored.manifest.forms("optimizer"))
        load_optimizer(trainer, stored.tensors("optimizer", state_rows), trainer.named, averages=saved)
    else:
        replica_parts.load(trainer, stored, {name for name, _ in trainer.model.named_parameters()} - dict(trainer.named).keys())


def _range(rows: Rows | None) -> tuple[int, int] | None:
    return None if rows is None else (rows.low, rows.high)


def _local_state_rows(trainer: Trainer, stored: Stored) -> dict[str, tuple[int, int] | None]:
    """The optimizer tensors that this worker loads, or their rows: all but those of parameters, or pieces of them, on other workers."""
    rows, wanted = trainer.held.rows, wanted_state(trainer, trainer.named)
    whole = {name for name, _ in trainer.model.named_parameters()}
    wanted_rows: dict[str, tuple[int, int] | None] = {}
    for name, (_, shape) in stored.forms("optimizer").items():
        if piece_state.needed(name, shape, wanted, whole):
            _, parameter, span = piece_state.parsed(name, whole)
            wanted_rows[name] = _range(rows.get(parameter)) if shape and span is None else None
    return wanted_rows


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


def check_forms(
    held: Mapping[str, Tensor], stored: Mapping[str, Form], where: str, *, whole: Collection[str], rows: Mapping[str, Rows] | None = None
) -> None:
    """Refuse tensors whose names, shapes or dtypes are not the model's. `whole`: the names in the whole model, of which `held` is a part;
    `rows`: those of which it has only some rows.
    """
    for name, tensor in held.items():
        if name not in stored:
            raise RunError(f"{where} is from another model: it has no {name}; use the spec it was made with")
        expected = tensor.dtype, whole_shape(name, tensor.shape, rows or {})
        if stored[name] != expected:
            theirs, ours = (f"{list(shape)} {str(dtype).removeprefix('torch.')}" for dtype, shape in (stored[name], expected))
            raise RunError(f"{where} has {name} as {theirs}, expected {ours}; use the spec it was made with")
    if extra := sorted(stored.keys() - set(whole)):
        raise RunError(f"{where} has {extra[0]}, which the model does not have; use the spec it was made with")


def load_parameters(held: dict[str, Tensor], stored: dict[str, Tensor], where: str, *, whole: Collection[str] | None = None) -> None:
    """Copy tensors by name; names, shapes and dtypes must match. `whole`: the names in the whole model, of which `held` is a part."""
    forms = {name: form_of(tensor) for name, tensor in stored.items()}
    check_forms(held, forms, where, whole=stored.keys() if whole is None else whole)
    for name, tensor in held.items():
        tensor.copy_(stored[name])


def take_weights(model: nn.Module, path: Path, where: str, *, ignored: str | None = None) -> None:
    """Load a weights file into a model, or those of its units and rows that this worker holds; the tensor `ignored` keeps its value."""
    held = {name: tensor for name, tensor in tensors_of(model).items() if name != ignored and not tensor.is_meta}
    load_parameters(held, cut(read_weights(model, path, ignored=ignored, wanted=held.keys()), split_rows(model)), where)


def read_weights(model: nn.Module, path: Path, *, ignored: str | None = None, wanted: Collection[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a weights file, or those `wanted`, checked against the whole model, including what other workers hold."""
    tensors = {name: tensor for name, tensor in tensors_of(model).items() if name != ignored}
    rows = split_rows(model)
    expected = {name: (whole_shape(name, tensor.shape, rows), tensor.dtype) for name, tensor in tensors.items()}
    renamed = None
    if isinstance(model, Model) and EXPORTED in weights_metadata(path):
        renamed = {theirs: ours for ours, theirs in outside(tensors, model.lstm).items()}
    return load_weights(path, expected, ignored, renamed=renamed, wanted=wanted)
