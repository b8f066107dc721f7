"""Bands around the forecasts of a trained model (`data.bands`), from the errors of its best weights on valid."""

from __future__ import annotations

from dataclasses import replace

from carrywave.errors import SpecError
from carrywave.parallel.liveness import heartbeat
from carrywave.parallel.world import raise_on_all
from carrywave.runs.evaluation import evaluate
from carrywave.runs.run_place import BANDS
from carrywave.spec.spec import Spec
from carrywave.tasks.bands import Bands, within_own
from carrywave.tasks.kept_forecasts import KeptForecasts
from carrywave.tasks.metrics import Metric
from carrywave.train.evaluations import DataParts, leave_if_asked
from carrywave.train.loop import Loop


def check(spec: Spec, parts: DataParts) -> None:
    """Refuse bands that nothing can be measured on, before anything is trained."""
    if spec.task == "forecasting" and spec.data.bands is not None and parts.valid is None:
        raise SpecError("data.bands are measured on valid, and there is none; set data.valid, data.share or data.split, or remove them")


def measure(loop: Loop) -> dict[str, float]:
    """Measure the bands, write them, and return how much of valid lies within them: by their making, what was asked for."""
    valid, trainer = loop.parts.valid, loop.trainer
    if loop.spec.task != "forecasting" or loop.spec.data.bands is None or valid is None:
        return {}
    seen: list[Metric] = []

    def tick(done: int, total: int) -> None:
        heartbeat.mark()
        if done < total:
            leave_if_asked(loop.stop, trainer.mesh.world, done)

    kept_by = trainer.stage, trainer.capture, trainer.evaluation_splits
    part, look = replace(valid, kept=True), seen.append
    evaluate(
        trainer.model, loop.task, part, mesh=trainer.mesh, stage=kept_by[0], capture=kept_by[1], splits=kept_by[2], tick=tick, look=look
    )
    if not seen or not isinstance(kept := seen[0], KeptForecasts):
        loop.watch.say("there are no bands: the model's head does not give a single value for each target")
        return {}
    errors_NH = kept.errors(summed=loop.spec.data.transform == "diff")
    bands = Bands.of(loop.spec.data.bands, errors_NH)
    loop.task = replace(loop.task, bands=bands)
    with raise_on_all(trainer.mesh.world, same_message=True):
        loop.folder.write_json(BANDS, bands.to_json() | {"step": loop.state.weights_step})
    loop.watch.say(bands.said())
    return within_own(bands, errors_NH)
