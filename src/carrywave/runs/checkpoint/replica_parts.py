"""What a snapshot holds of replicas that train on their own (`train.sync` other than step).

Under `weights/` are those that the replicas agree on, under `outer/` what else they share, under `replica/` what each has of its own:
optimizer state and loss scale. Keys of the last begin with the number of the replica.

A run may resume with another number of replicas: each then starts with the mean of the optimizer state.
In asynchronous training there is one optimizer state, of which each replica holds a share.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from carrywave.model.state import State
from carrywave.parallel.gather import broadcast, collect
from carrywave.runs.checkpoint.snapshot import Tensors, under
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.sync.averaging import Averaging
from carrywave.step.sync.pushing import Pushing
from carrywave.step.trainer import Trainer
from carrywave.step.trainer_state import carry_state, carry_tensors


def state_of(trainer: Trainer, lanes: int) -> Tensors:
    """On rank 0, the state of all replicas; empty on other ranks. Collective."""
    assert trainer.sync is not None
    tensors = {f"replica/{trainer.mesh.replica}/{key}": tensor for key, tensor in _own(trainer).items()}
    if trainer.mesh.replica == 0:
        tensors |= {f"weights/{name}": tensor for name, tensor in trainer.parameters().items()}
        tensors |= {f"outer/{key}": tensor for key, tensor in trainer.sync.shared_state().items()}
    low, high = trainer.mesh.share().bounds(lanes)
    if trainer.keep_state and low < high:
        tensors |= {f"carry/{name}/{low}": tensor for name, tensor in carry_tensors(trainer.state, trainer.stage).items()}
    found: Tensors = {}
    for part in collect(trainer.mesh.world, tensors):
        found |= {key: tensor for key, tensor in part.items() if key not in found}  # stages that share one have the same
    return found


def _own(trainer: Trainer) -> Tensors:
    """What this replica has of its own."""
    assert trainer.sync is not None
    tensors = {f"optimizer/{key}": tensor for key, tensor in optimizers.state_tensors(trainer.optimizer, trainer.named).items()}
    tensors |= {f"sync/{key}": tensor for key, tensor in trainer.sync.local_state().items()}
    tensors |= {"alone/in_a_row": trainer.nonfinite.kept[1].clone()}
    return tensors if trainer.scaler is None else tensors | {f"scaler/{key}": tensor for key, tensor in trainer.scaler.tensors().items()}


def load(trainer: Trainer, tensors: Tensors, lanes: int) -> None:
    """Take up what rank 0 has read. Collective."""
    assert trainer.sync is not None
    tensors = broadcast(trainer.mesh.world, tensors)
    elsewhere = {name for name, _ in trainer.model.named_parameters()} - dict(trainer.named).keys()  # on other stages
    tensors = {key: tensor for key, tensor in tensors.items() if key.rpartition("/")[2] not in elsewhere}
    trainer.state = _carry(trainer, under("carry/", tensors), lanes)
    for name, parameter in trainer.parameters().items():
        parameter.copy_(tensors[f"weights/{name}"])
    own = under("replica/", tensors)
    replicas = [under(f"{number}/", own) for number in range(len({key.partition("/")[0] for key in own}))]
    if isinstance(trainer.sync, Pushing):
        state = replicas[trainer.mesh.replica % len(replicas)]
        trainer.sync.load([under("sync/", each) for each in replicas])
    elif len(replicas) == trainer.plan.replicas:
        state = replicas[trainer.mesh.replica]
    else:
        state = _mean(replicas)
    optimizers.load_state(trainer.optimizer, trainer.named, under("optimizer/", state))
    if isinstance(trainer.sync, Averaging):
        trainer.sync.load(under("outer/", tensors))
    trainer.nonfinite.forget(int(state["alone/in_a_row"]))
    if trainer.scaler is not None:
        trainer.scaler.load(under("scaler/", state))


def _mean(replicas: Collection[Tensors]) -> Tensors:
    """The mean of the optimizer state over replicas; of all else, what the first has."""
    first = next(iter(replicas))
    averaged = [key for key in first if key.startswith("optimizer/") and first[key].is_floating_point()]
    return first | {key: torch.stack([each[key] for each in replicas]).mean(0) for key in averaged}


def _carry(trainer: Trainer, pieces: Tensors, lanes: int) -> State | None:
    """This worker's lanes and layers of the carry; None if there is none."""
    if not pieces:
        return None
    low, high = trainer.mesh.share().bounds(lanes)
    whole: Tensors = {}
    for name in carry_tensors(trainer.stage.start(1, trainer.device), trainer.stage):
        found = {int(key): tensor for key, tensor in under(f"{name}/", pieces).items()}
        whole[name] = torch.cat([found[start] for start in sorted(found)], dim=1)[:, low:high]
    return carry_state(whole, trainer.device, trainer.stage)
