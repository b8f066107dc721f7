"""The denominator of MASE: the mean absolute seasonal change within train, for each series and column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.sequences import Ints, Sequences
from carrywave.data.tables.moments import NOISE
from carrywave.tasks.views import counted

TRACE = 2.0**-20  # float32 rounding error is sixteen times smaller

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class MaseScale:
    """Mean absolute change over a season, in standardised units, for each forecast column; 0 if there is none."""

    every: Numbers = ()  # for any series, if train held a single unnamed one
    named: Mapping[str, Numbers] = field(default_factory=dict)  # otherwise, for each series in train

    @staticmethod
    def of(train: Sequences, codec: Codec, season: int) -> MaseScale:
        """Compute the changes over the rows that are trained on."""
        columns, channels = np.array(codec.targets), codec.channels
        names = train.names or ()
        by_series = {}
        for place, (start, length) in enumerate(zip(train.starts, train.lengths, strict=True)):
            name = names[place] if names else str(place)
            scale = codec.scale_of.get(name) or codec.scale_of.get(channels[place % len(channels)] if channels else name)
            mean, std = scale or (codec.mean, codec.std)
            rows = np.arange(start, start + length)
            values = change(train.inputs[rows], season, columns, np.array(mean), np.array(std), counted(train, rows))
            by_series[name] = tuple(float(value) for value in values)
        if not codec.series and len(by_series) == 1:
            return MaseScale(every=next(iter(by_series.values())))
        if not codec.series and channels and len(by_series) == len(channels):
            return MaseScale(named=dict(zip(channels, by_series.values(), strict=True)))
        return MaseScale(named=by_series)

    def of_series(self, data: Sequences, channels: Sequence[str] = ()) -> NDArray[np.float64]:
        """Return the changes for each series of a part, [series, columns]; zeros for series that train does not contain.

        Independent `channels` of a series that has no name are known by theirs.
        """
        if not self.named:
            return np.tile(np.array(self.every, np.float64), (len(data), 1))
        none = (0.0,) * self.columns
        names = data.names or tuple(str(place) for place in range(len(data)))
        keys = channels or ("",)
        rows = [self.named.get(name) or self.named.get(keys[place % len(keys)], none) for place, name in enumerate(names)]
        return np.array(rows, np.float64).reshape(len(data), self.columns)

    def unknown(self, names: Sequence[str], channels: Sequence[str] = ()) -> list[str]:
        """Return the series that train does not contain; with independent `channels`, names are those of each series' first."""
        alone = bool(channels) and channels[0] in self.named
        return [name for name in names if name not in self.named] if self.named and not alone else []

    @property
    def columns(self) -> int:
        """Number of values per series."""
        return len(next(iter(self.named.values()), self.every))

    def to_json(self) -> Any:
        """Serialise for facts.json: a list if it applies to any series, else a list per name."""
        return {name: list(values) for name, values in self.named.items()} if self.named else list(self.every)

    @staticmethod
    def from_json(content: Any, columns: int) -> MaseScale:
        """Parse the output of `to_json`; raise ValueError if it does not fit."""
        if isinstance(content, dict) and content:
            changes = MaseScale(named={name: tuple(float(value) for value in values) for name, values in content.items()})
        else:
            changes = MaseScale(every=tuple(float(value) for value in content))
        for values in changes.named.values() or (changes.every,):
            if len(values) != columns:
                raise ValueError(f"scale has {len(values)} numbers, but codec.json has {columns} targets")
        return changes


def change(
    rows: NDArray[Any],
    season: int,
    columns: Ints,
    mean: NDArray[np.float64] | None = None,
    std: NDArray[np.float64] | None = None,
    real: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """Return the mean absolute seasonal change of each column of one series; 0 if it never changes or has no more rows than a season.

    `mean` and `std`, over all columns that are read, are those the rows were standardised with. Changes from and to values that are not
    `real`, missing or of weight 0, are left out.
    """
    part = np.asarray(rows[:, columns], dtype=np.float64)
    shape = (max(len(rows) - season, 0), len(columns))
    both = np.ones(shape, np.bool_) if real is None else np.broadcast_to(real[season:] & real[:-season], shape)
    if not both.any():
        return np.zeros(len(columns))
    means: NDArray[np.float64] = np.where(both, np.abs(part[season:] - part[:-season]), 0.0).sum(axis=0) / np.maximum(both.sum(axis=0), 1)
    # A column that repeats every season still shows changes from float32 rounding, and a constant one from the rounding of its
    # original values; dividing by such noise would make the metric meaningless.
    real = means > TRACE * np.abs(part[season:]).mean(axis=0)
    if mean is not None and std is not None:
        real &= means * std[columns] > 2.0 * NOISE * np.abs(mean[columns])
    return np.where(real, means, 0.0)
