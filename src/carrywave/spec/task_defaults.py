"""What a spec gets where it says nothing: defaults that depend on the task, chosen by the table of `benchmarks/quality.py`.

Keys that a user sets stay, and so do those of a spec that a run has written. What depends on the data as well is left open here (`auto`, 0
or nothing), and decided in `defaults` once the data is known. A user's own model reads what it is given: for it nothing is changed.
"""

from __future__ import annotations

from typing import Any

from carrywave.cells import lstm
from carrywave.spec.section import Section
from carrywave.spec.spec import PAST_STEPS, Spec

ADAM = ("adam", "adamw")
FRONT: dict[str, Any] = {"front_dropout": 0.2, "front_scales": True}
TAGS_DROPOUT = 0.3  # of labels that do not write spans
# Language: the learning rate of Adam times the width of the widest layer, of at least 128 units.
WIDTH_RATE = {"char": 1.28, "byte": 1.28, "word": 0.4, "bpe": 0.4}

Sections = dict[str, dict[str, Any]]


def with_task_defaults(spec: Spec) -> Spec:
    """The spec with the defaults of its task for keys that are not set."""
    by_task = {"language": _language, "tagging": _tagging, "transcription": _transcription, "forecasting": _forecasting}
    wanted = (_each_step if spec.each_step else by_task.get(spec.task, _pooled))(spec)
    if spec.train.optimizer in ADAM:
        wanted.setdefault("train", {}).update({"clip": 1.0, "schedule": "cosine"})
    else:
        # Rates, schedules and decay of other optimizers are another matter, and are up to those who choose them.
        wanted["train"] = {name: value for name, value in wanted.get("train", {}).items() if name in ("loss", "label_smoothing")}
    sections: dict[str, Section] = {}
    for name, values in wanted.items():
        section: Section = getattr(spec, name)
        new = {key: value for key, value in values.items() if key not in section.model_fields_set}
        if new:
            sections[name] = section.model_copy(update=new)
    return spec.model_copy(update=sections) if sections else spec


def _language(spec: Spec) -> Sections:
    if spec.train.optimizer not in ADAM:
        return {"model": {"init_bias": "zero"}}  # published recipes begin with torch's biases, and their rates are made for these
    # Not for a GRU: its update gate also shuts out what is new, and the loss was 0.01 to 0.02 higher.
    model: dict[str, Any] = {"forget_bias": 1.0} if spec.model.cell == lstm.CELL.name else {}
    return {"model": model, "train": {"lr": WIDTH_RATE[spec.data.tokens] / max(128, *spec.model.widths)}}


def _tagging(spec: Spec) -> Sections:
    both_ways = {} if spec.streams else {"bidirectional": True}
    left_open = takes_crf(spec) and (spec.model.crf == "auto" or "crf" not in spec.model.model_fields_set)
    return {"model": {**both_ways, **({"crf": "auto"} if left_open else {"dropout": TAGS_DROPOUT})}, "train": {"lr": 5e-3}}


def takes_crf(spec: Spec) -> bool:
    """True if labels can be chosen together: nothing else that is asked for needs single ones, or cuts sequences."""
    train, plan = spec.train, spec.plan_spec
    single = spec.data.multi_label or train.class_weights is not None or train.label_smoothing > 0 or train.best == "top_5_accuracy"
    cut = spec.streams or plan.share_head or plan.chunk_steps is not None
    return not single and not cut


def _transcription(spec: Spec) -> Sections:
    return {"model": {"bidirectional": True, "dropout": 0.2}, "train": {"lr": 3e-3, "warmup": 100}}


def _pooled(spec: Spec) -> Sections:
    model: dict[str, Any] = {"bidirectional": True, "layers": 1, "pool": "mean_max", "dropout": 0.4, "locked": True, "front": "auto"}
    if isinstance(spec.model.hidden, tuple):
        del model["layers"]
    if not ("front" in spec.model.model_fields_set and spec.model.front in ("none", ())):
        model |= FRONT
    smoothing = {"label_smoothing": 0.1} if spec.task == "classification" and not spec.data.multi_label else {}
    train: dict[str, Any] = {"lr": 3e-3, "warmup": 20, **smoothing}
    train |= _decay(spec, 0.02)
    return {"data": {"tokens": "word"}, "model": model, "train": train}


def _each_step(spec: Spec) -> Sections:
    model: dict[str, Any] = {"dropout": 0.2} if isinstance(spec.model.hidden, tuple) else {"layers": 1, "dropout": 0.2}
    if spec.model.cell == lstm.CELL.name:
        model["forget_bias"] = 3.0  # stores such as snow and soil keep their content for months
    return {"model": model, "train": {"lr": 2e-3}}


def _decay(spec: Spec, decay: float) -> dict[str, Any]:
    """AdamW with a decay; for another optimizer that is asked for, none."""
    other = "optimizer" in spec.train.model_fields_set and spec.train.optimizer != "adamw"
    return {} if other else {"optimizer": "adamw", "weight_decay": decay}


def _forecasting(spec: Spec) -> Sections:
    data = spec.data
    train: dict[str, Any] = {"lr": 2e-3} if data.levels is not None else {"lr": 2e-3, "loss": "mae"}
    train |= _decay(spec, 1e-3)
    model: dict[str, Any] = {"dropout": 0.2} if isinstance(spec.model.hidden, tuple) else {"layers": 1, "dropout": 0.2}
    if data.transform != "diff":
        model["linear"] = PAST_STEPS
    scale = {"standardize": "window"} if data.transform != "diff" else {}
    return {"data": {"channels": "independent", **scale}, "model": model, "train": train}
