"""Trains one spec from data to weights: `train` from the spec's files, `fit` from Python with the user's own data and modules."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from carrywave import __version__, heap
from carrywave.data.files.remote import is_address
from carrywave.data.prepare import Prepared
from carrywave.data.python_inputs import from_python, naming
from carrywave.errors import PlanError, UserError, unwinding
from carrywave.launch import launch_record, script_workers
from carrywave.launch.hardware import shares_on
from carrywave.launch.restart_policy import RESTARTS
from carrywave.model.model import Model
from carrywave.model.opaque_model import Loss, OpaqueModel
from carrywave.parallel.devices import pick_device
from carrywave.parallel.liveness.peer_watchdog import watched
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.process_state import leaving_no_trace
from carrywave.parallel.startup.door import job_of
from carrywave.parallel.startup.launcher_env import launched
from carrywave.parallel.world import World, check_agreement, join, leave, raise_on_all
from carrywave.plan.plan import Plan, check_sync
from carrywave.plan.units import Units
from carrywave.runs import history
from carrywave.runs.checkpoint.trainer_parts import take_weights
from carrywave.runs.display import watcher_of_call
from carrywave.runs.evaluation import order_for
from carrywave.runs.run import METRICS, Run
from carrywave.runs.run_place import TIMING
from carrywave.runs.summary import backends, summarize, transports_of_run
from carrywave.runs.tracking.tracker import Description
from carrywave.runs.tracking.tracking import Tracking, check_installed
from carrywave.runs.trained_run import codec_of, facts_of, open_run
from carrywave.runs.watcher import Silent, Watcher
from carrywave.spec.defaults import AUTO, fitted, with_kept_weights, with_precision
from carrywave.spec.idle_keys import idle
from carrywave.spec.load import load_own
from carrywave.spec.spec import Spec
from carrywave.step.checks.arguments import check_loss, in_model_dtype
from carrywave.step.precision import not_made_for_bf16, parameter_dtype, settled
from carrywave.step.trainer import Trainer
from carrywave.tasks.task import Task
from carrywave.train import held_out
from carrywave.train.callbacks import Callback, Callbacks, check_callbacks, in_words
from carrywave.train.checkpointer import Checkpointer, Data
from carrywave.train.evaluations import DataParts, check_can_judge
from carrywave.train.finish import run_to_end, shown
from carrywave.train.loop import Loop
from carrywave.train.loop_state import ASKED, LoopState
from carrywave.train.plan_check import Comparison
from carrywave.train.result import Result
from carrywave.train.start.initial_model import Own, begin_from, drawn_model, own_model
from carrywave.train.start.linear_start import linear_part
from carrywave.train.start.planning import PlanRequest, check_workers, plan_run
from carrywave.train.start.run_start import Start, begin, noted, prepare_in_turn, spec_of_call, with_whole_spans
from carrywave.train.start.timing import step_seconds


def train(
    spec: Spec,
    *,
    run: Path | str | None = None,
    resume: bool = False,
    init: str | None = None,
    device: str = "auto",
    devices: int | None = None,
    watch: Watcher | None = None,
    dry_run: bool = False,
) -> Result:
    """Train what a spec describes, from its files; under a launcher, on the workers it started.

    `devices` is the number of workers that a dry run plans for.
    """
    world = World.alone(pick_device(device)) if dry_run else join(device, job_of(spec, run))
    with _left_at_the_end(world):
        start = begin(spec, world, run, resume, init, watch or Silent(), from_files=True, hold=not dry_run)
        with start.folder:
            prepared, files = prepare_in_turn(start)
            return _train(start, prepared, None, files, workers=devices if dry_run and devices else world.size, dry_run=dry_run)


@leaving_no_trace
def fit(
    model: Own | Mapping[str, Any] | None,
    data: Any,
    /,
    *,
    spec: Spec | Mapping[str, Any] | str | Path | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    init: str | Path | None = None,
    devices: int = 1,
    restarts: int = RESTARTS,
    min_devices: int | None = None,
    plan: str | Mapping[str, Any] | Plan | None = "auto",
    device: str = "auto",
    loss: Loss | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    watch: Watcher | None = None,
    **sections: Any,
) -> Result:
    """Train from Python, and leave a run folder as the command line does.

    `model` is the spec's model section (`{"hidden": 128}`, or None for its defaults); or a `Model` of the user's own modules, which is
    trained in place; or any nn.Module with a `loss(out, target) -> (sum, count)`, its own or given as `loss`, which can be trained on
    replicas but not split into stages; or a function that builds one of these from the facts of the data (`facts.vocabulary`,
    `facts.labels`, …). `data` is anything that `from_python` accepts: files, arrays, frames, Datasets; None for the files of the spec.

    `devices` above 1 starts that many workers on this machine, which run the calling script again up to this call; the code after it runs
    once. If a worker dies, all are restarted, up to `restarts` times without progress; with `min_devices`, also with fewer workers. Under
    torchrun, `fit` joins the workers that torchrun started.

    The other sections of the spec are given in `spec`, or one by one: `task`, `data`, `batch`, `train`. `callbacks` are told of steps,
    evaluations and epochs, and may end the run (see `Callback`). `progress` is shown in a terminal or a notebook, and not in a pipe, unless
    it is True or False; `watch` receives it instead of the screen.

    >>> import carrywave as cw
    >>> sequences = [([[float(up), float(step)] for step in range(6)], "up" if up else "down") for up in [0, 1] * 20]
    >>> how = {"task": "classification", "batch": {"tokens": 64}, "train": {"epochs": 6, "lr": 0.05}}
    >>> result = cw.fit({"hidden": 8, "layers": 1}, sequences, **how, run="runs/ups")
    >>> result.metrics["valid"]["accuracy"]
    1.0
    >>> result.run.name
    'ups'
    """
    heap.keep()
    record = script_workers.begin()
    with script_workers.working():
        if model is not None and not isinstance(model, Mapping) and not callable(model):
            raise UserError(f"model is a {type(model).__name__}; pass a cw.Model, a function that builds one, or the spec's model section")
        if inspect.isclass(kind := model) and issubclass(kind, nn.Module):
            raise UserError(f"model is the class {kind.__name__}; pass an instance of it, or a function that builds one")
        check_loss(loss, model)
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise PlanError(f"devices must be a whole number of workers, got {devices!r}; use 1 or more")
        check_callbacks(callbacks)
        full_spec = spec_of_call(spec, model, plan, sections)
        full_spec = full_spec if data is None else naming(data, full_spec)
        user_model = None if model is None or isinstance(model, Mapping) else model
        if user_model is not None and isinstance(user_model, nn.Module) and not isinstance(user_model, Model):
            user_model = OpaqueModel(user_model, loss, pooled=full_spec.pooled)
        if record is None and devices > 1 and not launched():
            check_workers(full_spec.plan_spec, devices)
            record = script_workers.relaunch(devices, restarts=restarts, min_devices=min_devices, shares=shares_on(device))
        if record is not None:
            return _result_of(record, user_model, device, loss)
        world = join(device, job_of(full_spec, run))
        if launched() and devices not in (1, world.size) and not launch_record.with_fewer():
            raise PlanError(f"devices={devices}, but the launcher started {world.size} worker{'s' * (world.size > 1)}; remove devices")
        seen = nullcontext(Silent()) if world.rank else watcher_of_call(progress) if watch is None else nullcontext(watch)
        with _left_at_the_end(world), seen as watching:
            place = run if run is None or is_address(run) else Path(run)
            weights = None if init is None else str(init)
            start = begin(full_spec, world, place, resume, weights, watching, from_files=False)
            with start.folder:
                files: dict[str, str] = {}
                if start.spec.data.train is not None:
                    prepared, files = prepare_in_turn(start)
                else:
                    with raise_on_all(world, no_timeout=True):
                        prepared = from_python(data, start.spec, codec=start.codec)
                restore = not script_workers.is_script_worker()  # whose caller reads the model from the run
                result = _train(start, prepared, user_model, files, workers=world.size, restore=restore, callbacks=callbacks, loss=loss)
        record = {"run": str(result.run), "ending": result.ending, "metrics": result.metrics}
        if script_workers.is_script_worker():
            script_workers.finish(record)
        script_workers.remember(record)
        return result


@contextmanager
def _left_at_the_end(world: World) -> Iterator[None]:
    """Destroy the process group at the end, but not after a failure: the other ranks may never reach the point where they would."""
    with watched(world):
        yield
    leave(world)


def _result_of(record: Mapping[str, Any], user_model: Own | OpaqueModel | None, device: str, loss: Loss | None) -> Result:
    """The result of a run that worker processes trained."""
    folder = Path(record["run"])
    where = pick_device(device)
    if user_model is None:
        try:
            opened = open_run(folder, device)
        except torch.OutOfMemoryError:  # workers have split it because no device can hold all of it
            opened = open_run(folder, "cpu")
        return Result(folder, record["ending"], record["metrics"], opened.model, opened.task)
    saved = Run.open(folder)
    spec = load_own(folder / "spec.yaml")
    codec = codec_of(saved, spec)
    facts, scale, _, _ = facts_of(saved, codec)
    model = own_model(user_model, spec, facts, loss)
    model.to(where, parameter_dtype(spec.train.precision))
    take_weights(model, saved.weights, str(saved.weights))
    return Result(folder, record["ending"], record["metrics"], shown(model), Task(spec, codec, facts, scale))


def _train(
    start: Start,
    prepared: Prepared,
    user_model: Own | OpaqueModel | None,
    files: Mapping[str, str],
    *,
    workers: int,
    dry_run: bool = False,
    restore: bool = False,
    callbacks: Sequence[Callback] = (),
    loss: Loss | None = None,
) -> Result:
    for line in idle(start.spec, valid=prepared.valid is not None):
        start.watch.say(line)
    spec = with_kept_weights(start.spec, None if prepared.valid is None else prepared.valid.counted)
    spec, why_crf = with_whole_spans(spec, prepared)
    spec, world, watch, folder = fitted(spec, prepared.facts), start.world, start.watch, start.folder
    unfit = not_made_for_bf16(world)
    goes_on = None if start.snapshot is None else folder.path
    linear = None if user_model is not None or dry_run else linear_part(spec, prepared, world, goes_on, watch.say)
    with raise_on_all(world):
        check_installed(spec.train.track if world.rank == 0 else ())
        built = None if user_model is None else own_model(user_model, spec, prepared.facts, loss)
        if built is not None:
            spec = spec.model_copy(update={"train": in_model_dtype(spec.train, built)})
        precision, why_precision = settled(unfit, world.size, built) if spec.train.precision == AUTO else (spec.train.precision, None)
        spec = with_precision(spec, precision)
        task = Task.of(spec, prepared.codec, prepared.facts, prepared.train)
        task = replace(task, own_model=user_model is not None, linear=linear)
        parts = DataParts(
            task.part("train", prepared.train),
            None if prepared.valid is None else task.part("valid", prepared.valid),
            None if prepared.test is None else task.part("test", prepared.test),
        )
        held_out.check(spec, parts)
    units = Units.of(spec, prepared.facts) if user_model is None else None
    layers = spec.model.layers if built is None else built.lstm.num_layers if isinstance(built, Model) else 0
    pooled = spec.pooled if built is None else built.pooled
    whole = spec.reads_whole if built is None else isinstance(built, Model) and built.whole_head
    steps = None if dry_run else partial(step_seconds, task=task, part=parts.train, order=order_for(spec, parts.train.view, training=True))
    planned = plan_run(world, PlanRequest(spec, units, layers, pooled, workers, start.before, whole, steps), watch.say)
    plan = planned.plan
    with raise_on_all(world):
        check_sync(plan, spec.train.sync)
        order = order_for(spec, parts.train.view, training=True)
    alike = {"version": __version__, "torch": torch.__version__, "data": prepared.fingerprint, "callbacks": in_words(callbacks)}
    check_agreement(world, alike | _flat(spec))
    with raise_on_all(world):
        mesh = None if dry_run else Mesh(world, plan)
        model = built if built is not None else drawn_model(task, prepared, start, mesh)
        check_can_judge(spec.train.best, model, prepared.facts.labels)
        model.to(parameter_dtype(spec.train.precision))
    if start.init is not None:
        begin_from(start.init, model, world)
    transports = None if mesh is None else transports_of_run(mesh, model, spec)
    kept = start.visibility.line(folder.path, world.size)
    seated = [] if mesh is None else mesh.seats()
    watch.begin(summarize(spec, prepared.facts, model, plan, order, str(world.device), units, transports, seated, kept))
    chosen = [why for why in (why_precision, why_crf) if why is not None]
    for line in (*chosen, *noted(spec, order, model, planned.reasons, prepared, parts)):
        watch.say(line)
    if mesh is None:
        watch.end("dry run: nothing was trained and no run folder was written")
        return Result(folder.path, None, {}, shown(model), task, prepared.about)
    with unwinding(launch_record.trains), folder:
        with raise_on_all(world):
            trainer = Trainer(model, spec.train, mesh=mesh, keep_state=spec.streams and not isinstance(model, OpaqueModel))
            data = Data(prepared.fingerprint, files)
            checkpointer = Checkpointer(spec, trainer, folder, data, watch, start.visibility)
        state = LoopState.start(trainer.device)
        left = history.last_trace(folder.path / TIMING) if world.rank == 0 else None
        if start.snapshot is not None:
            state = checkpointer.restore(start.snapshot)
            state.extend(spec.train)
            checkpointer.mend_weights(state, start.snapshot)
            resuming = f"resuming from step {state.step} (epoch {state.epoch + 1})"
            watch.say(resuming if state.trains(spec.train) else state.over(spec.train))
        with raise_on_all(world):
            loop = Loop(
                spec,
                task,
                trainer,
                parts,
                order,
                folder,
                watch,
                state,
                checkpointer,
                compare=Comparison(trainer, planned.prediction, watch.say) if trainer.sync is None else None,
                callbacks=Callbacks(callbacks, world),
            )
        if loop.trains:
            # The files of a finished run describe what was trained, so they stay as they are.
            with raise_on_all(world):
                named = backends(spec, model, plan, order, str(world.device))
                extra = {"backends": named, "transport": str(transports or ""), "workers": [asdict(seat) for seat in seated]}
                folder.write_json("plan.json", asdict(plan) | extra)
                folder.write_json("codec.json", json.loads(prepared.codec.to_json()))
                origin = {"scale": task.scale.to_json(), "own_model": user_model is not None, "given_codec": start.codec is not None}
                folder.write_json("facts.json", asdict(prepared.facts) | origin | {"files": dict(files)})
                if linear is not None:
                    folder.write_linear(linear.tensors())
                if start.snapshot is None:
                    folder.expect_snapshot(start.init)
                folder.write_spec(spec)  # last: a folder without it has no run yet, however the process ended
                folder.write_history(_started(state.step, left, trainer))
            with raise_on_all(world, same_message=True, no_timeout=True):
                folder.upload()
        elif history.unended(folder.path):
            with raise_on_all(world):
                folder.write_history(_started(state.step, left, trainer))
        checkpointer.writer.meet()
        no_files = user_model is not None or spec.data.train is None
        workers_too = f" --devices {world.size}" if world.size > 1 else ""
        by_command = f"carrywave train --resume --run {folder.shown}{workers_too}"
        again_with = f"cw.fit(..., run={folder.shown!r}, resume=True)" if no_files else by_command
        trackers = spec.train.track if world.rank == 0 else ()
        folder.tracking = Tracking.of(trackers, Description.of(folder.path, spec), folder.path / METRICS, watch.say)
        with checkpointer.watched(), folder.tracking as tracking:
            result = run_to_end(loop, watch, again_with, restore=restore)
            tracking.how = "stopped" if result.ending in ASKED else "finished"
            with raise_on_all(world, same_message=True, no_timeout=True):
                if folder.remote is not None:
                    folder.close()  # the events of TensorBoard are complete then
                    folder.upload()
            return result


def _started(step: int, left: history.Trace | None, trainer: Trainer) -> dict[str, Any]:
    """The line of the run's history that training starts here."""
    device = trainer.device
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = {"carrywave": __version__, "torch": torch.__version__}
    workers, attempt = trainer.plan.workers, launch_record.attempt()
    return history.start_row(step, left, attempt=attempt, workers=workers, device=named, versions=versions)


def _flat(spec: Spec) -> dict[str, str]:
    """Every key of a spec that workers must agree on, by its full name; file paths may differ from host to host and are left out."""
    values = spec.model_dump(mode="json")
    flat: dict[str, str] = {}
    for section, value in values.items():
        pairs = value.items() if isinstance(value, dict) else [("", value)]
        flat |= {f"{section}.{key}".rstrip("."): json.dumps(setting) for key, setting in pairs}
    for name in ("train", "valid", "test", "cache"):
        flat.pop(f"data.{name}", None)
    return flat
