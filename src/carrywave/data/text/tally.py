"""`Tally` counts what a part of the data has that training did not, tokens and labels, and rows that are left out; a line tells of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from carrywave.data.text.tokenizers import UNKNOWN, WRITTEN_UNKNOWN, Ids

SHOWN = 5  # labels in a line


@dataclass
class Tally:
    """What was odd in the rows that were read."""

    tokens: int = 0
    unknown: int = 0  # tokens that the vocabulary lacks
    left_out: int = 0  # rows without content or without a target
    labels: Counter[str] = field(default_factory=Counter)  # those that train does not have
    counted: bool = True  # such labels are counted as wrong

    def read(self, ids: Ids, unknown: int, text: str | Sequence[str] = "") -> None:
        """Count tokens; those of a text that is written with <unk> itself are known."""
        self.tokens += len(ids)
        if unknown < 0 or not (many := int(np.count_nonzero(ids == unknown))):
            return
        self.unknown += many - (sum(1 for _ in WRITTEN_UNKNOWN.finditer(text)) if isinstance(text, str) else text.count(UNKNOWN))

    def lines(self, name: str, *, train: bool = False) -> Iterator[str]:
        """Lines for a person."""
        if self.left_out:
            yield f"{name}: {_many(self.left_out, 'row')} without a text or a label {_is(self.left_out)} left out"
        if self.unknown > 0:
            what = f"rare, and read as {UNKNOWN}, so that it is learned" if train else f"unknown to the vocabulary, and read as {UNKNOWN}"
            yield f"{name}: {self.unknown:,} of {_many(self.tokens, 'token')} {_is(self.unknown)} {what}"
        if total := self.labels.total():
            shown = ", ".join([repr(label) for label, _ in self.labels.most_common(SHOWN)] + ["…"] * (len(self.labels) > SHOWN))
            what = "counted as wrong" if self.counted else "left out"
            yield f"{name}: {_many(total, 'label')} that train does not have ({shown}) {_is(total)} {what}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _is(count: int) -> str:
    return "are" if count > 1 else "is"
