"""The model that a run starts from: drawn from the spec's seed, the user's own, or with the weights of another run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from carrywave.data.prepare import Prepared
from carrywave.errors import SpecError, UserError
from carrywave.model.model import Model
from carrywave.model.opaque_model import Loss, OpaqueModel
from carrywave.model.parameter_placement import Holding
from carrywave.model.portable_names import CLASS_WEIGHTS
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.world import World, raise_on_all
from carrywave.runs.checkpoint.trainer_parts import load_parameters, read_weights
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec
from carrywave.step.checks.arguments import check_loss
from carrywave.step.worker_setup import check_saved_whole, check_uncut, holding_of, tensors_of
from carrywave.tasks.task import Task
from carrywave.train.start.run_source import weights_file
from carrywave.train.start.run_start import Start

Own = nn.Module | Callable[[DataFacts], nn.Module]  # a model of the user's own, or a function that builds one once the data is known


def drawn_model(task: Task, prepared: Prepared, start: Start, mesh: Mesh | None) -> Model:
    """The model that the spec describes, with memory for no more of it than this worker holds; without a mesh, in a dry run, for none.

    If weights are to be read from a file, it is whole: rank 0 reads them for all.
    """
    if start.init is not None or task.spec.model.pretrained is not None:
        return task.model(prepared.train)
    if mesh is None:
        return task.model(prepared.train, holding=Holding(0, 0, torch.device("cpu")), draw=False)
    return task.model(prepared.train, holding_of(mesh, task.spec.model.layers + 2))


def own_model(user_model: Own | OpaqueModel, spec: Spec, facts: DataFacts, loss: Loss | None) -> Model | OpaqueModel:
    """The user's own model, built if a function builds it, and checked."""
    model: object = user_model
    if not isinstance(user_model, Model | OpaqueModel):
        # Seeded, and isolated from the caller's random state: equal calls give equal weights.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.train.seed)
            model = user_model(facts)
            check_loss(loss, model)
    if isinstance(model, nn.Module) and not isinstance(model, Model | OpaqueModel):
        model = OpaqueModel(model, loss, pooled=spec.pooled)
    if not isinstance(model, Model | OpaqueModel):
        raise UserError(f"the function that builds the model returned a {type(model).__name__}; return a cw.Model(encoder, lstm, head)")
    check_saved_whole(model)
    if isinstance(model, Model) and model.lstm.bidirectional and spec.streams:
        raise SpecError(
            "the model is bidirectional, but a stream cannot be read backwards; set batch.tokens to train on separate sequences"
        )
    check_uncut(model, spec.plan_spec.chunk_steps)
    if isinstance(model, Model) and model.has_front and spec.streams:
        raise SpecError("the front reads whole sequences, but a stream is read in windows; set batch.tokens to train on sequences")
    if isinstance(model, Model) and model.whole_head and spec.streams:
        name = type(model.head).__name__
        raise SpecError(f"the head {name} reads whole sequences, but a stream is read in windows; set batch.tokens to train on sequences")
    return model


def begin_from(source: str, model: Model | OpaqueModel, world: World) -> None:
    """Load the weights of another run on rank 0, from which all workers take theirs."""
    with raise_on_all(world):
        if world.rank == 0:
            # Class weights follow from this run's spec and data, not from those of the run the weights come from.
            weights = read_weights(model, weights_file(source), ignored=CLASS_WEIGHTS)
            load_parameters({name: tensor for name, tensor in tensors_of(model).items() if name != CLASS_WEIGHTS}, weights, source)
