"""Targets of which any number may hold (`data.multi_label`): lists of labels, or vectors of 0 and 1 with a place for each label.

Which of the two the data has is seen from all of train: lists of numbers are vectors if all are of one length and hold nothing but 0 and 1;
otherwise their numbers name labels, as strings do. An empty list of names means that no label holds. A vector may leave places open (null,
NaN), and a step may have no target at all (null).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.files.fields import as_plain, class_of, kind_of, take
from carrywave.data.files.rows import Row
from carrywave.errors import DataError

NONE, NAMES, VECTORS = "none", "names", "vectors"  # what a codec says of its labels: one each, or which form their lists have
EXAMPLE = 'write a list of labels, as in ["a", "b"], or a vector of 0 and 1'

Sets = Sequence[Any]  # a list for each sequence or step, None where there is none


def sets_of(row: Row, where: str, *, steps: int | None) -> Sets:
    """Return the row's lists: one for each of `steps` steps, or a single one if that is None."""
    if steps is None:
        return [_plain(take(row, "label", where), "label", where)]
    value = as_plain(take(row, "labels", where))
    if not isinstance(value, list | np.ndarray):
        raise DataError(f"{where}: labels is {kind_of(value)}, not a list; use a list of labels, or a vector of 0 and 1, for each step")
    if len(value) != steps:
        many = f"{len(value)} list{'s' * (len(value) != 1)} of labels for {steps} step{'s' * (steps != 1)}"
        raise DataError(f"{where}: {many}; use one for each step (null for none, [] if no label holds)")
    return [None if each is None else _plain(each, f"labels of step {step}", where) for step, each in enumerate(value)]


def _plain(value: Any, what: str, where: str) -> Any:
    plain = list(value) if isinstance(value, set | frozenset) else as_plain(value)
    if not isinstance(plain, list) and getattr(plain, "ndim", 0) == 0:
        instead = "; CSV has no lists, so use JSON lines or Parquet" if isinstance(plain, str) else ""
        raise DataError(f"{where}: {what} is {kind_of(plain)}, but data.multi_label is set; {EXAMPLE}{instead}")
    return plain


def _numbers(sets: Sets) -> NDArray[np.float64] | None:
    """The lists as a matrix with NaN for what is missing, if all hold numbers and are equally long; otherwise None."""
    widths = {len(each) for each in sets if each is not None}
    if len(widths) != 1:
        return None
    empty = [None] * widths.pop()
    try:
        matrix = np.array([empty if each is None else each for each in sets])
    except ValueError:  # lists in lists
        return None
    if matrix.dtype.kind == "O" and all(value is None or isinstance(value, int | float | np.number) for value in matrix.flat):
        return matrix.astype(np.float64)
    return matrix.astype(np.float64) if matrix.ndim == 2 and matrix.dtype.kind in "biuf" else None


@dataclass
class LabelSets:
    """Learns which form the lists of the training rows have, and the labels in them."""

    names: dict[str, str] = field(default_factory=dict)  # of each label, with its kind
    widths: set[int] = field(default_factory=set)  # of lists of numbers
    only_bits: bool = True  # no list holds anything but 0, 1 and what is missing

    def watch(self, sets: Sets, where: str) -> None:
        """Record the lists of a row."""
        matrix = _numbers(sets)
        if matrix is not None and _bits(matrix):
            self.widths |= {matrix.shape[1]} - {0}
            self._name("whole number", map(str, np.unique(matrix[np.isfinite(matrix)]).astype(np.int64).tolist()))
            return
        for each in sets:
            if each is None or not len(each):
                continue
            alone = _numbers([each])
            if alone is not None:
                self.widths.add(len(each))
                self.only_bits &= _bits(alone)
            for label in each:
                kind, name = class_of(label, "a label", where)
                self._name(kind, [name])

    def _name(self, kind: str, names: Iterable[str]) -> None:
        self.names.update(dict.fromkeys(names, kind))

    @property
    def form(self) -> str:
        """`VECTORS` or `NAMES`."""
        numbers = set(self.names.values()) == {"whole number"}
        return VECTORS if numbers and self.only_bits and len(self.widths) == 1 else NAMES

    @property
    def labels(self) -> dict[str, str]:
        """The labels, by name, with their kind; those of vectors are numbered."""
        [width] = self.widths if self.form == VECTORS else [0]
        return {str(place): "whole number" for place in range(width)} if width else self.names


def _bits(matrix: NDArray[np.float64]) -> bool:
    return bool(((matrix == 0) | (matrix == 1) | np.isnan(matrix)).all())


def encode(sets: Sets, form: str, numbers: Mapping[str, int], where: str, unseen: Counter[str]) -> NDArray[np.float32]:
    """Return 0 or 1 for each label, NaN where that is not known, [lists, labels]; `numbers` are the places of the labels, and `unseen`
    counts those that train does not have.
    """
    return _vectors(sets, len(numbers), where) if form == VECTORS else _named(sets, numbers, where, unseen)


def _vectors(sets: Sets, count: int, where: str) -> NDArray[np.float32]:
    matrix = np.full((len(sets), count), np.nan) if all(each is None for each in sets) else _numbers(sets)
    if matrix is None or matrix.shape[1] != count or not _bits(matrix):
        raise DataError(f"{where}: the labels of train are vectors of {count} numbers 0 or 1 (null or NaN: not known); write such vectors")
    return matrix.astype(np.float32)


def _named(sets: Sets, numbers: Mapping[str, int], where: str, unseen: Counter[str]) -> NDArray[np.float32]:
    flags = np.zeros((len(sets), len(numbers)), np.float32)
    for place, each in enumerate(sets):
        if each is None:
            flags[place] = np.nan
            continue
        for label in each:
            _, name = class_of(label, "a label", where)
            if name in numbers:
                flags[place, numbers[name]] = 1.0
            else:
                unseen[name] += 1
    return flags
