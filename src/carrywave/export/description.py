"""The description that lies beside every export, model.json: what goes in and comes out, and how data becomes one and results the other."""

from __future__ import annotations

import json
from typing import Any

from carrywave import __version__
from carrywave.export.portable import NEXT, Portable
from carrywave.model.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.encoders import Embedding
from carrywave.model.heads import Forecast, Pooled, Softmax
from carrywave.model.model import Model
from carrywave.model.portable_names import arguments, outside
from carrywave.spec.spec import Spec
from carrywave.step.worker_setup import tensors_of
from carrywave.tasks.task import Task


def describe(task: Task, portable: Portable, form: str, precision: str) -> str:
    """The description as JSON."""
    model = portable.model
    whole: dict[str, Any] = {
        "carrywave": __version__,
        "task": task.spec.task,
        "format": form,
        "precision": precision,
        "stateful": portable.stateful,
    }
    if form != "safetensors":
        whole |= {
            "inputs": [port.to_json() for port in portable.inputs],
            "outputs": [port.to_json() for port in portable.outputs],
            "state": {port.name: port.name + NEXT for port in portable.state},
        }
    else:
        tensors = tensors_of(model)
        whole["weights"] = {theirs: list(tensors[ours].shape) for ours, theirs in outside(tensors, model.lstm).items()}
    whole |= {"model": _network(model), "data": _data(task.spec), "codec": json.loads(task.codec.to_json())}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _network(model: Model) -> dict[str, Any]:
    lstm, head = model.lstm, model.head
    found: dict[str, Any] = {
        "embedding": [model.encoder.vocabulary, model.encoder.width] if isinstance(model.encoder, Embedding) else None,
        "lstm": arguments(lstm),
        "layer_norm": lstm.layer_norm,
        "learned_carry": lstm.learned_carry,
        "head": {"inputs": lstm.output_size},
    }
    described = found["head"]
    if isinstance(head, Softmax):
        tied = isinstance(model.encoder, Embedding) and head.weight is model.encoder.weight
        described |= {"kind": "linear", "outputs": head.classes, "tied": tied}
    elif isinstance(head, AdaptiveSoftmax):
        described |= {"kind": "adaptive softmax", "outputs": head.classes, "cutoffs": list(head.cutoffs[:-1])}
    elif isinstance(head, Forecast):
        described |= {
            "kind": "forecast",
            "horizon": head.horizon,
            "columns": head.outputs,
            "quantiles": None if head.quantiles is None else list(head.quantiles),
        }
    elif isinstance(head, Pooled):
        described |= {"kind": "pooled linear", "outputs": head.weight.shape[0], "pool": head.pooling}
    return found


def _data(spec: Spec) -> dict[str, Any]:
    """What of the spec's data section says how numbers are made; the codec has the rest."""
    wanted = {"forecasting": {"horizon", "quantiles", "season", "residual", "context"}}.get(spec.task, set[str]())
    return {name: value for name, value in spec.data.model_dump(mode="json").items() if name in wanted}
