"""Which metric may pick the best weights of which task."""

from __future__ import annotations

from typing import Any

import pytest

from carrywave.errors import SpecError
from carrywave.spec.load import parse
from carrywave.spec.train_spec import MULTI_LABEL, OF_DISTRIBUTIONS, OF_TASK


@pytest.mark.parametrize(
    ("task", "data", "metric", "remedy"),
    [
        ("language", {}, "accuracy", "use loss, perplexity, bits"),
        ("classification", {}, "mae", "use loss, unweighted_loss, accuracy, macro_f1"),
        ("classification", {}, "micro_f1", "use loss, unweighted_loss, accuracy, macro_f1"),
        (
            "tagging",
            {"multi_label": True},
            "accuracy",
            r"several labels \(data.multi_label\); use loss, unweighted_loss, micro_f1",
        ),
        ("tagging", {}, "unweighted_loss", r"is for train\.class_weights and data\.weight, without which it is the loss; use loss"),
        ("forecasting", {}, "pinball", "needs data.quantiles"),
        ("forecasting", {"quantiles": [0.1, 0.9]}, "mase", "add 0.5 to data.quantiles"),
    ],
)
def test_a_metric_that_evaluations_do_not_have_is_refused(task: str, data: dict[str, Any], metric: str, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        parse({"task": task, "data": data, "train": {"best": metric}})


def test_every_metric_of_a_task_is_accepted() -> None:
    for task, metrics in OF_TASK.items():
        for metric in metrics:
            data = {"quantiles": [0.1, 0.5]} if metric == "pinball" else {"distribution": "normal"} if metric in OF_DISTRIBUTIONS else {}
            weights = {"class_weights": "balanced"} if metric == "unweighted_loss" else {}
            assert parse({"task": task, "data": data, "train": {"best": metric, **weights}}).train.best == metric
    for metric in MULTI_LABEL:
        how = {"best": metric, "class_weights": "balanced"}
        assert parse({"task": "tagging", "data": {"multi_label": True}, "train": how}).train.best == metric
