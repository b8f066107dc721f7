"""The metric that decides which weights are the best (`train.best`): which tasks have it, and in which direction it improves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

BestMetric = Literal[
    "loss", "unweighted_loss", "perplexity", "bits", "accuracy", "macro_f1", "top_5_accuracy", "mae", "rmse", "mase", "pinball"
]

OF_TASK: Mapping[str, tuple[str, ...]] = {
    "language": ("loss", "perplexity", "bits"),
    "classification": ("loss", "unweighted_loss", "accuracy", "macro_f1", "top_5_accuracy"),
    "tagging": ("loss", "unweighted_loss", "accuracy", "macro_f1", "top_5_accuracy"),
    "forecasting": ("loss", "mae", "rmse", "mase", "pinball"),
    "regression": ("loss", "mae", "rmse"),
}
HIGHER = ("accuracy", "macro_f1", "top_5_accuracy")  # better if higher; every other metric is better if lower
OF_LOSS = ("loss", "perplexity", "bits")  # follow from the loss; the others need what a head predicts
OF_POINTS = ("mae", "rmse", "mase")  # need a point forecast, which among quantiles is the median


def check_best(metric: str, task: str, quantiles: Sequence[float] | None, *, weighted: bool) -> None:
    """Refuse a metric that evaluations of this task do not have."""
    if metric not in OF_TASK[task]:
        raise ValueError(f"train.best={metric} is not a metric of {task}; use {', '.join(OF_TASK[task])}")
    if metric == "unweighted_loss" and not weighted:
        raise ValueError("train.best=unweighted_loss is for train.class_weights, without which it is the loss; use loss")
    if metric == "pinball" and quantiles is None:
        raise ValueError("train.best=pinball needs data.quantiles; set them, or use loss, mae, rmse or mase")
    if metric in OF_POINTS and quantiles is not None and 0.5 not in quantiles:
        raise ValueError(f"train.best={metric} needs the median; add 0.5 to data.quantiles, or use pinball")


def score(metric: str, value: float) -> float:
    """The value in a form in which lower is better."""
    return -value if metric in HIGHER else value
