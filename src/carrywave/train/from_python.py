"""`cw.fit`: a run from Python, with the user's own data and modules; the same story as that of the command."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from carrywave import heap
from carrywave.data.prepare import naming
from carrywave.errors import PlanError, UserError
from carrywave.launch import launch_record, script_workers
from carrywave.launch.launcher import RESTARTS, Patience
from carrywave.model.model import Model
from carrywave.model.opaque_model import Loss, OpaqueModel
from carrywave.parallel.devices import pick_device
from carrywave.parallel.process_state import leaving_no_trace
from carrywave.parallel.startup.launcher_env import launched
from carrywave.parallel.world import join
from carrywave.plan.plan import Plan
from carrywave.prediction.saved_run import codec_of, facts_of, open_run
from carrywave.runs.checkpoint.weights import take_weights
from carrywave.runs.display import watcher_of_call
from carrywave.runs.run import Run
from carrywave.runs.watcher import Silent, Watcher
from carrywave.spec.load import load_own, parse, read_values
from carrywave.spec.plan_spec import PlanSpec
from carrywave.spec.spec import Spec
from carrywave.step.checks.arguments import check_loss
from carrywave.step.precision import parameter_dtype
from carrywave.tasks.task import Task
from carrywave.train.callbacks import Callback, check_callbacks
from carrywave.train.finish import shown
from carrywave.train.fit import carry_out
from carrywave.train.result import Result
from carrywave.train.start.opening import RunRequest
from carrywave.train.start.own_model import Own, own_model


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
            _check_workers(full_spec.plan_spec, devices)
            record = script_workers.relaunch(devices, Patience(restarts, min_devices))
        if record is not None:
            return _result_of(record, user_model, device, loss)
        world = join(device)
        if launched() and devices not in (1, world.size) and not launch_record.with_fewer():
            raise PlanError(f"devices={devices}, but the launcher started {world.size} worker{'s' * (world.size > 1)}; remove devices")
        seen = nullcontext(Silent()) if world.rank else watcher_of_call(progress) if watch is None else nullcontext(watch)
        with seen as watching:
            asked = RunRequest(
                full_spec,
                None if run is None else Path(run),
                resume,
                None if init is None else str(init),
                watching,
                data=data,
                model=user_model,
                loss=loss,
                callbacks=callbacks,
                restore=not script_workers.is_script_worker(),  # whose caller reads the model from the run
            )
            result = carry_out(asked, world)
        record = {"run": str(result.run), "ending": result.ending, "metrics": result.metrics}
        if script_workers.is_script_worker():
            script_workers.finish(record)
        script_workers.remember(record)
        return result


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
    take_weights(model, saved.weights)
    return Result(folder, record["ending"], record["metrics"], shown(model), Task(spec, codec, facts, scale))


def spec_of_call(spec: Spec | Mapping[str, Any] | str | Path | None, model: Any, plan: Any, sections: Mapping[str, Any]) -> Spec:
    """The spec that a call from Python asks for: a whole one, or its sections one by one, which take precedence."""
    base: dict[str, Any]
    # Only fields that were set: the others may still be derived from elsewhere.
    if isinstance(spec, Spec):
        base = spec.model_dump(mode="json", exclude_unset=True)
    elif isinstance(spec, str | Path):
        base = read_values(Path(spec))
    else:
        base = dict(spec or {})
    for name, value in sections.items():
        old = base.get(name)
        base[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
    if isinstance(model, Mapping):
        base["model"] = dict(model)
    if isinstance(plan, Plan):
        plan = {name: value for name, value in asdict(plan).items() if value != getattr(Plan(), name)}
    if plan is not None and plan != "auto":
        base["plan"] = dict(plan) if isinstance(plan, Mapping) else plan
    return parse(base, defaults=model is None or isinstance(model, Mapping))


def _check_workers(plan: PlanSpec, devices: int) -> None:
    """Refuse before starting workers what all of them would refuse."""
    if devices % plan.stages or (plan.replicas is not None and plan.replicas * plan.stages != devices):
        raise PlanError(
            f"devices={devices} does not match plan.replicas x plan.stages ({plan.replicas or 'any number'} x {plan.stages}); "
            "change one of them"
        )
