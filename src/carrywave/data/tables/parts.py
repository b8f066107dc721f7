"""The parts of series that are split chronologically: train, valid and test.

A part that follows another in its series starts `warm` rows earlier; those rows bring the carry up to date and are not scored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Ints
from carrywave.data.tables.table import Table
from carrywave.errors import SpecError
from carrywave.spec.spec import Spec

PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class SeriesPart:
    """One part of each series: rows `starts … starts + lengths - 1` of the table; the first `warm` of them only warm up the carry."""

    starts: Ints
    lengths: Ints
    warm: Ints

    def only(self, kept: NDArray[np.bool_]) -> SeriesPart:
        """Return the part of some of the series."""
        return SeriesPart(self.starts[kept], self.lengths[kept], self.warm[kept])


def spans(table: Table, spec: Spec, *, valid_file: bool, test_file: bool) -> dict[str, SeriesPart]:
    """Split a training table by `data.split`; without it, the last share becomes valid unless there is a file for it."""
    data = spec.data
    if data.split is not None:
        if valid_file or (test_file and len(data.split) == 3):
            raise SpecError(
                "data.split takes valid and test from the training file, but separate files are set for them too; use one or the other"
            )
        bounds = np.array([_bounds(int(length), data.split) for length in table.lengths], np.int64)
    elif data.share > 0 and not valid_file:
        least = 1 if spec.each_step else data.horizon
        held = np.maximum(np.floor(table.lengths * data.share + 1e-9).astype(np.int64), least)
        bounds = np.stack([np.maximum(table.lengths - held, 0), table.lengths], axis=1)
    else:
        bounds = table.lengths[:, None]
    context = data.context or max(10 * data.season, 4 * spec.steps, spec.past_steps + spec.steps, data.warmup)
    parts: dict[str, SeriesPart] = {}
    before = np.zeros_like(table.lengths)
    for place, part in enumerate(PARTS[: bounds.shape[1]]):
        warm = np.minimum(before, context)
        parts[part] = SeriesPart(table.starts + before - warm, bounds[:, place] - before + warm, warm)
        before = bounds[:, place]
    return parts


def _bounds(rows: int, split: tuple[float, ...]) -> list[int]:
    """Return where the parts of one series end; all at 0 if it has too few rows, so that it is left out."""
    sums = np.cumsum(split)
    if any(part < 1 for part in split):
        return [int(np.floor(rows * total + 1e-9)) for total in sums]
    return [int(total) for total in sums] if sums[-1] <= rows else [0] * len(sums)


def whole(table: Table) -> SeriesPart:
    """Return all rows of every series, with no warm-up."""
    return SeriesPart(table.starts, table.lengths, np.zeros_like(table.lengths))


def long_enough(span: SeriesPart, horizon: int) -> NDArray[np.bool_]:
    """Return which series have rows for a forecast over the whole horizon in a part."""
    enough: NDArray[np.bool_] = span.lengths - span.warm >= np.where(span.warm > 0, horizon, horizon + 1)
    return enough
