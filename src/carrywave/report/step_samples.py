"""The samples of regression at every step: what was estimated beside what was measured, step by step, and how good it is in each series.

Shapes: T time, B lane, C targets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from carrywave.data.sequences import Sequences
from carrywave.prediction.evaluation import Details, evaluate, passes
from carrywave.prediction.saved_run import Saved
from carrywave.report.sample_kinds import Followed, Ranked, Sample

MOST_SERIES, MOST_PANELS, MOST_STEPS = 2, 4, 730

Points = list[tuple[float, float]]


class _TimeIsUp(Exception):
    """An evaluation took too long for a report."""


def step_samples(saved: Saved, name: str, data: Sequences, seconds: float) -> list[Sample]:
    """The last steps of the first series, and the metrics of all of them, if there is time for that."""
    return [*_followed(saved, name, data), *_ranked(saved, name, data, seconds)]


def _followed(saved: Saved, name: str, data: Sequences) -> Iterator[Sample]:
    codec, few = saved.task.codec, _few(data)
    pairs: list[list[tuple[NDArray[np.float64], NDArray[np.float64]]]] = [[] for _ in range(len(few))]
    seen: list[tuple[Tensor, Tensor | None]] = []
    part = saved.task.part(name, few)
    walk = passes(saved.model, saved.spec, part, mesh=saved.mesh, stage=saved.stage, observe=lambda *each: seen.append(each))
    for batch, _ in walk:
        first = 0
        for out, target in seen:
            for lane, (owner, length) in enumerate(zip(batch.sequence.tolist(), batch.lengths.tolist(), strict=True)):
                if owner >= 0 and target is not None and length > first:
                    wanted = target[: length - first, lane]
                    wanted = wanted[..., 0] if wanted.ndim > 2 else wanted  # without the weights of the loss
                    guess = out[: length - first, lane]
                    pairs[owner].append((wanted.double().cpu().numpy(), guess.double().cpu().numpy()))
            first += len(out)
        seen.clear()
    panels = [(number, place) for number in range(len(few)) for place in range(len(codec.step_targets))][:MOST_PANELS]
    for number, place in panels:
        measured, estimated = (codec.restore(np.concatenate(each))[:, place] for each in zip(*pairs[number], strict=True))
        warm = 0 if few.warm is None else int(few.warm[number])
        steps = range(max(warm, len(measured) - MOST_STEPS), len(measured))
        named = codec.step_targets[place] + (f", series {few.names[number]}" if few.names is not None and len(few.names) > 1 else "")
        yield Followed(named, _points(measured, steps), _points(estimated, steps))


def _few(data: Sequences) -> Sequences:
    some = slice(None, MOST_SERIES)
    return replace(
        data,
        starts=data.starts[some],
        lengths=data.lengths[some],
        warm=None if data.warm is None else data.warm[some],
        spreads=None if data.spreads is None else data.spreads[some],
        names=None if data.names is None else data.names[some],
    )


def _points(values: NDArray[np.float64], steps: range) -> Points:
    return [(float(step + 1), float(values[step])) for step in steps if np.isfinite(values[step])]


def _ranked(saved: Saved, name: str, data: Sequences, seconds: float) -> Iterator[Sample]:
    ends = time.monotonic() + seconds

    def tick(done: int, total: int) -> None:
        if time.monotonic() > ends:
            raise _TimeIsUp

    with suppress(_TimeIsUp):
        by = Details(("series",))
        evaluate(saved.model, saved.task, saved.task.part(name, data), mesh=saved.mesh, stage=saved.stage, tick=tick, details=by)
        yield Ranked(by.rows["series"])
