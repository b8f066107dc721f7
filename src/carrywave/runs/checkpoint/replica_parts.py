"""What a snapshot holds of replicas that train on their own (`train.sync` other than step).

The group `parameters` holds the weights that they agree on, `outer` what else they share, `replica` what each has of its own: optimizer
state, loss scale, and weights where they differ. Keys of the last begin with the number of the replica, `2/optimizer/exp_avg/head.weight`.

A run may resume with another number of replicas if all of them had the same weights: each then starts with the mean of the optimizer state.
In asynchronous training there is one optimizer state, of which each replica holds a share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from carrywave.errors import RunError
from carrywave.runs.checkpoint.snapshot import Groups, Stored, Tensors, under
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.sync.averaging import Averaging
from carrywave.step.sync.pushing import Pushing
from carrywave.step.sync.shares import NAME
from carrywave.step.trainer import Trainer

OPTIMIZER, SCALER, ALONE, SYNC = "optimizer/", "scaler/", "alone/", "sync/"


def shared_part(trainer: Trainer, names: Collection[str]) -> Groups:
    """What all replicas agree on of the tensors in `names`; each worker writes a share of it."""
    assert trainer.sync is not None
    outer = trainer.parameters() | trainer.sync.outer
    shared = {key: tensor for key, tensor in trainer.sync.shared_state().items() if _parameter(key) in names}
    return {"parameters": {name: tensor for name, tensor in outer.items() if name in names}, "outer": shared}


def local_part(trainer: Trainer, names: Collection[str]) -> Tensors:
    """What this replica has of its own."""
    assert trainer.sync is not None
    state = optimizers.state_tensors(trainer.optimizer, [(name, p) for name, p in trainer.named if name in names])
    tensors = {OPTIMIZER + key: tensor for key, tensor in state.items()}
    tensors |= {SYNC + key: tensor for key, tensor in trainer.sync.local_state().items() if _parameter(key) in (*names, NAME)}
    if trainer.mesh.stage == 0:  # all stages of a replica have the same
        tensors |= {ALONE + "targets": trainer.sync.targets, ALONE + "in_a_row": trainer.nonfinite.kept[1].clone()}
        if trainer.scaler is not None:
            tensors |= {SCALER + key: tensor for key, tensor in trainer.scaler.tensors().items()}
    return {f"{trainer.mesh.replica}/{key}": tensor for key, tensor in tensors.items()}


def load(trainer: Trainer, stored: Stored, elsewhere: Collection[str]) -> None:
    """Load what this worker needs of both, after the parameters. `elsewhere`: parameters that other stages hold."""
    assert trainer.sync is not None
    targets: Tensor | None = None
    names = stored.manifest.forms("replica")
    replicas = sorted({int(key.partition("/")[0]) for key in names})
    if replicas != list(range(len(replicas))) or not replicas:
        raise RunError(f"snapshot {stored.folder} has no state of its replicas; resume with the train.sync it was made with")
    mine = [key.partition("/")[2] for key in names if key.startswith("0/") and _parameter(key) not in elsewhere]
    shared = stored.read("outer", [key for key in stored.manifest.forms("outer") if _parameter(key) not in elsewhere])
    if isinstance(trainer.sync, Pushing):
        state = _of_replica(stored, trainer.mesh.replica % len(replicas), [key for key in mine if not key.startswith(SYNC)])
        shares = [key for key in mine if key.startswith(SYNC)]
        trainer.sync.load([under(SYNC, _of_replica(stored, replica, shares)) for replica in replicas])
    elif len(replicas) == trainer.plan.replicas:
        state = _of_replica(stored, trainer.mesh.replica, mine)
        targets = state[ALONE + "targets"]
    else:
        if any(key.startswith(SYNC) for key in mine):
            raise RunError(
                f"the snapshot has {len(replicas)} replicas, whose weights differ between exchanges of fragments, but "
                f"plan.replicas={trainer.plan.replicas}; resume with plan.replicas={len(replicas)}, or from the end of an epoch"
            )
        state = _mean(stored, replicas, mine)
    optimizers.load_state(trainer.optimizer, trainer.named, under(OPTIMIZER, state))
    if isinstance(trainer.sync, Averaging):
        trainer.sync.load(shared, under(SYNC, state), targets)
    trainer.nonfinite.forget(int(state[ALONE + "in_a_row"]))
    if trainer.scaler is not None:
        trainer.scaler.load(under(SCALER, state))


def _of_replica(stored: Stored, replica: int, keys: Iterable[str]) -> Tensors:
    tensors = stored.read("replica", [f"{replica}/{key}" for key in keys])
    return {key.partition("/")[2]: tensor for key, tensor in tensors.items()}


def _mean(stored: Stored, replicas: Collection[int], keys: Collection[str]) -> Tensors:
    """The mean of the optimizer state over replicas; of all else, what the first has."""
    total = _of_replica(stored, 0, keys)
    averaged = [key for key in keys if key.startswith(OPTIMIZER) and total[key].is_floating_point()]
    for replica in list(replicas)[1:]:
        for key, tensor in _of_replica(stored, replica, averaged).items():
            total[key] = total[key] + tensor
    return total | {key: total[key] / len(replicas) for key in averaged}


def _parameter(key: str) -> str:
    """The parameter that a tensor belongs to: the last part of its key."""
    return key.rpartition("/")[2]


def check_size(trainer: Trainer, stored: Stored) -> None:
    """Refuse tensors that are larger than what they belong to, before any is read."""
    held = {name: p.numel() for name, p in trainer.model.named_parameters()}
    held[NAME] = sum(held.values())  # of an asynchronous run
    for group in ("outer", "replica"):
        for key, (_, shape) in stored.manifest.forms(group).items():
            if torch.Size(shape).numel() > max(held.get(_parameter(key), 0), trainer.spec.sync_fragments):
                raise RunError(
                    f"the snapshot's {key} has shape {list(shape)}, which matches no parameter of this run; "
                    "resume with the train and model sections it was made with"
                )
