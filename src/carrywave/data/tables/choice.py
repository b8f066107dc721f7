"""What a user, or the training data, says about the columns of a table, and the words in which messages name columns."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from carrywave.data.codec import Codec
from carrywave.errors import DataError
from carrywave.spec.data_spec import DataSpec

SHOWN = 8  # at most this many names in a message
COVARIATES = ("known", "calendar", "categorical", "static")


@dataclass(frozen=True)
class ColumnChoice:
    """The role of columns and the spacing of times, as far as they are told; None leaves them to the table."""

    columns: tuple[str, ...] | None = None
    time: str | None = None
    series: tuple[str, ...] | None = None
    frequency: str | None = None
    day_first: bool | None = None  # in dates that can be read in two ways
    trained: bool = False  # read as the training data was read
    known: tuple[str, ...] = ()  # known for the whole horizon
    calendar: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    missing: str = "none"  # how empty cells and missing rows are filled
    repeats: str | None = None  # which of several rows of one time counts
    targets: tuple[str, ...] = ()  # to forecast; empty: all that are measured
    weight: str | None = None  # the weight of each row's values as targets
    each_step: bool = False  # targets are estimated at every step from the other columns
    in_order: bool = False  # rows have no times, and are in their order

    @staticmethod
    def of(data: DataSpec, codec: Codec | None, *, labelled: bool = True) -> ColumnChoice:
        """Take the choice from the spec or, given a codec, from the training data; if not `labelled`, without weights and without targets
        that are estimated at every step.
        """
        told: DataSpec | Codec = data if codec is None else codec
        settings: dict[str, Any] = {name: getattr(told, name) or () for name in COVARIATES}
        settings |= {"missing": data.missing, "repeats": data.repeats, "weight": data.weight if labelled else None}
        if codec is None:
            settings |= {"targets": data.targets or (), "each_step": data.each_step}
            return ColumnChoice(data.columns, data.time, data.series, data.frequency_text, **settings)
        settings |= {"targets": codec.forecast_columns if labelled or not codec.step_targets else (), "each_step": bool(codec.step_targets)}
        frequency = codec.frequency or "none"
        return ColumnChoice(codec.read_columns, codec.time, codec.series, frequency, codec.day_first, trained=True, **settings)

    @property
    def asked(self) -> frozenset[str]:
        """The columns that are named."""
        weight = () if self.weight is None else (self.weight,)
        return frozenset((*(self.columns or ()), *self.targets, *self.known, *self.categorical, *self.static, *weight))


def require(names: Sequence[str], wanted: Sequence[str], file: str, field: str | None) -> None:
    """Reject a missing column; `field` is the key that names it, None if the training data had it."""
    for column in wanted:
        if column not in names:
            raise DataError(missing_column(file, column, names, field))


def missing_column(where: str, column: str, names: Sequence[str], setting: str | None) -> str:
    """Return the message; `setting` is the key that names the column, None if the training data had it."""
    fact = f"{where} has no column {column!r}" + (f" ({setting})" if setting else ", which the training data has")
    near = difflib.get_close_matches(column, names, n=1, cutoff=0.6) or [name for name in names if name.lower() == column.lower()]
    return f"{fact}; did you mean {quoted(near[0])}?" if near else f"{fact}; use one of {listed(list(map(quoted, names)))}"


def listed(names: Sequence[str]) -> str:
    """The first of some names, and how many there are besides."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def quoted(column: str) -> str:
    """Return a name as it is, or in quotes if it would not be seen."""
    return column if column.strip() else repr(column)


def counted(count: int, one: str, more: str) -> str:
    """Return a number with the words for one or for more, as "1 row is" or "2 rows are"."""
    return f"{count:,} {one if count == 1 else more}"
