"""The story of a run, told once: open its folder, read the data, choose a plan, make or resume the model, train, finish.

Every worker goes through it from top to bottom. Each step is a file of `start`, or of this folder; the loop is in `loop`, one step of it in
`step/trainer.py`. What it all rests on: what is trained on is a function of (data, seed, epoch), so that a snapshot of the weights, the
optimizer, the carry and a position is all that a run needs to go on bit for bit.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from carrywave import __version__
from carrywave.errors import unwinding
from carrywave.launch import launch_record
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.parallel.devices import pick_device
from carrywave.parallel.liveness.peer_watchdog import watched
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.world import World, check_agreement, join, leave, raise_on_all
from carrywave.runs.tracking import Tracking
from carrywave.runs.watcher import Silent, Watcher
from carrywave.spec.spec import Spec
from carrywave.step.trainer import Trainer
from carrywave.train.callbacks import Callbacks, in_words
from carrywave.train.checkpointer import Checkpointer, Data
from carrywave.train.finish import finish, shown
from carrywave.train.loop import Loop
from carrywave.train.result import Result
from carrywave.train.start.initial_model import make_model
from carrywave.train.start.opening import RunRequest, Start, begin
from carrywave.train.start.reading import open_data
from carrywave.train.start.settling import Ready, choose_plan, flat, settle
from carrywave.train.start.summary import announce, backends, transport_of


def train(
    spec: Spec,
    *,
    run: Path | None = None,
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
    asked = RunRequest(spec, run, resume, init, watch or Silent(), from_files=True, dry_run=dry_run, planned=devices)
    return carry_out(asked, World.alone(pick_device(device)) if dry_run else join(device))


def carry_out(asked: RunRequest, world: World) -> Result:
    """A run on this worker, from its folder to its result."""
    with _left_at_the_end(world):
        start = begin(asked, world)
        with start.folder:
            ready = settle(start, open_data(start))
            plan, reasons = choose_plan(start, ready)
            agree(start, ready)
            with raise_on_all(world):
                mesh = None if asked.dry_run else Mesh(world, plan)
                model = make_model(start, ready, mesh)
            announce(start, ready, (plan, reasons), model, mesh)
            if mesh is None:
                asked.watch.end("dry run: nothing was trained and no run folder was written")
                return Result(start.folder.path, None, {}, shown(model), ready.task, ready.data.about)
            with unwinding(launch_record.trains):
                loop = make_loop(start, ready, mesh, model)
                if start.snapshot is not None:
                    resume(start, loop)
                write_start(start, ready, loop)
                return finish(start, loop)


def agree(start: Start, ready: Ready) -> None:
    """Require that all workers were asked for the same."""
    alike = {"version": __version__, "torch": torch.__version__, "data": ready.data.fingerprint}
    check_agreement(start.world, alike | {"callbacks": in_words(start.asked.callbacks)} | flat(ready.spec))


def make_loop(start: Start, ready: Ready, mesh: Mesh, model: Model | OpaqueModel) -> Loop:
    """The trainer, what keeps its snapshots and its metrics, and the loop at the beginning of a run."""
    spec, world, asked = ready.spec, start.world, start.asked
    with raise_on_all(world):
        trainer = Trainer(model, spec.train, mesh=mesh, keep_state=spec.streams and not isinstance(model, OpaqueModel))
        checkpointer = Checkpointer(spec, trainer, start.folder, Data(ready.data.fingerprint, ready.files), asked.watch)
        if world.rank == 0:
            start.folder.tracking = Tracking.of(spec, start.folder.path, asked.watch.say)
        callbacks = Callbacks(asked.callbacks, world)
        return Loop(ready.task, trainer, ready.parts, ready.order, start.folder, asked.watch, checkpointer, callbacks)


def resume(start: Start, loop: Loop) -> None:
    """Go on from the snapshot: weights, optimizer, carry and position are its, and the metrics are cut back to it."""
    assert start.snapshot is not None
    train_spec = loop.spec.train
    state = loop.state = loop.checkpointer.restore(start.snapshot)
    resuming = f"resuming from step {state.step} (epoch {state.epoch + 1})"
    start.asked.watch.say(resuming if state.trains(train_spec) else state.over(train_spec))


def write_start(start: Start, ready: Ready, loop: Loop) -> None:
    """Write what a run consists of before its first step. The files of a finished run describe what was trained, so they stay."""
    folder, spec, world = start.folder, ready.spec, start.world
    with raise_on_all(world):
        if loop.trains:
            folder.write_json("plan.json", plan_file(ready, loop.trainer))
            folder.write_json("codec.json", json.loads(ready.data.codec.to_json()))
            given = {
                "own_model": start.asked.model is not None,
                "given_codec": start.codec is not None,
                "files": dict(ready.files),
                "init": start.init,
            }
            folder.write_json("facts.json", asdict(ready.data.facts) | {"scale": ready.task.scale.to_json()} | given)
            if ready.task.linear is not None:
                folder.write_linear(ready.task.linear.tensors())
            folder.write_spec(spec)  # last: a folder without it has no run yet, however the process ended
        if loop.trains or not folder.ended:
            folder.write_history("start", **started(loop))


def plan_file(ready: Ready, trainer: Trainer) -> dict[str, Any]:
    """The plan, what computes the layers under it, and where the workers sit."""
    mesh, seats = trainer.mesh, [asdict(seat) for seat in trainer.mesh.seats()]
    named = backends(ready.spec, trainer.model, trainer.plan, ready.order, str(mesh.world.device))
    return asdict(trainer.plan) | {"backends": named, "transport": transport_of(mesh), "workers": seats}


def started(loop: Loop) -> dict[str, Any]:
    """What the run's history says of this start."""
    device = loop.trainer.device
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = {"carrywave": __version__, "torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    attempt, workers = launch_record.attempt(), loop.trainer.plan.workers
    return {"step": loop.state.step, "attempt": attempt, "workers": workers, "device": named} | versions


@contextmanager
def _left_at_the_end(world: World) -> Iterator[None]:
    """Destroy the process group at the end, but not after a failure: the other ranks may never reach the point where they would."""
    with watched(world):
        yield
    leave(world)
