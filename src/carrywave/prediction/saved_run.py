"""Opens a trained run, with its spec, codec and best weights, to evaluate or to predict with."""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from carrywave.data.codec import Codec
from carrywave.data.prepare import Prepared, digests_of, prepare
from carrywave.errors import DataError, RunError, option
from carrywave.model.model import Model
from carrywave.model.opaque_model import Loss, OpaqueModel
from carrywave.model.parameter_placement import hold
from carrywave.model.stage import Stage
from carrywave.parallel.devices import pick_device
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.world import World
from carrywave.plan.plan import Plan, resolve
from carrywave.runs.checkpoint.atomic_files import read_tensors
from carrywave.runs.checkpoint.weights import take_weights, weights_metadata
from carrywave.runs.run import Run
from carrywave.runs.run_place import BANDS, LINEAR
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import load_own
from carrywave.spec.plan_spec import PlanSpec
from carrywave.spec.spec import Spec
from carrywave.step.precision import configure, parameter_dtype
from carrywave.step.worker_setup import holding_of
from carrywave.tasks.linear.part import LinearPart, kind_of
from carrywave.tasks.mase_scale import MaseScale
from carrywave.tasks.metrics.bands import Bands
from carrywave.tasks.task import Task


@dataclass(frozen=True)
class Saved:
    """A trained model and everything that belongs to it."""

    run: Run
    spec: Spec
    task: Task
    model: Model | OpaqueModel
    mesh: Mesh
    stage: Stage | OpaqueModel
    given_codec: bool  # from the run whose weights it started from; otherwise it built its own


def open_run(
    path: Path | str,
    device: str = "auto",
    model: nn.Module | None = None,
    *,
    world: World | None = None,
    whole_for: str | None = None,
    whole: bool = False,
    loss: Loss | None = None,
) -> Saved:
    """The best weights of a run, in the model of its spec, or in `model` if the run was trained with the user's own modules.

    With other workers in `world`, each holds a part: stages as in training if their number allows it, else replicas. Of a run whose task
    is `whole_for`, or with `whole`, every worker is a replica. `loss` is that of a module in one piece which has none of its own.
    """
    run = Run.open(Path(path))
    spec = load_own(run.path / "spec.yaml")
    codec = codec_of(run, spec)
    facts, scale, own_model, given_codec = facts_of(run, codec)
    if not run.weights.is_file():
        raise RunError(f"{run.path} has no weights.safetensors yet; train it to the end of its first epoch ({option('resume')})")
    if own_model and model is None:
        raise RunError(
            f"{run.path} was trained with your own modules, which are not stored in the run; rebuild the model in Python and pass it as "
            f"model=..., or load {run.weights} into it"
        )
    world = world or World.alone(pick_device(device))
    linear = None if own_model else read_linear(run.path, spec, codec, world.device)
    bands = _bands_of(run, spec, codec)
    task, plan_spec = Task(spec, codec, facts, scale, own_model=own_model, linear=linear, bands=bands), spec.plan_spec
    if whole or spec.task == whole_for:
        plan_spec = plan_spec.model_copy(update={"stages": 1, "cuts": None})
    configure(spec.train.precision)
    if model is None:
        plan = _plan_for(plan_spec, spec.model.layers, world.size)
    else:
        model = model if isinstance(model, Model) else OpaqueModel(model, loss, pooled=spec.pooled)
        plan = _plan_for(plan_spec, model.lstm.num_layers if isinstance(model, Model) else 0, world.size)
    mesh = Mesh(world, plan)
    if model is None:
        # The file of pretrained embeddings was needed only at the start; the weights hold what became of them.
        bare = Task(spec.model_copy(update={"model": spec.model.model_copy(update={"pretrained": None})}), codec, facts, scale)
        # In host memory first, where the weights are checked.
        model = bare.model(holding=replace(holding_of(mesh, spec.model.layers + 2), device=torch.device("cpu")), draw=False)
    dtype = parameter_dtype(spec.train.precision)
    model = model.to(dtype)
    take_weights(model, run.weights)
    _check_codec(run)
    model.eval()
    if isinstance(model, OpaqueModel):
        return Saved(run, spec, task, model, mesh, model.to(mesh.device), given_codec)
    holding = holding_of(mesh, model.units)
    hold(model, holding, dtype)
    return Saved(run, spec, task, model, mesh, Stage(model, holding.first, holding.last), given_codec)


def read_linear(folder: Path, spec: Spec, codec: Codec, device: torch.device) -> LinearPart | None:
    """The linear part of a run; None if it has none."""
    path = folder / LINEAR
    if not spec.mixes or not spec.model.linear or not path.is_file():
        return None
    try:
        return LinearPart.of(read_tensors(path), kind_of(spec), codec.vocabulary, device)
    except KeyError as error:
        raise RunError(f"{path} is damaged: it has no {error.args[0]}; pass a complete run folder") from error


def _bands_of(run: Run, spec: Spec, codec: Codec) -> Bands | None:
    """The bands of a run; None if it has none, or not yet for these weights."""
    path = run.path / BANDS
    if spec.task != "forecasting" or spec.data.bands is None or not path.is_file():
        return None
    saved = run.read_object(path.name)
    if str(saved.get("step")) != weights_metadata(run.weights).get("step"):
        return None
    try:
        return Bands.from_json(saved, spec.data.horizon, len(codec.forecast_columns))
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error}); pass a complete run folder") from error


def check_bands(saved: Saved) -> None:
    """Refuse to forecast without the bands that were asked for."""
    if saved.spec.task == "forecasting" and saved.spec.data.bands is not None and saved.task.bands is None:
        raise RunError(
            f"{saved.run.path} has no bands for its weights (data.bands): they are measured when training ends; train it to its end "
            f"({option('resume')})"
        )


def _plan_for(plan_spec: PlanSpec, layers: int, workers: int) -> Plan:
    """The run's own stages if this many workers can hold them. There is no backward pass, so slicing the lanes would gain nothing."""
    if workers % plan_spec.stages or not layers:
        plan_spec = plan_spec.model_copy(update={"stages": 1, "cuts": None})
    plan = resolve(
        plan_spec.model_copy(update={"replicas": None, "micro_batches": 1, "share_head": False}), layers=layers, workers=workers, lanes=None
    )
    return plan if plan.stages > 1 else replace(plan, chunk_steps=None)


def codec_of(run: Run, spec: Spec) -> Codec:
    """The codec with which the run reads its data, checked against its spec."""
    path = run.path / "codec.json"
    try:
        codec = Codec.from_json(json.dumps(run.read_json(path.name)))
    except DataError as error:
        fact = str(error).rpartition(";")[0].removeprefix("the codec is damaged: ")
        raise RunError(f"{path} is damaged: {fact}; pass a complete run folder") from error
    reads = codec.kind if codec.kind is not None and codec.field == "text" else spec.data.tokens
    if (codec.task, reads) != (spec.task, spec.data.tokens):
        asked = f"{run.path / 'spec.yaml'} has task={spec.task} and data.tokens={spec.data.tokens}"
        raise RunError(f"{path} is for {codec.task}, text by {reads}, but {asked}; restore the spec it was trained with")
    return codec


def _check_codec(run: Run) -> None:
    """Check the codec against the copy stored with the weights: with another one, results would be wrong but look right."""
    path = run.path / "codec.json"
    trained_with = weights_metadata(run.weights).get("codec")
    if trained_with is not None and trained_with != path.read_text("utf-8"):
        raise RunError(f"{path} does not match the codec that {run.weights.name} was trained with; restore the original file")


def facts_of(run: Run, codec: Codec) -> tuple[DataFacts, MaseScale, bool, bool]:
    """The facts that shaped the model, MASE's scale, whether the model was the user's own, and whether the codec was another run's."""
    path = run.path / "facts.json"
    recorded = dict(run.read_object(path.name))
    try:
        scale = MaseScale.from_json(recorded.pop("scale"), len(codec.targets))
        own_model, given_codec = (bool(recorded.pop(name, False)) for name in ("own_model", "given_codec"))
        for name in ("files", "init"):  # of the run, not of the data
            recorded.pop(name, None)
        return DataFacts.of(recorded), scale, own_model, given_codec
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error}); pass a complete run folder") from error


def warn(line: str) -> None:
    """Warn as a library should: at the line of the user's that called into the package, however deep within it this is called."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]:
        frame, level = frame.f_back, level + 1
    warnings.warn(line, stacklevel=level)


def own_data(saved: Saved) -> Prepared:
    """The run's own files, read with the run's codec, even if its training data has changed since."""
    codec = saved.task.codec
    if not saved.given_codec:
        # A rebuilt codec is the same as long as the data is; then everything is found in the cache that training left.
        with suppress(DataError):
            prepared = prepare(saved.spec)
            if prepared.codec == codec:
                return prepared
    return prepare(saved.spec, codec=codec)


def files_of(run: Run) -> dict[str, str]:
    """The SHA-256 of each file that a run was trained with, by part."""
    files = run.read_object("facts.json").get("files")
    return files if isinstance(files, dict) else {}


def changed_since(saved: Saved, part: str) -> tuple[str, ...]:
    """A line if the file of a part is no longer that of training. Refuse a part of the training file then: it may hold rows that were
    trained on.
    """
    setting = getattr(saved.spec.data, part)
    before, of = files_of(saved.run), "train" if setting is None else part
    if of not in before or before[of] == digests_of(saved.spec)[f"data.{of}"][1]:
        return ()
    name = setting or saved.spec.data.train
    fact = f"{name} has changed since {saved.run.path} was trained"
    if setting is not None:
        return (f"{fact}; these are the figures of what it holds now",)
    cut = f"and {part} is cut from it, so rows that were trained on may be in {part} now"
    raise DataError(f"{fact}, {cut}; restore the file, or pass the rows to evaluate on with {option('data')}")
