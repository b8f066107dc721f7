"""One small model for each feature that an export must carry over, with weights large enough that a wrong one shows."""

from __future__ import annotations

from collections.abc import Callable

import torch

import carrywave as cw
from carrywave.model.encoders import Embedding, Features, Numbers
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.heads.classes import Sigmoid, Softmax
from carrywave.model.heads.ctc import Ctc
from carrywave.model.heads.distributions import DistributionForecast
from carrywave.model.heads.forecast import Forecast
from carrywave.model.heads.pooled import PooledNumbers, PooledSigmoid, PooledSoftmax
from carrywave.model.heads.step_numbers import StepNumbers
from carrywave.model.model import Model
from carrywave.spec.step_inputs import StepInputs


def _tokens() -> Embedding:
    return Embedding(23, 6)


def _tied() -> Model:
    embedding = Embedding(23, 8)
    return Model(embedding, cw.LSTM(8, 8, num_layers=2, dropout=0.5), Softmax(8, 23, tied=embedding.weight))


def _categories(inputs: StepInputs) -> Model:
    return Model(Features(inputs), cw.LSTM(inputs.width, 8), Forecast(8, 2, 1))


FRONT = [{"channels": 5, "kernel": 5, "stride": 2}, {"channels": 7, "kernel": 3, "stride": 3}]
MODELS: dict[str, Callable[[], Model]] = {
    "language": lambda: Model(_tokens(), cw.LSTM(6, 8, num_layers=2, dropout=0.5, weight_drop=0.5), Softmax(8, 23)),
    "language, tied": _tied,
    "language, adaptive": lambda: Model(_tokens(), cw.LSTM(6, 16), AdaptiveSoftmax(16, 23, (4, 10))),
    "language, widths, norms, learned carry": lambda: Model(
        _tokens(), cw.LSTM(6, [8, 12, 10], layer_norm=True, learned_carry=True), Softmax(10, 23)
    ),
    "language, projection": lambda: Model(_tokens(), cw.LSTM(6, 8, num_layers=2, proj_size=3), Softmax(3, 23)),
    "classification": lambda: Model(_tokens(), cw.LSTM(6, 8, num_layers=2), PooledSoftmax(8, 3)),
    "classification, mean": lambda: Model(Numbers(4), cw.LSTM(4, 8, num_layers=2, learned_carry=True), PooledSoftmax(8, 3, "mean")),
    "classification, max": lambda: Model(Numbers(4), cw.LSTM(4, 8), PooledSoftmax(8, 3, "max")),
    "classification, attention": lambda: Model(_tokens(), cw.LSTM(6, 8), PooledSoftmax(8, 3, "attention")),
    "classification, mean and max": lambda: Model(Numbers(4), cw.LSTM(4, 8), PooledSoftmax(8, 3, "mean_max")),
    "regression, attention, both ways": lambda: Model(Numbers(4), cw.LSTM(4, 8, bidirectional=True), PooledNumbers(16, 2, "attention")),
    "classification, front": lambda: Model(cw.Front(4, FRONT, 0.5), cw.LSTM(7, 8), PooledSoftmax(8, 3, "mean_max")),
    "classification, front of tokens, both ways": lambda: Model(
        cw.Front(_tokens(), FRONT), cw.LSTM(7, 8, bidirectional=True), PooledSoftmax(16, 3)
    ),
    "tagging, front": lambda: Model(cw.Front(4, [{"channels": 7, "kernel": 5, "stride": 1}]), cw.LSTM(7, 8), Softmax(8, 5)),
    "classification, both ways": lambda: Model(
        Numbers(4), cw.LSTM(4, 8, num_layers=2, bidirectional=True, layer_norm=True), PooledSoftmax(16, 3)
    ),
    "tagging": lambda: Model(_tokens(), cw.LSTM(6, 8), Softmax(8, 5)),
    "tagging, both ways": lambda: Model(_tokens(), cw.LSTM(6, 8, num_layers=2, bidirectional=True), Softmax(16, 5)),
    "tagging, both ways, projection": lambda: Model(
        _tokens(), cw.LSTM(6, 8, num_layers=2, bidirectional=True, proj_size=4, learned_carry=True), Softmax(8, 5)
    ),
    "tagging, several labels": lambda: Model(Numbers(4), cw.LSTM(4, 8), Sigmoid(8, 5)),
    "classification, several labels": lambda: Model(Numbers(4), cw.LSTM(4, 8), PooledSigmoid(8, 3, "mean")),
    "tagging, another cell": lambda: Model(_tokens(), cw.RNN(6, 8, num_layers=2), Softmax(8, 5)),
    "classification, another cell, both ways": lambda: Model(
        Numbers(4), cw.RNN(4, [8, 6], bidirectional=True, learned_carry=True), PooledSoftmax(12, 3)
    ),
    "language, gru": lambda: Model(_tokens(), cw.GRU(6, [8, 12], layer_norm=True, learned_carry=True), Softmax(12, 23)),
    "classification, gru": lambda: Model(Numbers(4), cw.GRU(4, 8, num_layers=2), PooledSoftmax(8, 3, "mean")),
    "tagging, gru, both ways": lambda: Model(_tokens(), cw.GRU(6, 8, num_layers=2, bidirectional=True, bias=False), Softmax(16, 5)),
    "transcription": lambda: Model(_tokens(), cw.LSTM(6, 8), Ctc(8, 5, upsample=3)),
    "transcription, front, both ways": lambda: Model(cw.Front(4, FRONT), cw.LSTM(7, 8, bidirectional=True), Ctc(16, 5, upsample=2)),
    "regression": lambda: Model(Numbers(4), cw.LSTM(4, 8, bias=False), PooledNumbers(8, 2)),
    "regression at each step": lambda: Model(Features(StepInputs(3, ((5, 3),), (0,))), cw.LSTM(6, 8), StepNumbers(8, 2)),
    "forecasting": lambda: Model(Numbers(4), cw.LSTM(4, 8), Forecast(8, 3, 2)),
    "forecasting, quantiles": lambda: Model(Numbers(4), cw.LSTM(4, 8), Forecast(8, 3, 2, (0.1, 0.5, 0.9))),
    "forecasting, linear": lambda: Model(Numbers(4), cw.LSTM(4, 8), Forecast(8, 3, 2, linear=True, past_steps=5)),
    "forecasting, linear, scaled, quantiles": lambda: Model(
        Numbers(4), cw.LSTM(4, 8), Forecast(8, 3, 2, (0.1, 0.5, 0.9), linear=True, scaled=True, past_steps=6)
    ),
    "forecasting, normal": lambda: Model(Numbers(4), cw.LSTM(4, 8), DistributionForecast(8, 3, 2, "normal")),
    "forecasting, student_t, linear, scaled": lambda: Model(
        Numbers(4), cw.LSTM(4, 8), DistributionForecast(8, 3, 2, "student_t", linear=True, scaled=True, past_steps=6)
    ),
    "forecasting, poisson": lambda: Model(Numbers(4), cw.LSTM(4, 8), DistributionForecast(8, 3, 2, "poisson", past_steps=1)),
    "forecasting, negative_binomial, linear": lambda: Model(
        Numbers(4), cw.LSTM(4, 8), DistributionForecast(8, 3, 2, "negative_binomial", linear=True, past_steps=6)
    ),
    "forecasting, negative_binomial, linear, scaled": lambda: Model(
        Numbers(4), cw.LSTM(4, 8), DistributionForecast(8, 3, 2, "negative_binomial", linear=True, scaled=True, past_steps=6)
    ),
    # Two categorical columns, of which the first is known for the two steps ahead, and then two of which both are.
    "forecasting, categories": lambda: _categories(StepInputs(3, ((5, 3), (4, 2)), (0, 1, 0, 0))),
    "forecasting, two categories ahead": lambda: _categories(StepInputs(1, ((5, 3), (4, 2)), (0, 1, 0, 1, 0, 1))),
}
# Of these, ONNX has no operator, nor torch a module.
OWN: dict[str, Callable[[], Model]] = {
    "tagging, norms inside the cell, zoneout": lambda: Model(
        _tokens(), cw.LSTM(6, 8, num_layers=2, cell_norm=True, zoneout=(0.1, 0.3), recurrent_dropout=0.5), Softmax(8, 5)
    ),
    "tagging, heads": lambda: Model(
        Numbers(4), cw.SLSTM(4, [8, 12], num_heads=2, learned_carry=True, cell_norm=True, layer_norm=True), Softmax(12, 5)
    ),
    "classification, heads, both ways": lambda: Model(
        Numbers(4), cw.SLSTM(4, 8, num_heads=2, bidirectional=True, learned_carry=True), PooledSoftmax(16, 3)
    ),
}
WHOLE = ("both ways", "front", "transcription")  # what reads whole sequences has no carry to pass on
NAMES = (*MODELS, *OWN)
STEPWISE = [name for name in NAMES if not any(word in name for word in WHOLE)]
FORMS = [*((name, False) for name in NAMES), *((name, True) for name in STEPWISE)]


def made(name: str) -> Model:
    """A model by its name, in evaluation mode."""
    draw = torch.Generator().manual_seed(1)
    model = (MODELS | OWN)[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5, generator=draw)
    return model.eval()
