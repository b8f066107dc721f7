"""Computes the samples of a report from a run's best weights and its own test or validation data: a few seconds of work, on this machine.

Shapes: T time, B lane, H horizon, C columns, Q quantiles.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.data.codec import Codec
from carrywave.data.python_inputs import series_of
from carrywave.data.sequences import Sequences
from carrywave.data.tables.times import Times
from carrywave.errors import UserError
from carrywave.model.model import Model
from carrywave.report.sample_kinds import Confused, Continued, Forecasted, Paired, Sample, Samples
from carrywave.runs.evaluation import passes
from carrywave.runs.rows.generation import Sampling, generate
from carrywave.runs.trained_run import Saved, changed_since, open_run, own_data
from carrywave.spec.data_spec import BatchSpec
from carrywave.tasks.metrics import Confusion
from carrywave.tasks.task import Part
from carrywave.tasks.views import Naive

SECONDS = 20.0  # within which a pass over the validation data ends
TEXTS, PROMPT_TOKENS, WRITTEN_TOKENS, TEMPERATURE = 2, {"word": 20}, {"word": 40}, 0.8
CHARACTERS_BEFORE, CHARACTERS_WRITTEN = 80, 200  # for every other kind of token
MOST_SERIES, MOST_PANELS, MOST_ROWS = 2, 4, 20_000
MOST_PAIRS = 400


def samples_of(folder: Path, device: str = "auto") -> Samples:
    """The samples of a run, or why there are none. Mistakes of the surroundings (no weights yet, data moved) are a reason, not an error."""
    try:
        saved = open_run(folder, device)
        if saved.spec.data.train is None:
            return Samples("No samples: the run was trained on data from Python, which is not stored in it.")
        prepared = own_data(saved)
        # As in an evaluation: what chose the weights is not what shows how good they are.
        name, data = ("test", prepared.test) if prepared.test is not None else ("valid", prepared.valid)
        if data is None:
            return Samples("No samples: the run has neither validation nor test data.")
        if not saved.model.has_output:
            return Samples("No samples: the model's head has no forward method.")
        told = changed_since(saved, prepared, name)
        found = _computed(saved, name, data)
        return replace(found, note=" ".join([found.note, *(f"{line}." for line in told)]))
    except UserError as error:
        return Samples(f"No samples: {error}.")


def _computed(saved: Saved, name: str, data: Sequences) -> Samples:
    where = f"the {'validation' if name == 'valid' else name} data"
    match saved.spec.task:
        case "language":
            kind = f"temperature {TEMPERATURE:g}, seed 1"
            return Samples(f"Passages of {where}, continued with the best weights ({kind}).", _texts(saved, data))
        case "forecasting":
            return Samples(
                f"The last forecast within {where}, with the best weights{_some_of(saved, data)}.", _forecasts(saved, name, data)
            )
        case "regression":
            pairs, whole = _pairs(saved, name, data)
            return Samples(f"Targets of {where} and their predictions with the best weights{_part_of(whole)}.", pairs)
        case _:
            confused, whole = _confused(saved, name, data)
            total = sum(map(sum, confused.counts))
            return Samples(f"{total:,} targets of {where}, with the best weights{_part_of(whole)}.", [confused])


def _some_of(saved: Saved, data: Sequences) -> str:
    """Which of many series and columns are shown, in words; empty if all are."""
    series, columns = len(data), len(saved.task.codec.targets)
    panels = min(series, MOST_SERIES) * columns
    if series > MOST_SERIES and panels <= MOST_PANELS:
        return f": the first {MOST_SERIES} of {series:,} series"
    return f": the first {MOST_PANELS} of {series * columns:,} charts" if panels > MOST_PANELS else ""


def _part_of(whole: bool) -> str:
    return "" if whole else f"; as many as could be predicted in {SECONDS:.0f} seconds"


def _texts(saved: Saved, data: Sequences) -> list[Sample]:
    codec = saved.task.codec
    if not isinstance(saved.model, Model):
        return []
    before, after = (PROMPT_TOKENS.get(str(codec.kind), CHARACTERS_BEFORE), WRITTEN_TOKENS.get(str(codec.kind), CHARACTERS_WRITTEN))
    starts: list[int] = []
    for start, length in zip(data.starts.tolist(), data.lengths.tolist(), strict=True):
        room = length - before - after
        if room >= 0:
            starts += [start] if len(data) > 1 else [start + room * part // TEXTS for part in range(TEXTS)]
        if len(starts) >= TEXTS:
            break
    if not starts:  # nothing is that long: the beginning of the first sequence has to do
        starts, before = [int(data.starts[0])], max(1, min(before, int(data.lengths[0]) // 2))
        after = max(1, min(after, int(data.lengths[0]) - before))
    tokens = [np.asarray(data.inputs[start : start + before + after]).astype(np.int64) for start in starts]
    how = Sampling(temperature=TEMPERATURE, seed=1)
    written = generate(saved.model, [each[:before].tolist() for each in tokens], after, how=how, device=saved.mesh.device)
    return [
        Continued(codec.decode(each[:before]), _further(codec, each[:before], more), _further(codec, each[:before], each[before:]))
        for each, more in zip(tokens, written, strict=True)
    ]


def _further(codec: Codec, before: NDArray[np.int64], after: Sequence[int] | NDArray[np.int64]) -> str:
    """What tokens add to the text of those before them: words are separated by a space there too."""
    begun = codec.decode(before)
    whole = codec.decode(np.concatenate([before, np.asarray(after, np.int64)]))
    return whole.removeprefix(begun) if whole.startswith(begun) else codec.decode(after)


def _seen(saved: Saved, part: Part) -> Iterator[tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]]:
    """Outputs and targets of each batch, with sequence, offset and length of its lanes, until the time is up."""
    spec = saved.spec
    if spec.task == "tagging" and spec.streams:
        spec = spec.model_copy(update={"batch": BatchSpec(tokens=spec.lanes * spec.steps)})
    shown: list[tuple[Tensor, Tensor | None]] = []
    ends = time.monotonic() + SECONDS
    walk = passes(saved.model, spec, part, mesh=saved.mesh, stage=saved.stage, observe=lambda out, target: shown.append((out, target)))
    with closing(walk):  # type: ignore[type-var]
        for batch, _ in walk:
            outs, targets = zip(*shown, strict=True)
            pooled = saved.stage.pooled
            out = outs[-1] if pooled or len(outs) == 1 else torch.cat(outs)
            target = targets[-1] if pooled or len(targets) == 1 or targets[0] is None else torch.cat(targets)
            shown.clear()
            yield out.float().cpu(), None if target is None else target.cpu(), batch.sequence.cpu(), batch.offset.cpu(), batch.lengths.cpu()
            if time.monotonic() > ends:
                return


def _confused(saved: Saved, name: str, data: Sequences) -> tuple[Confused, bool]:
    part = saved.task.part(name, data)
    labels = saved.task.codec.labels
    counts = Confusion(len(labels))
    lanes = 0
    for out, target, sequence, _, _ in _seen(saved, part):
        if target is not None and counts.fits(out, target):
            counts.update(out, target)
        lanes += int((sequence >= 0).sum())
    return Confused(labels, counts.counts_KK.tolist()), lanes >= len(data)


def _pairs(saved: Saved, name: str, data: Sequences) -> tuple[list[Sample], bool]:
    codec = saved.task.codec
    truths, guesses, lanes = list[NDArray[np.float64]](), list[NDArray[np.float64]](), 0
    for out, target, sequence, _, _ in _seen(saved, saved.task.part(name, data)):
        real = sequence >= 0
        lanes += int(real.sum())
        if target is not None and out.shape == target.shape:
            truths.append(codec.restore(target[real].double().numpy()))
            guesses.append(codec.restore(out[real].double().numpy()))
    if not truths:
        return [], True
    truth, guess = np.concatenate(truths), np.concatenate(guesses)
    every = max(1, len(truth) // MOST_PAIRS)
    shown: list[Sample] = []
    for column in range(min(truth.shape[1], MOST_PANELS)):
        points = [(float(x), float(y)) for x, y in zip(truth[::every, column], guess[::every, column], strict=True)]
        points = [point for point in points if np.isfinite(point).all()]
        shown.append(
            Paired("prediction (upwards) and truth" if truth.shape[1] == 1 else f"output {column}: prediction (upwards) and truth", points)
        )
    return shown, lanes >= len(data)


def _forecasts(saved: Saved, name: str, data: Sequences) -> list[Sample]:
    """One panel for each of the first series and columns: the last origin whose whole horizon is known."""
    spec, codec = saved.spec.data, saved.task.codec
    data = _few(data, spec.horizon)
    part = saved.task.part(name, data)
    lasts = {number: int(length) - 1 for number, length in enumerate(part.view.lengths)}
    found: dict[int, NDArray[np.float64]] = {}
    for out, _, sequence, offset, lengths in _seen(saved, part):
        for lane, (number, first, length) in enumerate(zip(sequence.tolist(), offset.tolist(), lengths.tolist(), strict=True)):
            if number >= 0 and first <= lasts[number] < first + length:
                found[number] = out[lasts[number] - first, lane].double().numpy()
    targets = np.array(codec.targets)
    naive = Naive(data, targets, spec.horizon, spec.season, spec.residual)
    shown: list[Sample] = []
    timed = _times(saved, name, data)
    for number, out_HC in sorted(found.items()):
        row = int(data.starts[number]) + lasts[number]
        series = data.names[number] if data.names is not None else ""
        base_HC = np.asarray(naive(np.array([row]))[0], np.float64)
        scale = _scale(saved, series)
        for place, column in enumerate(targets.tolist()):
            if len(shown) == MOST_PANELS:
                return shown
            named = codec.columns[column] + (f", series {series}" if len(data) > 1 else "")
            mean, std = (0.0, 1.0) if scale is None else (scale[0][column], scale[1][column])
            named += " (standardized)" if scale is None else ""
            panel = _panel(saved, data, row, column, named, out_HC[:, place], base_HC[:, place], mean, std)
            times = None if timed is None else timed.written(slice(row + 1 - len(panel.history), row + 1 + spec.horizon))
            shown.append(replace(panel, times=[] if times is None else [str(time) for time in times]))
    return shown


def _times(saved: Saved, name: str, data: Sequences) -> Times | None:
    """The times of all rows of the file that a part is from; None if it has none."""
    spec = saved.spec
    file = getattr(spec.data, name) or spec.data.train
    table = series_of(file, saved.task.codec, spec)
    return table.times if table.times is not None and len(table.times.keys) == len(data.inputs) else None


def _panel(
    saved: Saved,
    data: Sequences,
    row: int,
    column: int,
    title: str,
    out_H: NDArray[np.float64],  # or [H, Q]
    base_H: NDArray[np.float64],
    mean: float,
    std: float,
) -> Forecasted:
    spec, shares = saved.spec.data, saved.spec.data.quantiles
    start = max(int(data.starts[np.searchsorted(data.starts, row, side="right") - 1]), row + 1 - 2 * spec.horizon)
    past = np.asarray(data.inputs[start : row + 1, column], np.float64) * std + mean
    came = np.asarray(data.inputs[row + 1 : row + 1 + spec.horizon, column], np.float64) * std + mean
    history = [(float(start - row + at), float(value)) for at, value in enumerate(past)]
    ahead = range(1, spec.horizon + 1)
    band, band_name, point_name = list[tuple[float, float, float]](), "", "forecast"
    if shares is not None:
        value_HQ = (out_H + base_H[:, None]) * std + mean
        low, high = int(np.argmin(shares)), int(np.argmax(shares))
        middle = min(range(len(shares)), key=lambda at: abs(shares[at] - 0.5))
        point_name = "median" if shares[middle] == 0.5 else f"quantile {shares[middle]:g}"
        if low != high:
            band = [(float(at), float(value_HQ[at - 1, low]), float(value_HQ[at - 1, high])) for at in ahead]
            band_name = f"quantiles {shares[low]:g} to {shares[high]:g}"
        value_H = value_HQ[:, middle]
    else:
        value_H = (out_H + base_H) * std + mean
    truth = [history[-1], *((float(at), float(came[at - 1])) for at in ahead)]
    return Forecasted(title, history, truth, [(float(at), float(value_H[at - 1])) for at in ahead], band, band_name, point_name)


def _few(data: Sequences, horizon: int) -> Sequences:
    """The first series, and of each the last rows."""
    lengths = data.lengths[:MOST_SERIES]
    cut = np.maximum(lengths - max(MOST_ROWS, 2 * horizon), 0)
    warm = None if data.warm is None else np.maximum(data.warm[:MOST_SERIES] - cut, 0)
    names = None if data.names is None else data.names[:MOST_SERIES]
    return replace(data, starts=data.starts[:MOST_SERIES] + cut, lengths=lengths - cut, warm=warm, names=names)


def _scale(saved: Saved, series: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and standard deviation of a series, by column; None if only the file itself could tell."""
    codec = saved.task.codec
    if not codec.names:
        return codec.mean, codec.std
    known = dict(zip(codec.names, zip(codec.means, codec.stds, strict=True), strict=True))
    return known.get(series)
