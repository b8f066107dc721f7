"""The samples of a report: what the best weights make of the run's own test data (or else valid), in a few seconds, on this machine.

Shapes: T time, B lane, H horizon, C columns, Q quantiles.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.data.prepare import series_of
from carrywave.data.sequences import Sequences
from carrywave.data.tables.channels import TargetReading
from carrywave.data.tables.parts import whole
from carrywave.errors import UserError
from carrywave.model.model import Model
from carrywave.prediction.evaluation import Details, Kept, evaluate, is_ctc, passes
from carrywave.prediction.generation import Sampling, generate
from carrywave.prediction.saved_run import Saved, changed_since, open_run, own_data
from carrywave.report import figures
from carrywave.report.blocks import Block, Listing, Passage
from carrywave.report.chart import WIDE, Area, Chart, Curve
from carrywave.report.chart import number as shown_number
from carrywave.spec.data_spec import BatchSpec
from carrywave.tasks.forecast_values import ForecastValues
from carrywave.tasks.metrics.labels import Confusion
from carrywave.tasks.metrics.spans import TagConfusion
from carrywave.tasks.transcription import greedy

SECONDS = 20.0  # within which a pass over the data ends
TEXTS, TEMPERATURE = 2, 0.8
SHARE_BEFORE, WORDS, CHARACTERS = 1 / 3, 60, 280  # of a passage: what the model is given, and how long it is
MOST_SEQUENCES, MOST_CHARTS = 2, 4
MOST_ROWS, MOST_LABELS, PAIRS = 30, 16, 20


class _TimeIsUp(Exception):
    """A pass took too long for a report."""


def samples_of(folder: Path, device: str = "auto") -> list[Block]:
    """The samples of a run, or why there are none. Mistakes of the surroundings (no weights yet, data moved) are a reason, not an error."""
    try:
        saved = open_run(folder, device)
        if saved.spec.data.train is None:
            return ["No samples: the run was trained on data from Python, which is not stored in it."]
        prepared = own_data(saved)
        # As in an evaluation: what chose the weights is not what shows how good they are.
        name, data = ("test", prepared.test) if prepared.test is not None else ("valid", prepared.valid)
        if data is None or not saved.model.has_output:
            return ["No samples: the run has no test or validation data, or the model's head has no forward method."]
        changed = [f"{line}." for line in changed_since(saved, name)]
        saved = replace(saved, task=saved.task.with_line(prepared.train))
        what = "Test data" if name == "test" else "Validation data"
        return [*changed, f"{what}, with the best weights:", *_blocks(saved, name, data)]
    except UserError as error:
        return [f"No samples: {error}."]


def _blocks(saved: Saved, name: str, data: Sequences) -> Iterator[Block]:
    match saved.spec.task:
        case "language":
            yield from _texts(saved, data)
        case "transcription":
            yield _transcripts(saved, name, data)
        case "forecasting":
            yield from _forecasts(saved, name, data)
            yield from _by(saved, name, data, "series")
        case "regression" if saved.spec.each_step:
            yield from _by(saved, name, data, "series")
        case "regression":
            yield from _pairs(saved, name, data)
        case _:
            yield from _by(saved, name, data, "label")


def _texts(saved: Saved, data: Sequences) -> Iterator[Passage]:
    """Passages from the data, and what the model writes after their beginnings."""
    codec, length = saved.task.codec, WORDS if saved.task.codec.kind == "word" else CHARACTERS
    longest = int(np.argmax(data.lengths))
    room = max(0, int(data.lengths[longest]) - length)
    firsts = [int(data.starts[longest]) + room * part // TEXTS for part in range(TEXTS)]
    tokens = [np.asarray(data.inputs[first : first + min(length, int(data.lengths[longest]))]).astype(np.int64) for first in firsts]
    before = max(1, round(SHARE_BEFORE * len(tokens[0])))
    how, ends = Sampling(temperature=TEMPERATURE, seed=1), saved.task.document_ends
    if not isinstance(saved.model, Model) or len(tokens[0]) <= before:
        return
    prompts = [each[:before].tolist() for each in tokens]
    written = generate(saved.model, prompts, len(tokens[0]) - before, how=how, device=saved.mesh.device, ends=ends)
    for each, more in zip(tokens, written, strict=True):
        # Words are separated by a space there too: what is shown is what they add to the text before them.
        begun = codec.decode(each[:before])
        texts = (codec.decode(np.concatenate([each[:before], np.asarray(after, np.int64)])) for after in (more, each[before:]))
        yield Passage(begun, *(text.removeprefix(begun) for text in texts))


def _outputs(saved: Saved, name: str, data: Sequences) -> Iterator[tuple[Tensor, Tensor | None, Tensor, Tensor]]:
    """Outputs and targets of each batch, with the sequence and the offset of its lanes, until the time is up."""
    spec = saved.spec
    if spec.task == "tagging" and spec.streams:
        spec = spec.model_copy(update={"batch": BatchSpec(tokens=spec.lanes * spec.steps)})
    shown: list[tuple[Tensor, Tensor | None]] = []
    part, ends = saved.task.part(name, data), time.monotonic() + SECONDS
    kept, observe = Kept(saved.stage), lambda out, target, *_: shown.append((out, target))
    walk = passes(saved.model, spec, part, mesh=saved.mesh, kept=kept, observe=observe)
    for batch, _ in walk:
        outs, targets = zip(*(shown[-1:] if saved.stage.pooled else shown), strict=True)
        out, target = torch.cat(outs).float().cpu(), None if targets[0] is None else torch.cat(targets).cpu()
        shown.clear()
        yield out, target, batch.sequence.cpu(), batch.offset.cpu()
        if time.monotonic() > ends:
            return


def _by(saved: Saved, name: str, data: Sequences, group: str) -> Iterator[Listing]:
    """Which labels are taken for which, and how well each label, type of span or series is predicted; nothing if that takes too long."""
    ends = time.monotonic() + SECONDS

    def tick(done: int, total: int) -> None:
        if time.monotonic() > ends:
            raise _TimeIsUp

    part, details = saved.task.part(name, data), Details((group,))
    with suppress(_TimeIsUp):
        evaluate(saved.model, saved.task, part, mesh=saved.mesh, kept=Kept(saved.stage), tick=tick, details=details)
    rows = details.rows.get(group, [])
    metric = details.metric
    if isinstance(metric, TagConfusion):
        group, rows = "type", metric.rows("type")
    if isinstance(metric, Confusion):
        yield _confusion(metric.labels, np.array(metric.counts_KK.tolist()))
    if len(rows) > 1:
        key = next(key for key in ("nse", "mae", "targets") if key in rows[0])  # the worst series first, the most frequent labels
        rows = sorted(rows, key=lambda row: float(row[key]) * (1 if key == "nse" else -1))
        more = f"… and {len(rows) - MOST_ROWS:,} more." if len(rows) > MOST_ROWS else ""
        cells = [[_figure(name, value) for name, value in row.items()] for row in rows[:MOST_ROWS]]
        yield Listing(f"By {group}", [figures.metric_name(name) for name in rows[0]], cells, more)


def _figure(name: str, value: object) -> str:
    if isinstance(value, float):
        return figures.metric_text(name, value) if math.isfinite(value) else "–"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _confusion(labels: Sequence[str], counts_KK: NDArray[np.int64]) -> Listing:
    """Of the most frequent labels; the others are counted together."""
    frequent = np.sort(np.argsort(-counts_KK.sum(1), kind="stable")[:MOST_LABELS])
    right, others = counts_KK.trace() / max(1, counts_KK.sum()), np.setdiff1d(np.arange(len(labels)), frequent)
    groups = [[place] for place in frequent] + ([list(others)] if len(others) else [])
    counts = np.array([[counts_KK[np.ix_(truth, guess)].sum() for guess in groups] for truth in groups])
    names = [labels[place] for place in frequent] + ([f"{len(others)} others"] if len(others) else [])
    rows = [[name, *(f"{many:,}" if many else "" for many in row)] for name, row in zip(names, counts.tolist(), strict=True)]
    shades = (counts / np.maximum(1, counts.sum(1, keepdims=True))).tolist()
    note = "Rows are the truth, columns the prediction; the shade is the share of the row."
    return Listing(f"Which label is taken for which: {right:.1%} are right", ("", *names), rows, note, shades)


def _transcripts(saved: Saved, name: str, data: Sequences) -> Listing:
    """Sequences with the labels that they have, and those that the model finds in them."""
    codec, rows = saved.task.codec, dict[int, list[str]]()

    def written(labels: Sequence[int]) -> str:
        text = codec.transcript(labels)
        return text if isinstance(text, str) else " ".join(map(str, text))

    for out, target, sequence, _ in _outputs(saved, name, data):
        for lane, number in enumerate(sequence.tolist()):
            counts = data.weights is None or (number >= 0 and data.weights[number] > 0)
            if number >= 0 and counts and target is not None and is_ctc(saved.model):
                truth = [label for label in target[lane].tolist() if label >= 0]
                rows[number] = [str(number + 1), written(truth), written(greedy(out[:, lane].numpy(), len(codec.labels)))]
        if len(rows) >= PAIRS:
            break
    return Listing("", ("", "truth", "prediction"), [rows[number] for number in sorted(rows)[:PAIRS]])


def _pairs(saved: Saved, name: str, data: Sequences) -> Iterator[Listing]:
    """Numbers that were to be predicted, and those that were, in the units of the data."""
    codec = saved.task.codec
    for out, target, sequence, _ in _outputs(saved, name, data):
        if target is not None and out.shape == target.shape:
            pair = (codec.restore(each[sequence >= 0].double().numpy()).tolist() for each in (target, out))
            rows = [[str(at), *(", ".join(map(shown_number, some)) for some in both)] for at, both in enumerate(zip(*pair, strict=True), 1)]
            yield Listing("", ("", "truth", "prediction"), rows[:PAIRS])
        return


def _few(data: Sequences, count: int) -> Sequences:
    """The first sequences."""
    names = ("starts", "lengths", "warm", "names", "units", "firsts", "spreads")
    return replace(data, **{name: value[:count] for name in names if (value := getattr(data, name)) is not None})


def _forecasts(saved: Saved, name: str, data: Sequences) -> Iterator[Chart]:
    """A chart for each of the first series and columns: the forecast from the last row whose whole horizon is known."""
    spec, codec = saved.spec.data, saved.task.codec
    table = series_of(getattr(spec, name) or spec.train, codec, saved.spec)
    rows_read = TargetReading.of(codec).part(whole(table), table)
    everything = Sequences(data.inputs, rows_read.starts, rows_read.lengths)
    values = ForecastValues(table, everything, codec, saved.spec, saved.task.bands)
    few = _few(data, MOST_SEQUENCES * values.many)
    lasts = [int(length) - 1 for length in saved.task.part(name, few).view.lengths]
    made: dict[int, NDArray[np.float64]] = {}
    for out, _, sequence, offset in _outputs(saved, name, few):
        for lane, (number, first) in enumerate(zip(sequence.tolist(), offset.tolist(), strict=True)):
            if number >= 0 and first <= lasts[number] < first + len(out):
                made[number] = out[lasts[number] - first, lane].double().numpy()
    charts = 0
    for number in range(0, len(made), values.many):
        place_among_all = np.flatnonzero(everything.starts <= few.starts[number])[-1]  # among all sequences of the file
        series, row = int(place_among_all) // values.many, int(few.starts[number] - everything.starts[place_among_all]) + lasts[number]
        made_HCQ = values(series, np.array([row + 1]), [made[number + place][None] for place in range(values.many)])[0]
        for place, column in enumerate(codec.forecast_columns):
            title = column + (f", series {table.names[series]}" if len(table.names) > 1 else "")
            rows = slice(int(table.starts[series]) + max(0, row + 1 - 2 * spec.horizon), int(table.starts[series]) + row + 1 + spec.horizon)
            times = [] if table.times is None else [str(each) for each in table.times.written(rows)]
            yield _forecast(saved, title, table.values[rows, values.places[place]], times, made_HCQ[:, place])
            charts += 1
            if charts == MOST_CHARTS:
                return


def _forecast(saved: Saved, title: str, truth_R: NDArray[np.float64], times: Sequence[str], made_HQ: NDArray[np.float64]) -> Chart:
    """A forecast beside what came, and before it what was known: the rows of the truth end with those of the forecast."""
    levels, ahead = saved.task.levels, range(1, len(made_HQ) + 1)
    origin = len(truth_R) - len(made_HQ) - 1
    truth = Curve("truth", [(float(at - origin), float(value)) for at, value in enumerate(truth_R)], "base")
    middle, areas, point = 0, list[Area](), "forecast"
    if levels is not None:
        low, high, middle = int(np.argmin(levels)), int(np.argmax(levels)), int(np.argmin(np.abs(np.array(levels) - 0.5)))
        bands = saved.task.bands
        point = "forecast" if bands is not None else "median" if levels[middle] == 0.5 else f"quantile {levels[middle]:g}"
        band = f"quantiles {levels[low]:g} to {levels[high]:g}" if bands is None else f"band of {bands.shares[-1]:g}"
        areas = (
            [Area(band, [(float(at), float(made_HQ[at - 1, low]), float(made_HQ[at - 1, high])) for at in ahead])] if low != high else []
        )
    forecast = Curve(point, [(float(at), float(made_HQ[at - 1, middle])) for at in ahead])
    x_ticks = [(float(at - origin), times[at]) for at in (0, len(times) - 1)] if times else []
    x_name = f"forecast made at {times[origin]}" if times else "steps ahead"
    return Chart(title, [truth, forecast], areas, origins=[0.0], x_name=x_name, x_ticks=x_ticks, width=WIDE)
