"""`train` carries out one spec, from data to weights; `fit` is the same from Python, with the user's own data and modules."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from carrywave.data.codec import Codec
from carrywave.data.inputs import from_python, naming
from carrywave.data.order import SequenceOrder
from carrywave.data.prepare import Prepared, prepare
from carrywave.errors import DataError, PlanError, RunError, SpecError, UserError
from carrywave.model.model import Model
from carrywave.parallel.precision import parameter_dtype
from carrywave.plan.plan import Plan, resolve
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import load, parse
from carrywave.spec.spec import Spec
from carrywave.tasks.task import Task
from carrywave.train import durable
from carrywave.train.keep import check_same, go_on, keep, take_weights
from carrywave.train.loop import Ending, Loop, Parts
from carrywave.train.rate import stops_early
from carrywave.train.run import Run
from carrywave.train.snapshot import Snapshot
from carrywave.train.snapshot import load as load_snapshot
from carrywave.train.summary import summarize
from carrywave.train.trainer import Trainer
from carrywave.train.watch import Silent, Watcher

Own = Model | Callable[[DataFacts], Model]  # a model of the user's own, or what makes one once the data is known


CLASS_WEIGHTS = "head.weights"


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    run: Path
    ending: Ending | None  # None: nothing was trained (a dry run)
    metrics: dict[str, dict[str, float]]  # loss and metrics of the best weights, by part: valid, test
    model: Model  # with the best weights, in evaluation mode


def train(
    spec: Spec,
    *,
    run: Path | None = None,
    resume: bool = False,
    init: str | None = None,
    device: str = "auto",
    watch: Watcher | None = None,
    dry_run: bool = False,
) -> Result:
    """Train what a spec describes, from its files."""
    watch = watch or Silent()
    where = pick_device(device)
    folder, snapshot = _folder(spec, run, resume)
    if snapshot is not None:
        _refuse_python(spec, folder)
        check_same(spec, snapshot)
    codec = _given_codec(init, folder, snapshot)
    prepared = prepare(spec, codec=codec, note=watch.say)
    return _train(spec, prepared, None, folder, snapshot, init, codec is not None, where, watch, dry_run)


def fit(
    model: Own | Mapping[str, Any] | None,
    data: Any,
    /,
    *,
    spec: Spec | Mapping[str, Any] | str | Path | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    init: str | None = None,
    devices: int = 1,
    plan: str | Mapping[str, Any] | Plan = "auto",
    device: str = "auto",
    watch: Watcher | None = None,
    **sections: Any,
) -> Result:
    """Train from Python, and leave a run as the command line does.

    `model` is the spec's model section (`{"hidden": 128}`, or None for its defaults); or a `Model` of the user's own modules,
    which is trained in place; or a function that makes one from the facts of the data (`facts.vocabulary`, `facts.labels`, …).
    `data` is whatever `from_python` takes: files, arrays, frames, Datasets; None for the files of the spec.

    What else a spec holds goes into `spec`, or section by section:
    `fit({"hidden": 64}, frame, task="forecasting", data={"horizon": 24}, train={"epochs": 3})`.
    """
    if devices != 1:
        raise PlanError(f"devices={devices}: this version trains on one device; use devices=1")
    if isinstance(model, nn.Module) and not isinstance(model, Model):
        raise UserError(f"model is a {type(model).__name__}; wrap your modules around a cw.LSTM: cw.Model(encoder, lstm, head)")
    if model is not None and not isinstance(model, Mapping) and not callable(model):
        raise UserError(f"model is a {type(model).__name__}; give a cw.Model, a function that makes one, or the spec's model section")
    asked = _spec_of(spec, model, plan, sections)
    asked = asked if data is None else naming(data, asked)
    watch = watch or Silent()
    where = pick_device(device)
    folder, snapshot = _folder(asked, None if run is None else Path(run), resume)
    if snapshot is not None:
        check_same(asked, snapshot)
    own = None if model is None or isinstance(model, Mapping) else model
    codec = _given_codec(init, folder, snapshot)
    from_files = asked.data.train is not None
    prepared = prepare(asked, codec=codec, note=watch.say) if from_files else from_python(data, asked, codec=codec)
    return _train(asked, prepared, own, folder, snapshot, init, codec is not None, where, watch, dry_run=False)


def pick_device(name: str) -> torch.device:
    """cpu, cuda, or the GPU where there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise SpecError(f"device {name!r} is not one of auto, cpu and cuda; use one of them")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise SpecError("device cuda was asked for and no GPU can be used; use --device cpu")
    return torch.device("cuda" if there and name in ("auto", "cuda") else "cpu")


def _folder(spec: Spec, run: Path | None, resume: bool) -> tuple[Run, Snapshot | None]:
    if not resume:
        return Run.create(run, spec.task), None
    if run is None:
        raise RunError("resume needs to know which run to go on with; add --run DIR (in Python, run=...)")
    folder = Run.open(run)
    return folder, load_snapshot(folder.snapshots)


def _train(
    spec: Spec,
    prepared: Prepared,
    own: Own | None,
    folder: Run,
    snapshot: Snapshot | None,
    init: str | None,
    given_codec: bool,
    device: torch.device,
    watch: Watcher,
    dry_run: bool,
) -> Result:
    task = Task.of(spec, prepared.codec, prepared.facts, prepared.train)
    parts = Parts(
        task.part("train", prepared.train),
        None if prepared.valid is None else task.part("valid", prepared.valid),
        None if prepared.test is None else task.part("test", prepared.test),
    )
    model = task.model(prepared.train) if own is None else _own_model(own, spec, prepared.facts)
    plan = resolve(spec.plan_spec, layers=model.lstm.num_layers, workers=1, lanes=spec.lanes if spec.streams else None)
    model.to(parameter_dtype(spec.train.precision))
    if init is not None:
        # Class weights follow from this run's spec and data, not from those of the run before.
        take_weights(model, _weights_file(init), init, ignored=CLASS_WEIGHTS)
    trainer = Trainer(model, spec.train, plan=plan, device=device, keep_state=spec.streams)
    loop = Loop(spec, task, trainer, parts, folder, watch, save=lambda loop: keep(loop, prepared.fingerprint))
    watch.begin(summarize(spec, prepared.facts, model, plan, loop.order, str(device)))
    if isinstance(loop.order, SequenceOrder) and loop.order.oversized:
        watch.say(f"{loop.order.oversized} sequences are longer than batch.tokens={spec.tokens}: each is a batch of its own")
    if dry_run:
        watch.end("dry run: nothing was trained, and no run was written")
        return Result(folder.path, None, {}, model)
    with folder:
        if snapshot is not None:
            go_on(loop, snapshot, prepared.fingerprint)
            watch.say(f"going on from step {loop.progress.step} (epoch {loop.progress.epoch + 1})")
        folder.write_spec(spec)
        folder.write_json("plan.json", asdict(plan))
        folder.write_json("codec.json", json.loads(prepared.codec.to_json()))
        origin = {"scale": list(task.scale), "own_model": own is not None, "given_codec": given_codec}
        folder.write_json("facts.json", asdict(prepared.facts) | origin)
        no_files = own is not None or spec.data.train is None
        again = f"cw.fit(..., run={str(folder.path)!r}, resume=True)" if no_files else f"carrywave train --resume --run {folder.path}"
        return _carry_out(loop, watch, again)


def _own_model(own: Own, spec: Spec, facts: DataFacts) -> Model:
    model: object = own
    if not isinstance(own, Model):
        # Seeded, and apart from the caller's generator: equal calls give equal weights.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.train.seed)
            model = own(facts)
    if not isinstance(model, Model):
        raise UserError(f"the function that makes the model returned a {type(model).__name__}; return cw.Model(encoder, lstm, head)")
    if model.lstm.bidirectional and spec.streams:
        raise SpecError("the model reads both ways, and a stream cannot be read backwards; set batch.tokens for separate sequences")
    return model


def _refuse_python(spec: Spec, folder: Run) -> None:
    """A run from Python cannot go on from its files alone."""
    if spec.data.train is None or folder.read_json("facts.json").get("own_model"):
        raise RunError(
            f"{folder.path} was trained from Python, on data or with modules that no file holds; "
            f"go on there: cw.fit(model, data, run={str(folder.path)!r}, resume=True)"
        )


def _carry_out(loop: Loop, watch: Watcher, again: str) -> Result:
    at = loop.progress
    longer = at.ending == "done" and at.epoch < loop.spec.train.epochs and not _max_steps_reached(loop)
    if longer or (at.ending == "early" and not stops_early(loop.spec.train, at.rate)):
        at.ending = None  # the run is asked to go on for longer than it was
    ending = at.ending or loop.run()
    if ending in ("interrupted", "terminated"):
        watch.end(f"{ending} at step {at.step}; go on with: {again}")
        return Result(loop.folder.path, ending, {}, loop.trainer.model)
    reached = _finish(loop)
    told = "; ".join(f"{part} " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()) for part, values in reached.items())
    stopped = " (stopped early)" if ending == "early" else ""
    watch.end(f"{loop.folder.path}: {at.step} steps{stopped}{('; best ' if at.best is not None else '; ') + told if told else ''}")
    return Result(loop.folder.path, ending, reached, loop.trainer.model)


def _max_steps_reached(loop: Loop) -> bool:
    limit = loop.spec.train.max_steps
    return limit is not None and loop.progress.step >= limit


def _finish(loop: Loop) -> dict[str, dict[str, float]]:
    """Take up the best weights, and judge them on the test part."""
    take_weights(loop.trainer.model, loop.folder.weights, "weights.safetensors")
    loop.trainer.model.eval()
    reached = {}
    if loop.progress.best is not None:
        reached["valid"] = dict(loop.progress.best)
    # Also where the training was over before: its last snapshot, to which the logs were cut back, is older than the test.
    if loop.parts.test is not None:
        reached["test"] = loop.judge(loop.parts.test)
    return reached


def _weights_file(init: str) -> Path:
    path = Path(init)
    if path.is_dir():
        path = Run.open(path).weights
    if not path.is_file():
        raise RunError(f"--init {init}: there is no such run or weights file; give a run folder or a .safetensors file")
    return path


def _given_codec(init: str | None, folder: Run, snapshot: Snapshot | None) -> Codec | None:
    """The codec of the weights that a run starts from, or started from before it was stopped; None: it learns its own."""
    if init is not None:
        return _init_codec(init)
    if snapshot is not None and folder.read_json("facts.json").get("given_codec"):
        return Codec.from_json(json.dumps(folder.read_json("codec.json")))
    return None


def _init_codec(init: str) -> Codec | None:
    """The codec that stands with the weights, so that new data is read as the old was; None where the file has none."""
    path = _weights_file(init)
    described = durable.read_metadata(path)
    try:
        return Codec.from_json(described["codec"]) if "codec" in described else None
    except DataError as error:
        raise RunError(f"{path}: {str(error).rpartition(';')[0]}; use other weights") from error


def _spec_of(spec: Spec | Mapping[str, Any] | str | Path | None, model: Any, plan: Any, sections: Mapping[str, Any]) -> Spec:
    base: dict[str, Any]
    if isinstance(spec, Spec):
        base = spec.model_dump(mode="json")
    elif isinstance(spec, str | Path):
        base = load(Path(spec), []).model_dump(mode="json")
    else:
        base = dict(spec or {})
    for name, value in sections.items():
        old = base.get(name)
        base[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
    if isinstance(model, Mapping):
        base["model"] = dict(model)
    if isinstance(plan, Plan):
        plan = {name: value for name, value in asdict(plan).items() if value != getattr(Plan(), name)}
    if plan != "auto":
        base["plan"] = plan if isinstance(plan, str) else dict(plan)
    return parse(base)
