"""Between a running loop and its snapshots: what goes into one, and how a loop goes on from one."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from carrywave.errors import RunError
from carrywave.kernels.carry import Carry
from carrywave.model.state import State
from carrywave.parallel.gather import collect, spread
from carrywave.parallel.world import World, exchange, together
from carrywave.spec.spec import Spec
from carrywave.train import optimizer as optimizers
from carrywave.train.loop import Loop
from carrywave.train.snapshot import GROUPS, Snapshot, load_weights, save
from carrywave.train.trainer import Trainer, tensors_of

MAY_CHANGE = ("epochs", "max_steps", "early_stop", "evaluate_every", "log_every", "keep")  # of train, when a run is resumed


def keep(loop: Loop, fingerprint: str) -> None:
    """Write a snapshot of the loop as it stands between two steps. Every worker gives its part, and rank 0 writes."""
    trainer, world = loop.trainer, loop.trainer.mesh.world
    named = trainer.gathered()
    parts = collect(world, _under_prefixes(trainer))
    with together(world, for_all_of_us=True):
        if world.rank > 0:
            return
        metrics_bytes, timing_bytes = loop.folder.sync()
        meta = {
            "progress": loop.numbers(),
            "spec": loop.spec.model_dump(mode="json"),
            "fingerprint": fingerprint,
            "metrics_bytes": metrics_bytes,
            "timing_bytes": timing_bytes,
        }
        extra = {f"loop/{name}": tensor for name, tensor in loop.tensors().items()}
        if trainer.scaler is not None:
            extra |= {f"scaler/{name}": tensor for name, tensor in trainer.scaler.tensors().items()}
        snapshot = Snapshot(
            parameters=named,
            optimizer={name: tensor for part in parts for name, tensor in _under("optimizer/", part).items()},
            carry=_join_lanes([_under("carry/", part) for part in parts]),
            extra=extra,
            meta=meta,
        )
        save(loop.folder.snapshots, f"step-{loop.progress.step:08d}", snapshot, loop.spec.train.keep)


def _under_prefixes(trainer: Trainer) -> dict[str, Tensor]:
    """This worker's part of the optimizer (replicas hold the same: the first gives it) and of the carry."""
    own = optimizers.state_tensors(trainer.optimizer, trainer.named) if trainer.mesh.replica == 0 else {}
    carry = carry_tensors(trainer.state, trainer.stage.layers) if trainer.keep_state else {}
    return {f"optimizer/{name}": tensor for name, tensor in own.items()} | {f"carry/{name}": tensor for name, tensor in carry.items()}


def _join_lanes(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Carries of all layers and lanes: replicas come in the order of their lanes."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    names.sort(key=lambda name: int(name.split(".")[1][1:]))
    return {name: _one([part[name] for part in parts if name in part]) for name in names}


def _one(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([tensor.cpu() for tensor in tensors], dim=1)


def share(world: World, snapshot: Snapshot | None) -> Snapshot | None:
    """The snapshot that rank 0 read, on every worker."""
    if world.size == 1:
        return snapshot
    meta = json.loads(exchange(world, json.dumps(None if snapshot is None else snapshot.meta))[0])
    if meta is None:
        return None
    groups = {group: spread(world, None if snapshot is None else getattr(snapshot, group)) for group in GROUPS}
    return Snapshot(**groups, meta=meta)


def go_on(loop: Loop, snapshot: Snapshot, fingerprint: str) -> None:
    """Put a loop where a snapshot left off, and cut its logs back to it. Each worker takes its own part."""
    meta, trainer = snapshot.meta, loop.trainer
    with _sound():
        if meta["fingerprint"] != fingerprint:
            files = ", ".join(name for name in (getattr(loop.spec.data, part) for part in ("train", "valid", "test")) if name)
            of = f" ({files})" if files else ""
            raise RunError(
                f"the data has changed since the snapshot was written{of}; put the old data back, or start a new run from its weights"
            )
        load_parameters(trainer.parameters(), snapshot.parameters, "the snapshot", whole=tensors_of(trainer.model).keys())
        held = {name for name, _ in trainer.named}
        elsewhere = {name for name, _ in trainer.model.named_parameters()} - held
        optimizer = {name: tensor for name, tensor in snapshot.optimizer.items() if name.partition("/")[2] not in elsewhere}
        optimizers.load_state(trainer.optimizer, trainer.named, optimizer)
        if trainer.scaler is not None:
            trainer.scaler.load(_under("scaler/", snapshot.extra))
        trainer.state = own_state(snapshot.carry, trainer)
        loop.restore(meta["progress"], _under("loop/", snapshot.extra))
        loop.folder.cut_back(meta["metrics_bytes"], meta["timing_bytes"], loop.progress.step)


def own_state(carry: dict[str, Tensor], trainer: Trainer) -> State | None:
    """This worker's lanes and layers of the carry in a snapshot."""
    if not carry:
        return None
    low, high = trainer.mesh.share().bounds(next(iter(carry.values())).shape[1])
    mine = {name: tensor[:, low:high].contiguous() for name, tensor in carry.items()}
    return carry_state(mine, trainer.device, trainer.stage.layers)


def check_same(asked: Spec, snapshot: Snapshot) -> None:
    """Refuse to resume with a spec that asks for another answer; how the work is split, and when it ends, may change."""
    with _sound():
        before = Spec.model_validate(snapshot.meta["spec"]).model_dump(mode="json")
    now = asked.model_dump(mode="json")
    for section in ("task", "data", "model", "batch", "train"):
        if section == "task" or not isinstance(now[section], dict):
            pairs = [(section, before[section], now[section])]
        else:
            pairs = [(f"{section}.{name}", before[section].get(name), value) for name, value in now[section].items()]
        for name, old, new in pairs:
            if old != new and name.removeprefix("train.") not in MAY_CHANGE and name != "data.cache":
                raise RunError(f"the run was started with {name}={old}, not {new}; leave it as it was, or start a new run with --init")


@contextmanager
def _sound() -> Iterator[None]:
    """Every byte of a snapshot was checked when it was read; what does not fit now was never written by this version."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        what = " ".join(str(error).split())[:80]
        raise RunError(
            f"the snapshot is not one that this version wrote ({what}); resume from another snapshot or start a new run"
        ) from error


def load_parameters(own: dict[str, Tensor], given: dict[str, Tensor], where: str, *, whole: Collection[str] | None = None) -> None:
    """Copy tensors by name; names and shapes must agree. `whole`: the names of a model of which `own` is a part."""
    for name, tensor in own.items():
        if name not in given:
            raise RunError(f"{where} has no {name}; it is from another model: use the spec it was made with")
        if given[name].shape != tensor.shape or given[name].dtype != tensor.dtype:
            there, here = (f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (given[name], tensor))
            raise RunError(f"{where} holds {name} as {there}, the model has {here}; use the spec it was made with")
    if extra := sorted(given.keys() - (own.keys() if whole is None else set(whole))):
        raise RunError(f"{where} holds {extra[0]}, which the model does not have; use the spec it was made with")
    for name, tensor in own.items():
        tensor.copy_(given[name])


def take_weights(model: nn.Module, path: Path, where: str, *, ignored: str | None = None) -> None:
    """Load a weights file into a model; one tensor may be left out, as the model has it."""
    own = {name: tensor for name, tensor in tensors_of(model).items() if name != ignored}
    load_parameters(own, read_weights(model, path, ignored=ignored), where)


def read_weights(model: nn.Module, path: Path, *, ignored: str | None = None) -> dict[str, Tensor]:
    """The tensors of a weights file, checked against the whole of a model, also where some of it is held by another worker."""
    own = {name: tensor for name, tensor in tensors_of(model).items() if name != ignored}
    return load_weights(path, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()}, ignored)


def carry_tensors(state: State | None, layers: Sequence[int]) -> dict[str, Tensor]:
    """The carry by layer name; lanes are its second dimension, in global order."""
    if state is None:
        return {}
    pairs = zip(layers, state.carries, strict=True)
    return {f"lstm.l{layer}.{part}": getattr(carry, part) for layer, carry in pairs for part in ("h", "c")}


def carry_state(tensors: dict[str, Tensor], device: torch.device, layers: Sequence[int]) -> State:
    """The state of the lanes from a snapshot."""
    return State(tuple(Carry(*(tensors[f"lstm.l{layer}.{part}"].to(device) for part in ("h", "c"))) for layer in layers))


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
