"""Keys that people set where they have no effect: the commonest, for a line that says so. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from carrywave.spec.spec import Spec

OF_SERIES = ("horizon", "season", "quantiles", "bands", "distribution", "known", "transform")
OF_LABELS = ("classification", "tagging")
# (keys, where they act, that in words)
WHERE: tuple[tuple[tuple[str, ...], Callable[[Spec], bool], str], ...] = (
    (("train.patience", "train.factor"), lambda spec: spec.train.schedule == "plateau", "train.schedule=plateau"),
    (("train.momentum",), lambda spec: spec.train.optimizer == "sgd", "train.optimizer=sgd"),
    (("train.betas",), lambda spec: spec.train.optimizer in ("adam", "adamw"), "train.optimizer=adam"),
    (("train.class_weights", "train.label_smoothing"), lambda spec: spec.task in OF_LABELS, "tasks with labels"),
    (
        ("train.loss",),
        lambda spec: spec.task == "regression" or (spec.task == "forecasting" and spec.data.levels is None),
        "single numbers",
    ),
    (("data.split", "data.targets"), lambda spec: spec.reads_series, "tables of series"),
    (("data.share",), lambda spec: spec.data.valid is None and spec.data.split is None, "data without data.valid and data.split"),
    (tuple(f"data.{name}" for name in OF_SERIES), lambda spec: spec.task == "forecasting", "forecasting"),
    (("data.augment",), lambda spec: spec.augments, "separate sequences of numbers"),
    (("model.pool",), lambda spec: spec.pooled and spec.task != "transcription", "one target for each sequence"),
)


def idle(spec: Spec, *, valid: bool = True, numbers: bool = True) -> list[str]:
    """A line for each key that has another value than its default, and no effect. `valid`: there is validation data; `numbers`: steps are
    numbers, not tokens.
    """
    by_valid = bool(spec.train.early_stop) or spec.train.schedule == "plateau" or spec.train.best != "loss"
    unseen = [] if valid or not by_valid else ["train.best, early_stop and plateau go by validation data, and there is none here"]
    if spec.augments and not numbers:
        unseen.append("data.augment is for separate sequences of numbers, and has no effect here")
    return unseen + [
        f"{key} is for {what}, and has no effect here" for keys, acts, what in WHERE for key in keys if is_set(spec, key) and not acts(spec)
    ]


def is_set(spec: Spec, key: str) -> bool:
    """True if a key has another value than its default."""
    section, _, name = key.partition(".")
    values = getattr(spec, section)
    return bool(getattr(values, name) != type(values).model_fields[name].default)
