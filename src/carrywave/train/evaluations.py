"""Evaluations during a run: of which parts of the data, which is better (`train.best`), and how one is left when a stop is requested.

Whoever asks for a stop may not wait for an evaluation to end; all workers leave it at the same batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from carrywave.data.text.tag_scheme import tags_of
from carrywave.errors import SpecError
from carrywave.launch.signals import Reason, Stop
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.parallel.world import World, all_gather_json
from carrywave.spec.train_spec import OF_LOSS, score
from carrywave.tasks.baselines import PREFIXES
from carrywave.tasks.kind import Part
from carrywave.tasks.metrics.labels import TOP

ASK_EVERY = 32  # batches between two collective checks, each of which costs a message

Values = Mapping[str, float]


@dataclass(frozen=True)
class DataParts:
    """The parts of the data that a run reads."""

    train: Part
    valid: Part | None
    test: Part | None


def check_metric(metric: str, model: Model | OpaqueModel, labels: Sequence[str]) -> None:
    """Refuse, before anything is trained, a metric that this model or these labels cannot have."""
    if metric not in OF_LOSS and not model.has_output:
        raise SpecError(f"train.best={metric} needs predictions, but the head has only a loss; add a forward method, or use loss")
    if metric == "top_5_accuracy" and len(labels) <= TOP:
        raise SpecError(f"train.best={metric}, but there are only {len(labels)} labels; use accuracy")
    if metric == "span_f1" and tags_of(labels) is None:
        some = ", ".join(labels[:3])
        raise SpecError(f"train.best={metric} needs labels that write spans, such as B-X, I-X and O, not {some}; use accuracy or macro_f1")


def score_of(metric: str, values: Values) -> float:
    """The metric of an evaluation in a form in which lower is better; NaN is worse than anything."""
    if metric not in values:
        names = ", ".join(name for name in values if not name.startswith((*PREFIXES, "coverage_")))
        raise SpecError(f"train.best={metric}, but the evaluation of valid gives only {names}; use one of these")
    return score(metric, values[metric])


def improves(metric: str, values: Values, best: Values | None) -> bool:
    """True if an evaluation is better than the best one so far."""
    if best is None:
        return True
    new, old = score_of(metric, values), score_of(metric, best)
    return new < old or (math.isnan(old) and not math.isnan(new))


class Stopped(Exception):
    """A stop was requested during an evaluation, which is abandoned and repeated when the run is resumed."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


def leave_if_asked(stop: Stop | None, world: World, done: int) -> None:
    """Raise `Stopped` if a stop was requested. Collective: every rank calls it after each batch but the last. None: never leave."""
    if stop is None or (world.size > 1 and done % ASK_EVERY):
        return
    if world.size == 1:
        reason = stop.asked
    else:
        reason = stop.decided([sum(votes) for votes in zip(*all_gather_json(world, stop.votes), strict=True)])
    if reason is not None:
        raise Stopped(reason)
