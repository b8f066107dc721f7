"""Which of two evaluations is the better one, by the metric that the spec chooses (`train.best`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from carrywave.errors import SpecError
from carrywave.model.model import Model
from carrywave.model.opaque_model import Whole
from carrywave.spec.best_metric import OF_LOSS, score
from carrywave.tasks.metrics import TOP

Values = Mapping[str, float]


def check_can_judge(metric: str, model: Model | Whole, labels: Sequence[str]) -> None:
    """Refuse, before anything is trained, a metric that this model or these labels cannot have."""
    if metric not in OF_LOSS and not model.has_output:
        raise SpecError(f"train.best={metric} needs predictions, but the head has only a loss; add a forward method, or use loss")
    if metric == "top_5_accuracy" and len(labels) <= TOP:
        raise SpecError(f"train.best={metric}, but there are only {len(labels)} labels; use accuracy")


def score_of(metric: str, values: Values) -> float:
    """The metric of an evaluation in a form in which lower is better; NaN is worse than anything."""
    if metric not in values:
        known = ", ".join(name for name in values if not name.startswith(("naive_", "coverage_")))
        raise SpecError(f"train.best={metric}, but the evaluation of valid gives only {known}; use one of these")
    return score(metric, values[metric])


def improves(metric: str, values: Values, best: Values | None) -> bool:
    """True if an evaluation is better than the best one so far."""
    if best is None:
        return True
    new, old = score_of(metric, values), score_of(metric, best)
    return new < old or (math.isnan(old) and not math.isnan(new))
