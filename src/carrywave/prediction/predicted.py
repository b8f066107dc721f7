"""Turns outputs of a model into rows: a label or several with its probabilities, tags, a transcription, numbers, or a forecast in the units
of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from carrywave.data.codec import Codec
from carrywave.data.files.rows import Row
from carrywave.data.sequences import Sequences
from carrywave.data.tables.table import Table
from carrywave.model.heads.alignments import negative_log_likelihood
from carrywave.prediction.blocks import Block
from carrywave.prediction.outputs import HeadOutputs, Numbers
from carrywave.prediction.saved_run import Saved
from carrywave.tasks.forecast_values import ForecastValues
from carrywave.tasks.transcription import END, beam_search, greedy

BY_PLACE = "series"  # the field of a forecast with the index, from 0, of one of several unnamed series


def rows_of(outputs: HeadOutputs, block: Block, *, beam: int = 1) -> Iterator[Row]:
    """A row for each of a block, in order, after the fields that are carried. Empty on ranks other than 0. Collective when it is called.

    `beam`: how many beginnings of a transcription are kept at each step; with 1, the most likely class of each step is taken.
    """
    outs = outputs.of(*block.data) if len(block.data[0]) else []
    saved = outputs.members[0]
    spec = saved.spec
    how = _several if spec.data.multi_label else partial(_transcripts, beam) if spec.task == "transcription" else _PREDICTED[spec.task]
    predicted, nothing = iter(how(saved, outs)), _nothing(saved)
    whole = enumerate(block.carried if saved.mesh.world.rank == 0 else ())
    return ({**carried, **(nothing if number in block.empty else next(predicted))} for number, carried in whole)


def _nothing(saved: Saved) -> Row:
    """The answer for a row in which there is nothing to read."""
    several, shares = saved.spec.data.multi_label, dict.fromkeys(saved.task.codec.labels)
    match saved.spec.task:
        case "classification":
            return {"label": None, **({} if several else {"probability": None}), "probabilities": shares}
        case "tagging":
            return {"labels": [], **({"probabilities": {label: [] for label in shares}} if several else {})}
        case "transcription":
            return {"labels": saved.task.codec.transcript([]), "probability": None}
    return {"label": None}


def _labels(saved: Saved, outputs: list[Numbers]) -> Iterator[Row]:
    codec = saved.task.codec
    logits_BK = torch.from_numpy(np.stack(outputs))
    shares_BK = torch.softmax(logits_BK.double(), dim=-1)
    for best, shares in zip(logits_BK.argmax(-1).tolist(), shares_BK, strict=True):
        rounded = [round(share, 6) for share in shares.tolist()]
        yield {
            "label": codec.label(best),
            "probability": rounded[best],
            "probabilities": dict(zip(codec.labels, rounded, strict=True)),
        }


def _numbers(saved: Saved, outputs: list[Numbers]) -> Iterator[Row]:
    for out in outputs:
        values = saved.task.codec.restore(out).tolist()
        yield {"label": values[0] if len(values) == 1 else values}


def _tags(saved: Saved, outputs: list[Numbers]) -> Iterator[Row]:
    codec = saved.task.codec
    return ({"labels": [codec.label(int(tag)) for tag in tags]} for tags in outputs)


def _transcripts(beam: int, saved: Saved, outputs: list[Numbers]) -> Iterator[Row]:
    """The labels in a row, and their probability over all ways to lay them along the steps."""
    codec, blank = saved.task.codec, len(saved.task.codec.labels)
    for logs_TV in outputs:
        labels = greedy(logs_TV, blank) if beam == 1 else beam_search(logs_TV, blank, beam)[0][0]
        labels_1L = torch.tensor([labels or [END]])
        loss_1 = negative_log_likelihood(torch.from_numpy(logs_TV).double()[:, None], labels_1L, blank)
        yield {"labels": codec.transcript(labels), "probability": round(float(loss_1.neg().exp()), 6)}


def _several(saved: Saved, outputs: list[Numbers]) -> Iterator[Row]:
    """All labels whose probability is at least one half, for each sequence or for each step; and the probability of each label."""
    codec = saved.task.codec
    for out in outputs:  # [K], or [T, K]
        holds = (out >= 0).tolist()
        shares_K = torch.sigmoid(torch.from_numpy(out.T.copy()).double()).tolist()
        rounded = [round(share, 6) if isinstance(share, float) else [round(each, 6) for each in share] for share in shares_K]
        shares = {"probabilities": dict(zip(codec.labels, rounded, strict=True))}
        yield {"labels": [codec.listed(step) for step in holds], **shares} if out.ndim > 1 else {"label": codec.listed(holds), **shares}


_PREDICTED = {"classification": _labels, "regression": _numbers, "tagging": _tags}


def estimates(saved: Saved, outputs: list[Numbers], table: Table) -> Iterator[Row]:
    """The numbers of every step of every series."""
    codec = saved.task.codec
    for number, out in enumerate(outputs):
        start = int(table.starts[number])
        times = None if table.times is None else table.times.written(slice(start, start + len(out)))
        named = table.fields(number)
        for step, values in enumerate(codec.restore(out).tolist()):
            time = {"step": step + 1} if times is None else {str(codec.time): times[step]}
            yield {**named, **time, **dict(zip(codec.step_targets, values, strict=True))}


def named(table: Table, codec: Codec, number: int) -> Row:
    """The field that names a row's series; none for a single series without a name."""
    if codec.series:
        return table.fields(number)
    return {BY_PLACE: number} if len(table.names) > 1 else {}  # unnamed series are told apart by their position


def forecasts(saved: Saved, outputs: list[Numbers], data: Sequences, table: Table) -> Iterator[Row]:
    """Every step ahead of the last row of every series."""
    spec, codec = saved.spec.data, saved.task.codec
    levels, values = saved.task.levels, ForecastValues(table, data, codec, saved.spec, saved.task.bands)
    for number in range(len(outputs) // values.many):
        outs = [out[None] for out in outputs[number * values.many : (number + 1) * values.many]]
        made_HCQ = values(number, table.lengths[number : number + 1], outs)[0]
        times = table.ahead(number, spec.horizon)
        for step in range(spec.horizon):
            row = named(table, codec, number)
            if times is not None:
                row[str(codec.time)] = times[step]
            row["step"] = step + 1
            for column, made_Q in zip(codec.forecast_columns, made_HCQ[step].tolist(), strict=True):
                if levels is None or values.bands is not None:
                    row[column] = made_Q[len(made_Q) // 2]
                if levels is not None:
                    ends = {f"{column}-q{quantile:g}": value for quantile, value in zip(levels, made_Q, strict=True)}
                    row |= {name: value for name, value in ends.items() if values.bands is None or name != f"{column}-q0.5"}
            yield row
