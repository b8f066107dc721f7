"""Carries out a run that is set up: training, then the best weights, their evaluation on test, and the last line."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

from carrywave.errors import RunError
from carrywave.launch.signals import Stop
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.parameter_placement import fill
from carrywave.parallel.gather import broadcast
from carrywave.parallel.world import raise_on_all
from carrywave.runs.checkpoint.weights import load_parameters, read_weights
from carrywave.runs.tracking import Tracking
from carrywave.step.sync.pushing import Pushing
from carrywave.tasks.baselines import PREFIXES, beside, verdicts
from carrywave.train import held_out
from carrywave.train.evaluations import Stopped
from carrywave.train.loop import Loop
from carrywave.train.loop_state import ASKED
from carrywave.train.mixture import choose_share
from carrywave.train.result import Result
from carrywave.train.start.opening import Start


def shown(model: Model | OpaqueModel) -> nn.Module:
    """The model as a result holds it: in evaluation mode, and the user's own module by itself."""
    model.eval()
    return model.module if isinstance(model, OpaqueModel) else model


def finish(start: Start, loop: Loop) -> Result:
    """Train what is left to train, or until a stop is asked for, and evaluate the best weights."""
    request, reached, trains = start.asked, dict[str, dict[str, float]](), loop.trains
    # A stop may be heard of again after it was agreed on: each worker whose launcher is gone learns of that by itself.
    with Stop() as stop, start.folder.tracking or Tracking({}, loop.watch.say) as tracking:
        loop.stop = stop
        try:
            ending = loop.state.ending or loop.run(stop)
            reached = {} if ending in ASKED else _evaluate_best(loop, restore=request.restore)
        except Stopped as interruption:
            ending = interruption.reason
        tracking.how = "stopped" if ending in ASKED else "finished"
        if trains or not loop.folder.ended:  # the files of a finished run stay as they are
            with suppress(RunError):  # a run that is complete does not fail over a line of its history
                loop.folder.write_history("end", step=loop.state.step, ending=ending)
        if ending in ASKED:
            loop.watch.end(f"{ending} at step {loop.state.step}; resume with: {_again_with(start, loop)}")
            reached = {}
        else:
            _say(loop, reached, ending)
        return Result(loop.folder.path, ending, reached, shown(loop.trainer.model), loop.task)


def _again_with(start: Start, loop: Loop) -> str:
    """What resumes a run that was asked to stop."""
    path = loop.folder.path
    if start.asked.model is not None or loop.spec.data.train is None:
        return f"cw.fit(..., run={str(path)!r}, resume=True)"
    return f"carrywave train --resume --run {path}{f' --devices {start.world.size}' if start.world.size > 1 else ''}"


def _say(loop: Loop, reached: Mapping[str, Mapping[str, float]], ending: str) -> None:
    """Say what a run has reached."""
    at, watch = loop.state, loop.watch
    if isinstance(loop.trainer.sync, Pushing):
        watch.say(loop.trainer.sync.summary())
    for part, values in reached.items():
        for line in (beside(values), *verdicts(values)):
            if line is not None:
                watch.say(f"{part}: {line}")
    scores = "; ".join(f"{part} {_in_short(values)}" for part, values in reached.items())
    stopped = {"early": " (stopped early)", "callback": " (ended by a callback)"}.get(ending, "")
    steps = f"{at.step} step{'s' * (at.step != 1)}"
    best_by = loop.spec.train.best
    last = loop.spec.train.weights == "last"
    best = "" if at.best is None else "last " if last else "best " if best_by == "loss" else f"best by {best_by}: "
    watch.end(f"{loop.folder.path}: {steps}{stopped}{f'; {best}{scores}' if scores else ''}")


def _in_short(values: Mapping[str, float]) -> str:
    """The metrics for the last line of a run: those of single columns, and of simple forecasts, are in the rows above it."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items() if not name.endswith("]") and not name.startswith(PREFIXES))


def _evaluate_best(loop: Loop, *, restore: bool) -> dict[str, dict[str, float]]:
    """Load the best weights and evaluate them on the test part. Rank 0 reads them. If the model was split, each worker has the whole of it
    again in the end with `restore`; otherwise none ever has more than its part.
    """
    trainer, world = loop.trainer, loop.trainer.mesh.world
    best: dict[str, Tensor] = {}
    with raise_on_all(world, same_message=True):
        if world.rank == 0:
            best = read_weights(trainer.model, loop.folder.weights)
    held = trainer.parameters()
    best = broadcast(world, best, None if restore else lambda name, tensor: tensor if name in held else None)
    load_parameters(held, best)
    trainer.model.eval()
    reached = {}
    if loop.state.best is not None:
        reached["valid"] = dict(loop.state.best)
        found = held_out.look(loop)
        best = found.of_head(best)
        reached["valid"] |= found.within or {}
        if (choose_share(loop) or found.share < 1.0) and loop.parts.valid is not None:
            reached["valid"] = mixed = loop.evaluate(loop.parts.valid, weights_step=loop.state.weights_step)
            loop.callbacks.on_evaluation(lambda: loop.moment("valid", mixed))
    # Also if training had already finished: its last snapshot, to which the logs were truncated, is older than the test evaluation.
    if loop.parts.test is not None:
        reached["test"] = values = loop.evaluate(loop.parts.test, weights_step=loop.state.weights_step)
        loop.callbacks.on_evaluation(lambda: loop.moment("test", values))  # there is nothing left to stop
    if isinstance(trainer.model, Model) and trainer.plan.stages > 1 and restore:
        try:
            fill(trainer.model, best, trainer.device)
        except torch.OutOfMemoryError:  # it may have been split because no device can hold all of it
            fill(trainer.model, best, torch.device("cpu"))
            trainer.model.cpu()
    return reached
