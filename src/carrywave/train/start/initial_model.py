"""The model that a run starts from: drawn from the spec's seed, the user's own, or with the weights of another run."""

from __future__ import annotations

import torch

from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.parameter_placement import Holding
from carrywave.model.portable_names import CLASS_WEIGHTS
from carrywave.parallel.mesh import Mesh
from carrywave.runs.checkpoint.weights import take_weights
from carrywave.step.precision import parameter_dtype
from carrywave.step.worker_setup import holding_of
from carrywave.train.evaluations import check_metric
from carrywave.train.start.opening import Start, weights_file
from carrywave.train.start.settling import Ready


def make_model(start: Start, ready: Ready, mesh: Mesh | None) -> Model | OpaqueModel:
    """The model at the beginning of a run: the user's own, or drawn by the spec, perhaps with weights of another run."""
    model = ready.own if ready.own is not None else drawn_model(ready, mesh, whole=start.init is not None)
    check_metric(ready.spec.train.best, model, ready.data.facts.labels)
    model.to(parameter_dtype(ready.spec.train.precision))
    if start.init is not None and start.world.rank == 0:
        begin_from(start.init, model)  # all workers take theirs from rank 0
    return model


def drawn_model(ready: Ready, mesh: Mesh | None, *, whole: bool) -> Model:
    """The model that the spec describes, with memory for no more of it than this worker holds; without a mesh, in a dry run, for none.

    If weights are to be read from a file, it is whole: rank 0 reads them for all.
    """
    task, train = ready.task, ready.data.train
    if whole or task.spec.model.pretrained is not None:
        return task.model(train)
    if mesh is None:
        return task.model(train, holding=Holding(0, 0, torch.device("cpu")), draw=False)
    return task.model(train, holding_of(mesh, task.spec.model.layers + 2))


def begin_from(source: str, model: Model | OpaqueModel) -> None:
    """Load the weights of another run. Class weights follow from this run's spec and data, not from those."""
    take_weights(model, weights_file(source), ignored=CLASS_WEIGHTS)
