"""The parts of series that are split chronologically: train, valid and test.

A part that follows another in its series starts `warm` rows earlier; those rows bring the carry up to date and are not scored.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

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

    @property
    def scored(self) -> SeriesPart:
        """The part without the rows that warm up the carry."""
        return SeriesPart(self.starts + self.warm, self.lengths - self.warm, np.zeros_like(self.warm))

    @property
    def rows(self) -> Ints:
        """The numbers of its rows."""
        return (
            np.concatenate(self.of(np.arange((self.starts + self.lengths).max(initial=0)))) if len(self.starts) else np.empty(0, np.int64)
        )

    def of(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """The values of a table in each series of the part."""
        return [values[start : start + length] for start, length in zip(self.starts, self.lengths, strict=True)]


def spans(table: Table, spec: Spec, files: Collection[str]) -> dict[str, SeriesPart]:
    """Split a training table by `data.split`; without it, the last share becomes valid unless there is a file for it.

    `files` are the parts that have one.
    """
    data = spec.data
    if data.split is not None:
        if "valid" in files or ("test" in files and len(data.split) == 3):
            raise SpecError(
                "data.split takes valid and test from the training file, but they have files of their own; use one or the other"
            )
        sums, by_share = np.cumsum(data.split), any(part < 1 for part in data.split)
        bounds = np.floor(table.lengths[:, None] * sums + 1e-9) if by_share else np.where(sums[-1] <= table.lengths[:, None], sums, 0)
        bounds = bounds.astype(np.int64)  # a series with too few rows for all parts has none of them
    elif data.share > 0 and "valid" not in files:
        least = 1 if spec.each_step else data.horizon
        held = np.maximum(np.floor(table.lengths * data.share + 1e-9).astype(np.int64), least)
        bounds = np.stack([np.maximum(table.lengths - held, 0), table.lengths], axis=1)
    else:
        bounds = table.lengths[:, None]
    context = max(10 * data.season, 4 * spec.steps, spec.past_steps + spec.steps, data.warmup)
    parts: dict[str, SeriesPart] = {}
    before = np.zeros_like(table.lengths)
    for place, part in enumerate(PARTS[: bounds.shape[1]]):
        warm = np.minimum(before, context)
        parts[part] = SeriesPart(table.starts + before - warm, bounds[:, place] - before + warm, warm)
        before = bounds[:, place]
    return parts


def whole(table: Table) -> SeriesPart:
    """Return all rows of every series, with no warm-up."""
    return SeriesPart(table.starts, table.lengths, np.zeros_like(table.lengths))


def long_enough(span: SeriesPart, horizon: int) -> NDArray[np.bool_]:
    """Return which series have rows for a forecast over the whole horizon in a part."""
    enough: NDArray[np.bool_] = span.lengths - span.warm >= np.where(span.warm > 0, horizon, horizon + 1)
    return enough
