"""Computes the samples of a report from a run's best weights and its own test or validation data: a few seconds of work, on this machine.

Shapes: T time, B lane, H horizon, C columns, Q quantiles.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.data.codec import Codec
from carrywave.data.holdout import pick
from carrywave.data.python_inputs import series_of
from carrywave.data.sequences import Sequences
from carrywave.data.tables.channels import TargetReading
from carrywave.data.tables.parts import whole
from carrywave.errors import UserError
from carrywave.model.model import Model
from carrywave.prediction.evaluation import Details, evaluate, is_ctc, passes
from carrywave.prediction.generation import Sampling, generate
from carrywave.prediction.saved_run import Saved, changed_since, open_run, own_data
from carrywave.report.sample_kinds import Confused, Continued, Decided, Distributed, Forecasted, Paired, Sample, Samples, Transcribed
from carrywave.report.step_samples import step_samples
from carrywave.spec.data_spec import BatchSpec
from carrywave.tasks.baselines import BASELINES
from carrywave.tasks.forecast_values import ForecastValues
from carrywave.tasks.label_metrics import LabelDecisions
from carrywave.tasks.metrics import Confusion, Errors, Metric
from carrywave.tasks.span_metrics import TagConfusion
from carrywave.tasks.task import Part
from carrywave.tasks.transcription.decoding import greedy

SECONDS = 20.0  # within which a pass over the validation data ends
TEXTS, PROMPT_TOKENS, WRITTEN_TOKENS, TEMPERATURE = 2, {"word": 20}, {"word": 40}, 0.8
CHARACTERS_BEFORE, CHARACTERS_WRITTEN = 80, 200  # for every other kind of token
MOST_SERIES, MOST_PANELS, MOST_ROWS = 2, 4, 20_000
MOST_PAIRS = 400
TRANSCRIPTS = 20
MOST_WORST = 10  # series that are named


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
        changed = changed_since(saved, name)
        samples = _computed(replace(saved, task=saved.task.with_line(prepared.train)), name, data)
        return replace(samples, note=" ".join([samples.note, *(f"{line}." for line in changed)]))
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
                f"The last forecast within {where}, with the best weights{_some_of(saved, data)}.",
                [*_forecasts(saved, name, data), *_errors(saved, name, data)],
            )
        case "regression" if saved.spec.each_step:
            steps = step_samples(saved, name, data, SECONDS)
            return Samples(f"The last steps of {where}, with the best weights, and how well each series of it is estimated.", steps)
        case "transcription":
            shown = f"Of {where}, evenly spaced; the prediction is the likeliest label of each step, with the best weights."
            return Samples(shown, [_transcribed(saved, name, data)])
        case "regression":
            pairs, whole = _pairs(saved, name, data)
            return Samples(f"Targets of {where} and their predictions with the best weights{_part_of(whole)}.", pairs)
        case _ if saved.spec.data.multi_label:
            decided, whole = _decided(saved, name, data)
            return Samples(f"Labels of {where}, with the best weights{_part_of(whole)}.", [decided])
        case _:
            confused, spans, whole = _confused(saved, name, data)
            total = sum(map(sum, confused.counts))
            return Samples(f"{total:,} targets of {where}, with the best weights{_part_of(whole)}.", [confused, *spans])


def _some_of(saved: Saved, data: Sequences) -> str:
    """Which of many series and columns are shown, in words; empty if all are."""
    columns = len(saved.task.codec.forecast_columns)
    series = len(data) * len(saved.task.codec.targets) // columns
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
    prompts, ends = [each[:before].tolist() for each in tokens], saved.task.document_ends
    written = generate(saved.model, prompts, after, how=how, device=saved.mesh.device, ends=ends)
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


def _confused(saved: Saved, name: str, data: Sequences) -> tuple[Confused, list[Decided], bool]:
    """The confusion of labels and, if they write spans, how well each type of them is found."""
    part = saved.task.part(name, data)
    counts = saved.task.meter(torch.device("cpu"), part)
    assert isinstance(counts, Confusion)
    whole = _counted(saved, part, counts)
    spans = [Decided(counts.rows("type"), "type")] if isinstance(counts, TagConfusion) else []
    return Confused(counts.labels, counts.counts_KK.tolist()), spans, whole


def _decided(saved: Saved, name: str, data: Sequences) -> tuple[Decided, bool]:
    labels = saved.task.codec.labels
    counts = LabelDecisions(len(labels), labels=labels, threshold=saved.spec.train.threshold)
    whole = _counted(saved, saved.task.part(name, data), counts)
    return Decided(counts.rows("label")), whole


def _counted(saved: Saved, part: Part, counts: Metric) -> bool:
    """Add what is predicted for a part to a metric; True if there was time for all of it."""
    lanes = 0
    for out, target, sequence, offset, _ in _seen(saved, part):
        if target is not None and counts.fits(out, target):
            counts.update(out, target, sequence, offset)
        lanes += int((sequence >= 0).sum())
    return lanes >= len(part.data)


def _transcribed(saved: Saved, name: str, data: Sequences) -> Transcribed:
    codec, counted = saved.task.codec, np.arange(len(data)) if data.weights is None else np.flatnonzero(data.weights)
    places = counted[np.unique(np.linspace(0, len(counted) - 1, min(len(counted), TRANSCRIPTS)).astype(np.int64))]
    few = pick(data, np.isin(np.arange(len(data)), places))
    rows: dict[int, tuple[str, str, str]] = {}
    for out, target, sequence, _, _ in _seen(saved, saved.task.part(name, few)):
        if target is None or not is_ctc(saved.model):
            continue
        for lane, number in enumerate(sequence.tolist()):
            labels = [label for label in target[lane].tolist() if label >= 0]
            transcript = greedy(out[:, lane].numpy(), len(codec.labels))
            start, length = int(few.starts[number]), int(few.lengths[number])
            text = "" if codec.kind in (None, "int") else codec.decode(np.asarray(few.inputs[start : start + length]))
            if number >= 0:
                rows[number] = (text, _written(codec, labels), _written(codec, transcript))
    return Transcribed([rows[number] for number in sorted(rows)])


def _written(codec: Codec, labels: Sequence[int]) -> str:
    written = codec.transcript(labels)
    return written if isinstance(written, str) else " ".join(map(str, written))


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
    table = series_of(getattr(spec, name) or spec.train, codec, saved.spec)
    rows_read = TargetReading.of(codec).part(whole(table), table)
    everything = Sequences(data.inputs, rows_read.starts, rows_read.lengths)
    values = ForecastValues(table, everything, codec, spec, saved.task.bands)
    few = _few(data, spec.horizon, values.many)
    part = saved.task.part(name, few)
    lasts = {number: int(length) - 1 for number, length in enumerate(part.view.lengths)}
    by_number: dict[int, NDArray[np.float64]] = {}
    for out, _, sequence, offset, lengths in _seen(saved, part):
        for lane, (number, first, length) in enumerate(zip(sequence.tolist(), offset.tolist(), lengths.tolist(), strict=True)):
            if number >= 0 and first <= lasts[number] < first + length:
                by_number[number] = out[lasts[number] - first, lane].double().numpy()
    shown: list[Sample] = []
    for number in range(0, len(by_number), values.many):
        place_among_all = np.flatnonzero(everything.starts <= few.starts[number])[-1]  # among all sequences of the file
        series, row = int(place_among_all) // values.many, int(few.starts[number] - everything.starts[place_among_all]) + lasts[number]
        outs = [by_number[number + place][None] for place in range(values.many)]
        made_HCQ = values(series, np.array([row + 1]), outs)[0]
        for place, column in enumerate(codec.forecast_columns):
            if len(shown) == MOST_PANELS:
                return shown
            named = column + (f", series {table.names[series]}" if len(table.names) > 1 else "")
            first_row = int(table.starts[series])
            panel = _panel(saved, table.values[first_row:, values.places[place]], row, named, made_HCQ[:, place])
            rows = slice(first_row + row + 1 - len(panel.history), first_row + row + 1 + spec.horizon)
            times = None if table.times is None else table.times.written(rows)
            shown.append(replace(panel, times=[] if times is None else [str(time) for time in times]))
    return shown


class _TimeIsUp(Exception):
    """An evaluation took too long for a report."""


def _errors(saved: Saved, name: str, data: Sequences) -> list[Sample]:
    """How errors are distributed over the horizon and over series; nothing if that takes too long."""
    part, errors = saved.task.part(name, data), list[Errors]()
    ends = time.monotonic() + SECONDS

    def tick(done: int, total: int) -> None:
        if time.monotonic() > ends:
            raise _TimeIsUp

    def look(metric: Metric) -> None:
        errors.extend([metric] if isinstance(metric, Errors) else [])

    with suppress(_TimeIsUp):
        by = Details(("series",))
        evaluate(saved.model, saved.task, part, mesh=saved.mesh, stage=saved.stage, tick=tick, details=by, look=look)
    if not errors or not (ours := errors[0].by_step()):
        return []
    several = saved.spec.data.season > 1  # otherwise the naive forecast is the last value
    simple = [
        (BASELINES[kind], each.absolute_HC.mean(axis=1).tolist()) for kind, each in part.baselines.items() if several or kind != "naive"
    ]
    series = errors[0].by_series()
    worst = sorted(series.items(), key=lambda pair: -pair[1])[:MOST_WORST] if len(series) > 1 else []
    unit = "units of the file" if saved.spec.data.standardize is False else "standardized"
    return [Distributed(f"MAE by step ahead ({unit})", [("forecast", ours), *simple], worst, len(series))]


def _panel(saved: Saved, values_R: NDArray[np.float64], row: int, title: str, made_HQ: NDArray[np.float64]) -> Forecasted:
    """What came before and after a row of a series, and the forecast after it."""
    spec, shares, bands = saved.spec.data, saved.task.levels, saved.task.bands
    start = max(0, row + 1 - 2 * spec.horizon)
    past, came = values_R[start : row + 1], values_R[row + 1 : row + 1 + spec.horizon]
    history = [(float(start - row + at), float(value)) for at, value in enumerate(past)]
    ahead = range(1, spec.horizon + 1)
    band, band_name, point_name = list[tuple[float, float, float]](), "", "forecast"
    if shares is not None:
        low, high = int(np.argmin(shares)), int(np.argmax(shares))
        middle = min(range(len(shares)), key=lambda at: abs(shares[at] - 0.5))
        point_name = "forecast" if bands is not None else "median" if shares[middle] == 0.5 else f"quantile {shares[middle]:g}"
        if low != high:
            band = [(float(at), float(made_HQ[at - 1, low]), float(made_HQ[at - 1, high])) for at in ahead]
            band_name = f"quantiles {shares[low]:g} to {shares[high]:g}" if bands is None else f"band of {bands.shares[-1]:g}"
        value_H = made_HQ[:, middle]
    else:
        value_H = made_HQ[:, 0]
    truth = [history[-1], *((float(at), float(came[at - 1])) for at in ahead)]
    return Forecasted(title, history, truth, [(float(at), float(value_H[at - 1])) for at in ahead], band, band_name, point_name)


def _few(data: Sequences, horizon: int, many: int) -> Sequences:
    """The first series, each of them `many` sequences, and of each the last rows."""
    few = MOST_SERIES * many
    lengths = data.lengths[:few]
    cut = np.maximum(lengths - max(MOST_ROWS, 2 * horizon), 0)
    warm = None if data.warm is None else np.maximum(data.warm[:few] - cut, 0)
    names = None if data.names is None else data.names[:few]
    units = None if data.units is None else data.units[:few]
    firsts = None if data.firsts is None else data.firsts[:few]
    return replace(data, starts=data.starts[:few] + cut, lengths=lengths - cut, warm=warm, firsts=firsts, names=names, units=units)
