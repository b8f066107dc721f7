"""The simple baselines of `quality`: what needs no network and a few lines of NumPy, scored on exactly what a run is scored on.

- language: how often a token follows another, with the rest for how often it occurs at all (Witten and Bell); unigrams alone;
- classification: the largest class; of tokens, naive Bayes; of numbers, the nearest neighbour, with sequences stretched to one length;
- tagging: the largest tag; for every token the tag that it has most often;
- regression: the mean;
- forecasting: the last value; the last season; ridge regression on the last values less the latest one, one for all series and columns.

Shapes: N forecasts, L lags, H horizon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from carrywave.data.batch import IGNORED
from carrywave.data.sequences import Ints, Sequences
from carrywave.tasks.metrics import language
from carrywave.tasks.task import Part, Task

RIDGE = 10.0  # added to the diagonal; among hundreds of thousands of rows it only keeps the solution finite
NEIGHBOUR_STEPS = 128  # at most, of a stretched sequence

Reals = NDArray[np.float64]


def baselines(task: Task, parts: Mapping[str, Part], scored: str, metric: str, lags: int) -> dict[str, float]:
    """The metric of each baseline of the task, by its name."""
    train, part = parts["train"], parts[scored]
    match task.spec.task:
        case "language":
            return {name: language(loss)[metric] for name, loss in _ngrams(train.data, part.data, task.facts.vocabulary).items()}
        case "classification":
            return _classes(train.data, part.data, task.facts.vocabulary)
        case "tagging":
            return _tags(train.data, part.data, task.facts.vocabulary)
        case "regression":
            return {"mean": _mean(task, train.data, part)[metric]}
        case "forecasting":
            return forecasts(task, parts, part, metric, lags)
        case "transcription":
            return {}  # no simple one is known


def _ngrams(train: Sequences, data: Sequences, size: int) -> dict[str, float]:
    """The mean loss, in nats, of predicting each token of a part but the first of a sequence."""
    first, second = _pairs(train)
    once = np.bincount(_tokens(train), minlength=size)
    alone = (once + 1.0) / (once.sum() + size)
    pairs, counts = np.unique(first * size + second, return_counts=True)
    followed = np.bincount(first, minlength=size)
    kinds = np.bincount(pairs // size, minlength=size)  # different tokens that follow
    before, after = _pairs(data)
    place = np.minimum(np.searchsorted(pairs, before * size + after), len(pairs) - 1)
    seen = np.where(pairs[place] == before * size + after, counts[place], 0)
    total = followed[before] + kinds[before]
    both = np.where(total > 0, (seen + kinds[before] * alone[after]) / np.maximum(total, 1), alone[after])
    return {"unigrams": float(-np.log(alone[after]).mean()), "bigrams": float(-np.log(both).mean())}


def _tokens(data: Sequences) -> Ints:
    return np.concatenate([np.asarray(data.inputs[start : start + length], np.int64) for start, length in _spans(data)])


def _pairs(data: Sequences) -> tuple[Ints, Ints]:
    """Each token of a sequence but the last, and its successor."""
    rows = np.concatenate([np.arange(start, start + length - 1) for start, length in _spans(data)])
    return np.asarray(data.inputs[rows], np.int64), np.asarray(data.inputs[rows + 1], np.int64)


def _spans(data: Sequences) -> Iterator[tuple[int, int]]:
    return ((int(start), int(length)) for start, length in zip(data.starts, data.lengths, strict=True))


def _classes(train: Sequences, data: Sequences, size: int) -> dict[str, float]:
    known, wanted = _labels(train), _labels(data)
    found = {"majority": float((wanted == np.bincount(known).argmax()).mean())}
    if size:
        in_class = np.ones((int(known.max()) + 1, size))  # one more than there are, so that nothing is impossible
        np.add.at(in_class, (np.repeat(known, train.lengths), _tokens(train)), 1)
        likely = np.log(in_class / in_class.sum(1, keepdims=True))
        share = np.log(np.maximum(np.bincount(known), 1) / len(known))
        guessed = [(share + likely[:, data.inputs[start : start + length]].sum(1)).argmax() for start, length in _spans(data)]
        found["naive Bayes"] = float((np.array(guessed) == wanted).mean())
    else:
        steps = min(int(max(train.lengths.max(), data.lengths.max())), NEIGHBOUR_STEPS)
        theirs, ours = _stretched(train, steps), _stretched(data, steps)
        apart = (ours**2).sum(1)[:, None] - 2 * ours @ theirs.T + (theirs**2).sum(1)
        found["nearest neighbour"] = float((known[apart.argmin(1)] == wanted).mean())
    return found


def _labels(data: Sequences) -> Ints:
    assert data.labels is not None
    return np.asarray(data.labels, np.int64)


def _stretched(data: Sequences, steps: int) -> Reals:
    """Every sequence as one vector: each of its columns, read at `steps` places from its first step to its last."""
    rows = []
    for start, length in _spans(data):
        values = np.asarray(data.inputs[start : start + length], np.float64)
        places = np.linspace(0, length - 1, steps)
        rows.append(np.concatenate([np.interp(places, np.arange(length), column) for column in values.T]))
    return np.stack(rows)


def _tags(train: Sequences, data: Sequences, size: int) -> dict[str, float]:
    (tokens, tags), (given, wanted) = _tagged(train), _tagged(data)
    counts = np.zeros((size, int(tags.max()) + 1), np.int64)
    np.add.at(counts, (tokens, tags), 1)
    most = counts.sum(0).argmax()
    of_token = np.where(counts.sum(1) > 0, counts.argmax(1), most)
    return {"majority": float((wanted == most).mean()), "tag of the token": float((of_token[given] == wanted).mean())}


def _tagged(data: Sequences) -> tuple[Ints, Ints]:
    assert data.tags is not None
    tags = np.concatenate([np.asarray(data.tags[start : start + length], np.int64) for start, length in _spans(data)])
    real = tags != IGNORED
    return _tokens(data)[real], tags[real]


def _mean(task: Task, train: Sequences, part: Part) -> dict[str, float]:
    meter = task.meter(torch.device("cpu"), part)
    assert meter is not None
    assert train.labels is not None
    assert part.data.labels is not None
    wanted = torch.tensor(np.asarray(part.data.labels))
    meter.update(torch.tensor(np.asarray(train.labels).mean(0)).expand_as(wanted), wanted)
    return meter.values()


def forecasts(task: Task, parts: Mapping[str, Part], part: Part, metric: str, lags: int) -> dict[str, float]:
    """The error of each naive forecast, and of ridge regression, over all origins of a part.

    Series are in the units of the metric: standardised, as they are trained on, or, for MASE, in those of their seasonal change.
    """
    season, horizon = task.spec.data.season, task.spec.data.horizon
    lags = max(lags, season)
    weights = _ridge(task, parts, metric, lags)
    last_season = lags - season + np.arange(horizon) % season
    made: dict[str, Callable[[Reals], Reals]] = {
        "last value": lambda past_NL: past_NL[:, -1:],
        "seasonal naive": lambda past_NL: past_NL[:, last_season],
        "ridge": lambda past_NL: past_NL[:, -1:] + _less_last(past_NL) @ weights,
    }
    sums, count = dict.fromkeys(made, 0.0), 0
    warm = np.zeros(len(part.data), np.int64) if part.data.warm is None else np.maximum(part.data.warm - 1, 0)
    for number, values in _columns(task, part, metric, part.data.lengths):
        past_NL, future_NH = _windows(values, lags, horizon, int(warm[number]))
        count += future_NH.size
        for name, forecast in made.items():
            sums[name] += float(np.abs(future_NH - forecast(past_NL)).sum())
    return {name: total / count for name, total in sums.items()}


def _ridge(task: Task, parts: Mapping[str, Part], metric: str, lags: int) -> Reals:
    """Weights [L + 1, H] of the last values less the latest one, and of one: the sum of squares over all series and columns is least.

    It is fitted to train, and to what was held out of train's file for valid, which it does not need.
    """
    train, horizon = parts["train"], task.spec.data.horizon
    lengths = train.data.lengths.copy()
    if task.spec.data.split is None and task.spec.data.valid is None and "valid" in parts:
        valid = parts["valid"].data
        ends = dict(zip(valid.names or (), valid.starts + valid.lengths, strict=True))
        for place, name in enumerate(train.data.names or ()):
            lengths[place] = ends.get(name, train.data.starts[place] + lengths[place]) - train.data.starts[place]
    products, sums = np.zeros((lags + 1, lags + 1)), np.zeros((lags + 1, horizon))
    for _, values in _columns(task, train, metric, lengths):
        past_NL, future_NH = _windows(values, lags, horizon, lags - 1)
        rows = _less_last(past_NL)
        products += rows.T @ rows
        sums += rows.T @ (future_NH - past_NL[:, -1:])
    return np.asarray(np.linalg.solve(products + RIDGE * np.eye(lags + 1), sums), np.float64)


def _columns(task: Task, part: Part, metric: str, lengths: Ints) -> Iterator[tuple[int, Reals]]:
    """Each forecast column of each series of a part, with the number of the series, in the units of the metric."""
    assert part.change_SC is not None
    for number, (start, length) in enumerate(zip(part.data.starts, lengths, strict=True)):
        for place, column in enumerate(task.codec.targets):
            values = np.asarray(part.data.inputs[start : start + length, column], np.float64)
            unit = part.change_SC[number, place] if metric == "mase" else 1.0
            if unit > 0:
                yield number, values / unit


def _windows(values: Reals, lags: int, horizon: int, first: int) -> tuple[Reals, Reals]:
    """The last values [N, L] at each origin from `first` on, and what comes after [N, H]; before its first value a series had the same."""
    past: NDArray[Any] = sliding_window_view(np.concatenate([np.full(lags - 1, values[0]), values]), lags)
    future: NDArray[Any] = sliding_window_view(values[1:], horizon) if len(values) > horizon else np.zeros((0, horizon))
    return past[first : len(future)], future[first:]


def _less_last(past_NL: Reals) -> Reals:
    return np.concatenate([past_NL - past_NL[:, -1:], np.ones((len(past_NL), 1))], axis=1)
