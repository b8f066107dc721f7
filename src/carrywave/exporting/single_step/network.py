"""A model as a `Formula`: its encoder, layers and head in one step, as `Portable` computes them over many.

Layers compute the definition of their cell, whichever it is. A pooled head gives its result for the sequence so far.

Shapes: W width of the last layer, K steps ahead, C columns, Q quantiles, P parameters, N values of the past.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from carrywave.errors import UserError
from carrywave.exporting.portable import BATCH, TIME, Port, Portable
from carrywave.exporting.single_step.formula import Formula, Value
from carrywave.kernels.weights import LayerWeights
from carrywave.model.encoders import Embedding, Features
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.distributions import (
    FIRST_DF,
    LEAST_DISPERSION,
    LEAST_MEAN,
    LEAST_SCALE,
    ROUNDNESS,
    DistributionForecast,
)
from carrywave.model.heads.forecast import Forecast, Line
from carrywave.model.heads.pooled import Pooled
from carrywave.model.heads.step_numbers import StepNumbers
from carrywave.model.model import Model
from carrywave.model.vocabulary.spelled_words import SpelledWords
from carrywave.spec.data_spec import PARAMETERS
from carrywave.spec.step_inputs import LEAST_DEVIATION

NORM_EPSILON = 1e-5  # torch's, of norms inside a cell


def check_steps(model: Model) -> None:
    """Refuse a model that cannot answer before its sequence ends."""
    for whole, what in (
        (model.has_front, "a front reads over time"),
        (model.lstm.bidirectional, "bidirectional layers read the end of a sequence first"),
        (model.whole_head, f"the head {type(model.head).__name__} reads whole sequences"),
        (isinstance(model.encoder, SpelledWords), "the characters of words have no plain form"),
    ):
        if whole:
            raise UserError(f"a single step cannot be exported: {what}; use --to onnx or --to torch without --step, for whole sequences")


def step_ports(portable: Portable) -> dict[str, Port]:
    """The inputs of one step, by name: those of many, without their time."""
    wanted = [port for port in portable.inputs if port.name in ("x", "codes", "past")]
    return {port.name: Port(port.name, port.dtype, tuple(size for size in port.shape if size != TIME)) for port in wanted}


def network(portable: Portable) -> Formula:
    """One step of a stateful model, between the ports of its inputs and its result."""
    formula = Formula(portable.model.lstm.dtype)
    values = {name: formula.input(port) for name, port in step_ports(portable).items()}
    port = portable.outputs[0]
    result = Port(port.name, port.dtype, (BATCH, *(size for size in port.shape[1:] if size != TIME)))
    formula.result = result, through(formula, portable.model, values)
    return formula


def through(formula: Formula, model: Model, inputs: dict[str, Value]) -> Value:
    """What the head makes of a step's inputs; the state is added to the formula."""
    y = _encoded(formula, model, inputs)
    for layer in range(model.lstm.num_layers):
        y = _layer(formula, model, layer, y)
    return _head(formula, model, y, inputs.get("past"))


def _encoded(formula: Formula, model: Model, inputs: dict[str, Value]) -> Value:
    encoder = model.encoder
    if isinstance(encoder, Embedding):
        return formula.row("encoder.weight", encoder.weight, inputs["x"])
    if isinstance(encoder, Features):
        places = enumerate(encoder.inputs.places)
        rows = [formula.row(f"encoder.tables.{table}", encoder.tables[table], inputs["codes"], place) for place, table in places]
        return formula.joined([inputs["x"], *rows])
    return inputs["x"]


class _Weights:
    """What a step reads of the weights of a layer (`cells.cell.StepWeights`), as values."""

    def __init__(self, formula: Formula, name: str, weights: LayerWeights, outputs: int) -> None:
        self.formula, self.name, self.weights = formula, name, weights
        self.heads, self.outputs = outputs // weights.w_hh.shape[1], outputs
        self.extra: dict[str, Tensor] = weights.extra or {}

    def inputs(self, x: Value) -> Value:
        return self._product(x, "ih", self.weights.w_ih, self.weights.b_ih)

    def recurrent(self, h: Value) -> Value:
        return self._product(h, "hh", self.weights.w_hh, self.weights.b_hh)

    def candidate(self, new: Value) -> Value:
        return new

    def normed(self, c: Value) -> Value:
        if "norm_c" not in self.extra:
            return c
        return c.normed(f"{self.name}.norm_c", self.extra["norm_c"], self.extra["norm_c_bias"], NORM_EPSILON)

    def projected(self, h: Value) -> Value:
        return h if self.weights.w_hr is None else h.linear(f"{self.name}.weight_hr", self.weights.w_hr)

    def named(self, name: str) -> Value:
        return self.formula.weight(f"{self.name}.{name}", self.extra[name])

    def _product(self, x: Value, of: str, weight: Tensor, bias: Tensor | None) -> Value:
        heads = self.heads if of == "hh" else 1
        gain, sizes = self.extra.get(f"norm_{of}"), {"blocks": heads, "period": self.outputs if heads > 1 else 0}
        product = x.linear(f"{self.name}.weight_{of}", weight, None if gain is not None else bias, **sizes)
        return product if gain is None else product.normed(f"{self.name}.norm_{of}", gain, bias, NORM_EPSILON)


def _layer(formula: Formula, model: Model, layer: int, x: Value) -> Value:
    lstm, cell = model.lstm, model.lstm.cell
    name = f"lstm.l{layer}"
    initial = lstm.initial(1, layers=range(layer, layer + 1))[0]
    before = [formula.begin(f"{part}_l{layer}", tensor[0, 0]) for part, tensor in zip(cell.parts, initial, strict=True)]
    weights: Any = _Weights(formula, name, lstm.weights(layer)[0], lstm.outputs(layer))
    try:
        after: Any = cell.step(weights.inputs(x), cell.carry(*before), weights)
    except (TypeError, AttributeError) as error:
        raise UserError(f"the cell {cell.name} has no plain form of a step ({error}); export without --step") from error
    for part, share, old, new in zip(cell.parts, lstm.zoneout, before, after, strict=True):
        formula.end(f"{part}_l{layer}", share * old + (1.0 - share) * new if share else new)
    y = formula.after[f"{cell.parts[0]}_l{layer}"]
    if lstm.layer_norm:
        norm = getattr(lstm, f"norm_l{layer}")
        y = y.normed(f"{name}.norm", norm.weight, norm.bias, norm.eps)
    return y


def _head(formula: Formula, model: Model, y: Value, past: Value | None) -> Value:
    head = model.head
    if isinstance(head, Pooled):
        return _pooled(formula, head, y).linear("head.weight", head.weight, head.bias)
    if isinstance(head, Softmax | StepNumbers):
        return y.linear("head.weight", head.weight, head.bias)
    if isinstance(head, AdaptiveSoftmax):
        return _adaptive(formula, head, y)
    if isinstance(head, DistributionForecast):
        return _distribution(formula, head, y, past)
    if isinstance(head, Forecast):
        return _forecast(formula, head, y, past)
    raise UserError(f"the head {type(head).__name__} has no form of a single step; export without --step")


def _pooled(formula: Formula, head: Pooled, y: Value) -> Value:
    """What a pooled head reads of the sequence so far; what it has to remember becomes state."""
    zeros = torch.zeros(y.width)
    lowest = torch.full((y.width,), torch.finfo(formula.dtype).min, dtype=formula.dtype)

    def kept(name: str, initial: Tensor, change: Any) -> Value:
        after: Value = change(formula.begin(name, initial))
        formula.end(name, after)
        return after

    def mean() -> Value:
        total = kept("pooled_sum", zeros, lambda old: old + y)
        return total / kept("pooled_steps", zeros[:1], lambda old: old + 1.0)

    def greatest() -> Value:
        return kept("pooled_max", lowest, lambda old: old.maximum(y))

    match head.pooling:
        case "mean":
            return mean()
        case "max":
            return greatest()
        case "mean_max":
            return formula.joined([mean(), greatest()])
        case "attention":
            assert head.query is not None
            score, before = y.linear("head.query", head.query[None]), formula.begin("pooled_score", lowest[:1])
            formula.end("pooled_score", before.maximum(score))
            scale, weight = (before - formula.after["pooled_score"]).exp(), (score - formula.after["pooled_score"]).exp()
            weighted = kept("pooled_sum", zeros, lambda old: old * scale + y * weight)
            return weighted / kept("pooled_weight", zeros[:1], lambda old: old * scale + weight)
    return y


def _adaptive(formula: Formula, head: AdaptiveSoftmax, y: Value) -> Value:
    first = head.cutoffs[0]
    head_logs = y.linear("head.head", head.head.weight).log_softmax()
    parts = [head_logs.part(0, first)]
    for number, cluster in enumerate(head.tail):
        narrow, wide = (each.weight for each in cluster.children())
        tail = y.linear(f"head.tail.{number}.0", narrow).linear(f"head.tail.{number}.1", wide)  # type: ignore[arg-type]
        parts.append(tail.log_softmax() + head_logs.part(first + number, first + number + 1))
    return formula.joined(parts)


def _forecast(formula: Formula, head: Forecast, y: Value, past: Value | None) -> Value:
    """[K · C · Q], as the head arranges it."""
    levels, columns, ahead = len(head.quantiles or (0.5,)), head.outputs, head.horizon
    out = y.linear("head.weight", head.weight, head.bias).turned(ahead * columns)  # level by level, [Q, K, C]
    by_level = [out.part(level * ahead * columns, (level + 1) * ahead * columns) for level in range(levels)]
    for level in range(1, levels):
        by_level[level] = by_level[level - 1] + (by_level[level] - math.log(max(1, levels - 1))).softplus()
    if past is not None and head.scaled:
        unit = deviation(past, columns)[1].repeated(ahead)
        by_level = [each * unit for each in by_level]
    if past is not None and head.line is not None:
        line = _line(head, head.line, past)
        by_level = [each + line for each in by_level]
    return formula.joined(by_level).turned(levels)


def _distribution(formula: Formula, head: DistributionForecast, y: Value, past: Value | None) -> Value:
    """[K · C · P]: parameters, as the head arranges them."""
    ahead, each = head.horizon, len(PARAMETERS[head.distribution])
    first, *others = y.linear("head.weight", head.weight, head.bias).turned(ahead * head.outputs).chunk(each)  # [P, K, C]
    if head.counts:
        assert past is not None
        values, sizes = past.chunk(2)
        base = None if head.line is None else _last(values, head.outputs).repeated(ahead) + _line(head, head.line, values)
        others = [other.softplus() for other in others]
        if head.scaled:
            level = values.abs().mean(head.outputs).maximum(LEAST_DEVIATION)
            ratio, level = (deviation(values, head.outputs)[1] / level).repeated(ahead), level.repeated(ahead)
            mean = level * _positive(first * ratio + (1.0 if base is None else base / level))
            others = [other * ratio.square() for other in others]
        else:
            mean = _positive(first + (1.0 if base is None else base))
        parameters = [mean * _last(sizes, head.outputs).repeated(ahead), *(other + LEAST_DISPERSION for other in others)]
    else:
        scale = others[0].softplus() + LEAST_SCALE
        if past is not None and head.scaled:
            unit = deviation(past, head.outputs)[1].repeated(ahead)
            first, scale = first * unit, scale * unit
        location = first if past is None or head.line is None else first + _line(head, head.line, past)
        parameters = [location, scale, *((other + FIRST_DF).softplus() + 2.0 for other in others[1:])]
    return formula.joined(parameters).turned(each)


def _positive(x: Value) -> Value:
    return (x + (x.square() + ROUNDNESS).sqrt()) * 0.5 + LEAST_MEAN


def _last(past: Value, columns: int) -> Value:
    """The last of the values [C · N] of each column."""
    return past.turned(columns).part(past.width - columns, past.width)


def _line(head: Forecast, line: Line, past: Value) -> Value:
    """What a linear function of the last values adds, [K · C]."""
    steps = past.width // head.outputs
    gaps = past - _last(past, head.outputs).repeated(steps).turned(steps)
    weight = line.weight.transpose(1, 2).reshape(head.outputs * head.horizon, steps)
    return gaps.linear("head.line", weight, line.bias.reshape(-1), blocks=head.outputs).turned(head.outputs)


def deviation(past: Value, columns: int) -> tuple[Value, Value]:
    """Mean and deviation of the last values [C · N] of each column."""
    mean, steps = past.mean(columns), past.width // columns
    gaps = past - mean.repeated(steps).turned(steps)
    return mean, gaps.square().mean(columns).maximum(LEAST_DEVIATION**2).sqrt()
