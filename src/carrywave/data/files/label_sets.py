"""Targets of which any number may hold (`data.multi_label`): lists of labels, or vectors of 0 and 1 with a place for each label.

Which of the two the data has is seen from all of train: lists of numbers are vectors if all are of one length and hold nothing but 0 and 1;
otherwise their numbers name labels, as strings do. An empty list of names means that no label holds. A vector may leave places open (null,
NaN), and a step may have no target at all (null).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.files.fields import as_plain, class_of, listed, take, wrong
from carrywave.data.files.rows import Row

NONE, NAMES, VECTORS = "none", "names", "vectors"  # what a codec says of its labels: one each, or which form their lists have
FORM = 'a list of labels, as in ["a", "b"], or a vector of 0 and 1 (data.multi_label)'

Sets = Sequence[Any]  # a list for each sequence or step, None where there is none


def sets_of(row: Row, task: str, where: str, steps: int | None = None) -> Sets:
    """Return the row's lists: a single one for classification, otherwise one for each of its steps."""
    if task == "classification":
        return [_plain(take(row, "label", where), "label", where)]
    return [None if each is None else _plain(each, f"labels of step {step}", where) for step, each in enumerate(listed(row, where, steps))]


def _plain(value: Any, what: str, where: str) -> Any:
    plain = list(value) if isinstance(value, set | frozenset) else as_plain(value)
    if not isinstance(plain, list) and getattr(plain, "ndim", 0) == 0:
        raise wrong(plain, what, where, f"{FORM}; CSV has no lists, so use JSON lines or Parquet")
    return plain


def _bits(labels: Any) -> NDArray[np.float64] | None:
    """A list of nothing but 0 and 1, with NaN for what is missing; None for any other list."""
    array = labels if isinstance(labels, np.ndarray) else np.array([np.nan if each is None else each for each in labels])
    if array.ndim != 1 or array.dtype.kind not in "biuf" or not ((array == 0) | (array == 1) | (array != array)).all():
        return None
    return array.astype(np.float64)


@dataclass
class LabelSets:
    """Learns which form the lists of the training rows have, and the labels in them."""

    names: dict[str, str] = field(default_factory=dict)  # of each label, with its kind
    widths: set[int] = field(default_factory=set)
    only_bits: bool = True  # no list holds anything but 0, 1 and what is missing

    def watch(self, sets: Sets, where: str) -> None:
        """Record the lists of a row."""
        for each in sets:
            if each is None or not len(each):
                continue
            self.widths.add(len(each))
            bits = _bits(each)
            self.only_bits &= bits is not None
            for label in each if bits is None else np.unique(bits[np.isfinite(bits)]).astype(np.int64):
                kind, name = class_of(label, "a label", where)
                self.names[name] = kind

    @property
    def form(self) -> str:
        """`VECTORS` or `NAMES`."""
        return VECTORS if self.only_bits and len(self.widths) == 1 else NAMES

    @property
    def labels(self) -> dict[str, str]:
        """The labels, by name, with their kind; those of vectors are numbered."""
        return {str(place): "whole number" for place in range(*self.widths)} if self.form == VECTORS else self.names


def encode(sets: Sets, form: str, numbers: Mapping[str, int], where: str, unseen: Counter[str]) -> NDArray[np.float32]:
    """Return 0 or 1 for each label, NaN where that is not known, [lists, labels]; `numbers` are the places of the labels, and `unseen`
    counts those that train does not have.
    """
    flags = np.zeros((len(sets), len(numbers)), np.float32)
    for place, each in enumerate(sets):
        if each is None:
            flags[place] = np.nan
        elif form == VECTORS:
            bits = _bits(each)
            if bits is None or len(bits) != len(numbers):
                raise wrong(each, "a target", where, f"a vector of {len(numbers)} numbers 0 or 1 (null: not known), as in train")
            flags[place] = bits
        else:
            for label in each:
                _, name = class_of(label, "a label", where)
                if name in numbers:
                    flags[place, numbers[name]] = 1.0
                else:
                    unseen[name] += 1
    return flags
