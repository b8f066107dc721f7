"""The description that lies beside every export, model.json: what goes in and comes out, and how data becomes one and results the other."""

from __future__ import annotations

import json
from typing import Any

from carrywave import __version__
from carrywave.data.codec import Codec
from carrywave.exporting.portable import NEXT, Portable, step_encoder
from carrywave.model.encoders import Embedding, Features
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.crf import CRF
from carrywave.model.heads.ctc import Ctc
from carrywave.model.heads.distributions import DistributionForecast
from carrywave.model.heads.forecast import Forecast
from carrywave.model.heads.pooled import Pooled
from carrywave.model.heads.step_numbers import StepNumbers
from carrywave.model.model import Model
from carrywave.model.over_time.front import Front
from carrywave.model.portable_names import arguments, beyond_cell, outside
from carrywave.model.vocabulary.spelled_words import SpelledWords, token_embedding
from carrywave.spec.data_spec import PARAMETERS
from carrywave.spec.spec import Spec
from carrywave.step.worker_setup import tensors_of
from carrywave.tasks.forecasting import Layout
from carrywave.tasks.task import Task

FORECASTING = ("horizon", "quantiles", "distribution", "season", "channels", "transform", "standardize")


def describe(task: Task, portable: Portable, form: str, precision: str) -> str:
    """The description as JSON; of a single step, with the state before the first."""
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
        if portable.step:
            first = dict(zip(portable.state, (part[0].tolist() for part in portable.start(1)), strict=True))
            whole["initial"] = {port.name: values[0] if len(set(values)) == 1 else values for port, values in first.items()}
    else:
        tensors = tensors_of(model)
        whole["weights"] = {theirs: list(tensors[ours].shape) for ours, theirs in outside(tensors, model.lstm).items()}
    if task.spec.data.multi_label:
        whole["threshold"] = 0.5
    step: dict[str, Any] = {}
    if task.spec.task == "forecasting":
        step = {"step": _step(task)}
    elif task.spec.each_step:
        step = {"step": {name: [{"column": column} for column in columns] for name, columns in _columns(task.codec).items()}}
    if task.codec.channels:
        [target] = task.codec.targets
        step["lane"] = {"column": task.codec.columns[target], "one_of": list(task.codec.channels)}
    whole |= {"model": _network(model), "data": _data(task.spec), **step, "codec": json.loads(task.codec.to_json())}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _network(model: Model) -> dict[str, Any]:
    lstm, head, encoder = model.lstm, model.head, step_encoder(model)
    words = token_embedding(encoder)
    network: dict[str, Any] = {
        "embedding": None if words is None else [words.vocabulary, words.width],
        "characters": list(encoder.characters.shape) if isinstance(encoder, SpelledWords) else None,
        "categories": [list(table) for table in encoder.inputs.tables] if isinstance(encoder, Features) else [],
        "front": [layer.model_dump() for layer in model.encoder.layers] if isinstance(model.encoder, Front) else [],
        "cell": lstm.cell.name,
        "torch_module": None if beyond_cell(lstm) else lstm.cell.torch_module,
        "lstm": arguments(lstm),
        "layer_norm": lstm.layer_norm,
        "cell_norm": lstm.cell_norm,
        "zoneout": dict(zip(lstm.cell.parts, lstm.zoneout, strict=True)),
        "heads": lstm.num_heads,
        "learned_carry": lstm.learned_carry,
        "head": {"inputs": lstm.output_size},
    }
    described = network["head"]
    if isinstance(head, Softmax):
        tied = isinstance(model.encoder, Embedding) and head.weight is model.encoder.weight
        described |= {"kind": "linear", "outputs": head.classes, "tied": tied}
    elif isinstance(head, AdaptiveSoftmax):
        described |= {"kind": "adaptive softmax", "outputs": head.classes, "cutoffs": list(head.cutoffs[:-1])}
    elif isinstance(head, DistributionForecast):
        described |= {
            "kind": "distribution",
            "distribution": head.distribution,
            "parameters": list(PARAMETERS[head.distribution]),
            "horizon": head.horizon,
            "columns": head.outputs,
            "past_steps": head.past_steps,
            "past_units": head.counts,  # after the past values, the size of a unit of each column in every row
            "linear": head.line is not None,
            "scaled": head.scaled,
        }
    elif isinstance(head, CRF):
        described |= {"kind": "crf", "outputs": head.classes, "scheme": head.scheme}
        described |= {} if head.words is None else {"word_scores": list(head.words.table.shape)}
    elif isinstance(head, Ctc):
        described |= {"kind": "ctc", "outputs": head.classes, "blank": head.blank, "upsample": head.upsample}
    elif isinstance(head, Forecast):
        described |= {
            "kind": "forecast",
            "horizon": head.horizon,
            "columns": head.outputs,
            "quantiles": None if head.quantiles is None else list(head.quantiles),
            "past_steps": head.past_steps,
            "linear": head.line is not None,
            "scaled": head.scaled,
        }
    elif isinstance(head, StepNumbers):
        described |= {"kind": "linear", "outputs": head.outputs, "tied": False}
    elif isinstance(head, Pooled):
        described |= {"kind": "pooled linear", "outputs": head.weight.shape[0], "pool": head.pooling, "inputs": head.weight.shape[1]}
    return network


def _step(task: Task) -> dict[str, list[dict[str, Any]]]:
    """What each number of `x` and each of `codes` is: a column's value, its change over that many rows, or its value that many ahead;
    with `window`, in the scale of that many last values.
    """
    at, codec, data = Layout.of(task.codec), task.codec, task.spec.data
    window = {int(place): {"window": task.spec.scale_steps} for place in at.scaled if task.spec.scale_steps}
    names = (*codec.columns, *codec.categorical)
    changing = at.changing if task.spec.reads_changes else at.changing[:0]
    ahead = range(1, data.horizon + 1)
    return {
        "x": [
            *({"column": names[place], **window.get(place, {})} for place in at.numbers.tolist()),
            *({"column": names[place], "change": data.season, **window.get(place, {})} for place in changing.tolist()),
            *({"column": names[place], "ahead": step} for step in ahead for place in at.known),
        ],
        "codes": [
            *({"column": names[place]} for place in at.codes),
            *({"column": names[place], "ahead": step} for step in ahead for place in at.known_codes),
        ],
    }


def _columns(codec: Codec) -> dict[str, tuple[str, ...]]:
    """The columns that are read at each step as they are: numbers, those of what is missing among them, and codes of categories."""
    return {"x": codec.columns, "codes": codec.categorical}


def _data(spec: Spec) -> dict[str, Any]:
    """What of the spec's data section says how numbers are made; the codec has the rest."""
    wanted = FORECASTING if spec.task == "forecasting" else ("each_step", "warmup", "missing") if spec.each_step else ()
    found = {name: value for name, value in spec.data.model_dump(mode="json").items() if name in wanted}
    return found | ({"starts_from": spec.starts_from} if spec.task == "forecasting" else {})
