"""A run that has been trained, opened again: its spec, codec and best weights, to evaluate or to predict with."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from carrywave.data.codec import Codec
from carrywave.data.prepare import Prepared, prepare
from carrywave.data.python_inputs import file_of, read_python, series_of
from carrywave.errors import DataError, RunError, option
from carrywave.model.model import Model
from carrywave.model.opaque_model import Whole
from carrywave.model.parameter_placement import hold
from carrywave.model.stage import Stage
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.world import World, join, leave, pick_device, raise_on_all
from carrywave.plan.plan import Plan, resolve
from carrywave.runs.checkpoint.snapshot import weights_metadata
from carrywave.runs.checkpoint.trainer_parts import take_weights
from carrywave.runs.evaluation import evaluate
from carrywave.runs.run import Run
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import load
from carrywave.spec.spec import PlanSpec, Spec
from carrywave.step.precision import configure, parameter_dtype
from carrywave.tasks.changes import Changes
from carrywave.tasks.task import POOLED, Part, Task


@dataclass(frozen=True)
class Saved:
    """A trained model and everything that goes with it."""

    run: Run
    spec: Spec
    task: Task
    model: Model | Whole
    mesh: Mesh
    stage: Stage | Whole
    given_codec: bool  # of the run whose weights it was started from; otherwise it learned its own


def open_run(path: Path | str, device: str = "auto", model: nn.Module | None = None, *, world: World | None = None) -> Saved:
    """The best weights of a run, in the model of its spec, or in `model`, where the run was trained with modules of the user's own.

    With the other workers of `world`, each holds a part: cut as in training where their number allows it, else as replicas.
    """
    run = Run.open(Path(path))
    spec = load(run.path / "spec.yaml")
    codec = codec_of(run, spec)
    facts, scale, own_model, given_codec = facts_of(run, codec)
    if not run.weights.is_file():
        raise RunError(f"{run.path} has no weights.safetensors yet; train it to the end of its first epoch ({option('resume')})")
    if own_model and model is None:
        raise RunError(
            f"{run.path} was trained with modules of your own, which no file describes; rebuild the model in Python and give it as "
            f"model=..., or load {run.weights} into it"
        )
    task = Task(spec, codec, facts, scale)
    world = world or World.alone(pick_device(device))
    configure(spec.train.precision)
    if model is None:
        # The file of pretrained embeddings was needed once, at the start; the weights hold what became of them.
        bare = Task(spec.model_copy(update={"model": spec.model.model_copy(update={"pretrained": None})}), codec, facts, scale)
        model = bare.model()
    elif not isinstance(model, Model):
        model = Whole(model, pooled=spec.task in POOLED)
    dtype = parameter_dtype(spec.train.precision)
    model = model.to(dtype)
    take_weights(model, run.weights, str(run.weights))
    _check_codec(run)
    model.eval()
    mesh = Mesh(world, _plan_for(spec.plan_spec, model, world.size))
    if isinstance(model, Whole):
        return Saved(run, spec, task, model, mesh, model.to(mesh.device), given_codec)
    first, last = mesh.span(model.units)
    hold(model, first, last, mesh.device, dtype)
    return Saved(run, spec, task, model, mesh, Stage(model, first, last), given_codec)


def _plan_for(asked: PlanSpec, model: Model | Whole, workers: int) -> Plan:
    """The run's own stages where so many workers can hold them. Nothing goes backward, so that nothing is gained by cutting lanes."""
    layers = model.lstm.num_layers if isinstance(model, Model) else 0
    if workers % asked.stages or not layers:
        asked = asked.model_copy(update={"stages": 1, "cuts": None})
    plan = resolve(
        asked.model_copy(update={"replicas": None, "slices": 1, "share_head": False}), layers=layers, workers=workers, lanes=None
    )
    return plan if plan.stages > 1 else replace(plan, chunk_steps=None)


def codec_of(run: Run, spec: Spec) -> Codec:
    """How the run reads its data."""
    path = run.path / "codec.json"
    try:
        codec = Codec.from_json(json.dumps(run.read_json(path.name)))
    except DataError as error:
        fact = str(error).rpartition(";")[0].removeprefix("the codec is damaged: ")
        raise RunError(f"{path} is damaged: {fact}; give the folder of a whole run") from error
    if codec.task != spec.task:
        raise RunError(f"{path} is of task {codec.task}, {run.path / 'spec.yaml'} of {spec.task}; give the folder of a whole run")
    if codec.kind is not None and codec.field == "text" and codec.kind != spec.data.tokens:
        raise RunError(
            f"{path} reads text by {codec.kind}, {run.path / 'spec.yaml'} says data.tokens={spec.data.tokens}; "
            "put back the spec it was trained with"
        )
    return codec


def _check_codec(run: Run) -> None:
    """The weights hold a copy of the codec that they were trained with: another one would give numbers that look right."""
    path = run.path / "codec.json"
    trained_with = weights_metadata(run.weights).get("codec")
    if trained_with is not None and trained_with != path.read_text("utf-8"):
        raise RunError(f"{path} is not the one that {run.weights.name} was trained with, and holds a copy of; put it back as it was")


def facts_of(run: Run, codec: Codec) -> tuple[DataFacts, Changes, bool, bool]:
    """What the model was shaped by, MASE's scale, and whether the model was the user's own and the codec another run's.

    The codec must say the same.
    """
    path = run.path / "facts.json"
    try:
        known = dict(run.read_object(path.name))
        scale = Changes.from_json(known.pop("scale"), len(codec.targets))
        own_model, given_codec = (bool(known.pop(name, False)) for name in ("own_model", "given_codec"))
        facts = DataFacts.of(known)
        said = {"vocabulary": codec.size, "features": len(codec.columns), "labels": codec.labels, "outputs": codec.outputs}
        for name, value in said.items():
            if getattr(facts, name) != value:
                raise ValueError(f"{name} is {getattr(facts, name)!r:.40}, and {value!r:.40} in codec.json")
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error}); give the folder of a whole run") from error
    return facts, scale, own_model, given_codec


def evaluate_run(
    path: Path | str,
    data: Any = None,
    device: str = "auto",
    *,
    model: nn.Module | None = None,
    note: Callable[[str], None] | None = None,
) -> dict[str, object]:
    """Loss and metrics of the best weights, on a file or an object as `fit` takes them, or on the run's own test (or else valid) file.

    On the workers that a launcher started, if one did: each takes its part, and all return the same. What is odd about the data is a
    warning, or a line for `note`.
    """
    world = join(device)
    with raise_on_all(world, patient=True):
        saved = open_run(path, device, model, world=world)
        part = _part(saved, data)
    if world.rank == 0:
        for line in part.notes:
            (note or warn)(line)
    values = evaluate(saved.model, saved.task, part, mesh=saved.mesh, stage=saved.stage)
    leave(world)
    return {"split": part.name, **values}


def warn(line: str) -> None:
    """A warning where a library should give one: at the caller of the function that calls this."""
    warnings.warn(line, stacklevel=3)


def _part(saved: Saved, data: Any) -> Part:
    if data is not None:
        spec, codec = saved.spec, saved.task.codec
        part = saved.task.part(file_of(data, spec) or "data", read_python(data, codec, spec))
        gaps = series_of(data, codec, spec).notes[1:] if spec.task == "forecasting" else ()  # which columns are read was said in training
        return replace(part, notes=(*gaps, *part.notes))
    if saved.spec.data.train is None:
        raise DataError(f"{saved.run.path} was trained on data from Python, which no file holds; give data to evaluate on")
    prepared = _prepared(saved)
    for name, found in (("test", prepared.test), ("valid", prepared.valid)):
        if found is not None:
            return saved.task.part(name, found)
    raise DataError(f"{saved.run.path} was trained without valid or test data; give a file with {option('data')}")


def _prepared(saved: Saved) -> Prepared:
    """The run's own files, read as the run read them, whatever has become of its training data since."""
    codec = saved.task.codec
    if not saved.given_codec:
        # Learned again it is the same, as long as the data is: then all is found in the cache that training left.
        with suppress(DataError):
            prepared = prepare(saved.spec)
            if prepared.codec == codec:
                return prepared
    return prepare(saved.spec, codec=codec)
