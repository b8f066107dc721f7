"""Which way of exchanging a spec asks for: `Averaging` (local, diloco), `Pushing` (async), or none besides that of every step."""

from __future__ import annotations

import torch

from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.replica_mesh import ReplicaMesh
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.sync.averaging import Averaging, Named
from carrywave.step.sync.pushing import Pushing, PushOptimizer
from carrywave.step.worker_setup import tied_of

Sync = Averaging | Pushing


def within_step(mesh: Mesh, spec: TrainSpec) -> Mesh:
    """Those who exchange something within a step: all workers, or those of one replica that trains on its own. Collective."""
    return mesh if spec.sync == "step" or mesh.plan.replicas == 1 else ReplicaMesh(mesh)


def optimizer_of(spec: TrainSpec, named: Named, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer that takes a step: the spec's, or one that pushes gradients to where the spec's is."""
    return PushOptimizer([p for _, p in named], spec.lr) if spec.sync == "async" else optimizers.build(spec, named, device)


def sync_of(spec: TrainSpec, mesh: Mesh, model: Model | OpaqueModel, named: Named, optimizer: torch.optim.Optimizer) -> Sync | None:
    """How replicas exchange; None: at every step. Collective: every rank must call it."""
    if spec.sync == "step":
        return None
    if not isinstance(optimizer, PushOptimizer):
        return Averaging(mesh, named, tied_of(model, mesh), spec)
    optimizer.pushing = Pushing(mesh, named, spec)
    return optimizer.pushing
