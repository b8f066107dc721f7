"""Labels that write spans: B-X begins a span of type X, I-X is inside it, O is outside (BIO, also called IOB2); in BIOES, E-X ends a span
of several steps and S-X is a span of one. L, U and M are other names for E, S and I. A span may have no type: B, I, O.

NumPy only. Shapes: N labels, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Sequences
from carrywave.errors import DataError, SpecError

OUTSIDE = "O"
PREFIXES = {"B": "B", "I": "I", "E": "E", "S": "S", "M": "I", "L": "E", "U": "S"}  # as they are written, and what they mean
Flags = NDArray[np.bool_]


class Tag(NamedTuple):
    """What a label says: `O`, or B, I, E or S with the type of a span."""

    prefix: str
    type: str = ""


def tag_of(label: str) -> Tag | None:
    """What a label says; None if it does not write spans."""
    if label == OUTSIDE:
        return Tag(OUTSIDE)
    prefix, dash, kind = label.partition("-")
    return Tag(PREFIXES[prefix], kind) if prefix in PREFIXES and bool(dash) == bool(kind) else None


def tags_of(labels: Sequence[str]) -> tuple[Tag, ...] | None:
    """What all labels say; None if they do not write spans. Bare letters do only if B and O are among them: I and E may be anything."""
    parsed = [tag_of(label) for label in labels]
    tags = tuple(tag for tag in parsed if tag is not None)
    spans = any(tag.type for tag in tags) or {Tag("B"), Tag(OUTSIDE)} <= set(tags)
    return tags if spans and len(tags) == len(labels) else None


def scheme_of(labels: Sequence[str], setting: str = "auto") -> str | None:
    """The scheme that rules transitions out: the one asked for or, if that is auto, the one that the names of the labels show, if any."""
    tags = tags_of(labels)
    if setting == "none" or (tags is None and setting == "auto"):
        return None
    shown = "bioes" if tags is None or any(tag.prefix in "ES" for tag in tags) else "bio"
    if tags is None or (setting == "bio" and shown == "bioes"):
        wrong = next((label for label in labels if (tag := tag_of(label)) is None or tag.prefix in "ES"), "")
        raise SpecError(f"data.scheme={setting}, but {wrong!r} is not a label of it, as O and B-X are; remove data.scheme")
    return shown if setting == "auto" else setting


class Allowed(NamedTuple):
    """Which labels a sequence may begin and end with, and which may follow which [from, to]."""

    starts_N: Flags
    pairs_NN: Flags
    ends_N: Flags

    @staticmethod
    def by(scheme: str | None, labels: Sequence[str]) -> Allowed:
        """What a scheme allows; everything if there is none."""
        count = len(labels)
        if scheme is None:
            return Allowed(np.ones(count, np.bool_), np.ones((count, count), np.bool_), np.ones(count, np.bool_))
        tags = tags_of(labels)
        assert tags is not None
        pairs = [[_may_follow(scheme, one, other) for other in tags] for one in tags]
        outside = Tag(OUTSIDE)  # as if it stood before the first step and after the last
        starts, ends = [_may_follow(scheme, outside, tag) for tag in tags], [_may_follow(scheme, tag, outside) for tag in tags]
        return Allowed(np.array(starts, np.bool_), np.array(pairs, np.bool_).reshape(count, count), np.array(ends, np.bool_))

    @property
    def everything(self) -> bool:
        """True if nothing is ruled out."""
        return all(bool(each.all()) for each in self)

    def broken(self, tags_R: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[int, int, int] | None:
        """The first label that may not follow the one before it: its sequence, its row within that (the sequence's length: its end), and
        the label before, -1 at the beginning. Beside rows without a label (below 0), any may stand.
        """
        count = len(self.starts_N)
        # Three more: what stands before the first step, what after the last, and, at -1, what is not labelled.
        follows = np.zeros((count + 3, count + 3), np.bool_)
        follows[-1], follows[:, -1] = True, True
        follows[:count, :count], follows[count, :count], follows[:count, count + 1] = self.pairs_NN, self.starts_N, self.ends_N
        for number, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            seen = np.concatenate([[count], np.maximum(tags_R[start : start + length], -1), [count + 1]])
            right = follows[seen[:-1], seen[1:]]
            if length and not right.all():
                row = int(np.argmin(right))
                return number, row, int(seen[row]) if row else -1
        return None


def _may_follow(scheme: str, one: Tag, other: Tag) -> bool:
    inside = other.prefix in "IE"  # it goes on with a span that has begun
    if scheme == "bio":
        return not inside or (one.prefix in "BI" and one.type == other.type)
    return inside == (one.prefix in "BI") and (not inside or one.type == other.type)


def check_sequences(part: str, data: Sequences, labels: Sequence[str], setting: str) -> None:
    """Refuse sequences for a CRF that hold several, or labels that their scheme forbids: their loss would be infinite."""
    if data.resets is not None and data.resets.any():
        raise DataError(f"{part} has rows of several sequences (resets), but model.crf reads each row as one; write each in its own")
    scheme = scheme_of(labels, setting)
    broken = None if scheme is None or data.tags is None else Allowed.by(scheme, labels).broken(data.tags, data.starts, data.lengths)
    if broken is None or data.tags is None:
        return
    number, row, before = broken
    name = "its end" if row == data.lengths[number] else repr(labels[int(data.tags[data.starts[number] + row])])
    after = "at the beginning" if before < 0 else f"after {labels[before]!r}"
    raise DataError(
        f"{part}: {name} {after} (sequence {number + 1}, step {row + 1}) is not {str(scheme).upper()}, by which model.crf rules "
        "transitions out; correct the data, or set data.scheme=none, which allows all"
    )
