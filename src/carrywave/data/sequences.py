"""`Sequences` is the common format of all data: sequences stored end to end in flat arrays, in memory or memory-mapped.

A language corpus is one long sequence of tokens, a set of labelled examples is many short ones, a table holds one per series.
Parts of one data set (train, valid, test) may share the flat array. A `View` is what a task reads of them: steps, each with an input and
possibly a target. The loader queries it with whole matrices of row numbers, so building a batch takes a few NumPy gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Ints = NDArray[np.int64]
# In the place of a label that train does not have: it has no loss, and no answer is right. The second one goes on with a span.
UNSEEN, UNSEEN_INSIDE = -101, -102


@dataclass(frozen=True)
class Sequences:
    """Rows of `inputs`, cut into sequences by `starts` and `lengths`."""

    inputs: NDArray[Any]  # [rows] tokens (uint8, uint16 or int32), [rows, 1 + L] with codes of their characters, [rows, features] float32
    starts: Ints  # [n] first row of each sequence
    lengths: Ints  # [n] rows of each sequence, at least 1
    labels: NDArray[Any] | None = None  # for each sequence: [n] int64 classes, or [n, outputs] float32; of several labels, 0 or 1
    # For each row: [rows] int64, -100 for no tag, less for one that train does not have; of several labels, or of numbers, [rows, labels]
    # float32, NaN for none.
    tags: NDArray[Any] | None = None
    resets: NDArray[np.bool_] | None = None  # for each row: True if the state starts anew with it
    weights: NDArray[np.float32] | None = None  # [n] weight of each sequence's targets in the loss; None: 1, or those of its rows
    step_weights: NDArray[np.float32] | None = None  # for each row: the weight of what it holds as a target; None: that of its sequence
    missing: NDArray[np.bool_] | None = None  # [rows, targets] True where a row lacks what is forecast; None: nothing is missing
    spans: Ints | None = None  # [n, 2] the first of `labels` that a sequence has, and the end of them, if it may have any number in a row
    warm: Ints | None = None  # [n] number of leading rows that only warm up the carry
    firsts: Ints | None = None  # [n] the first row of each series, if that lies before the part; None: `starts`
    units: NDArray[np.float64] | None = None  # [n, numbers of a step] the size of a standardised unit of each series in the data's own
    means: NDArray[np.float64] | None = (
        None  # [n, numbers of a step] where 0 is in the data's units, if errors depend on it (logarithms, …)
    )
    spreads: NDArray[np.float64] | None = None  # [n, targets] the deviation of each series' targets in train, if steps have numbers
    names: tuple[str, ...] | None = None  # one per sequence, if sequences are named (series)
    unread: NDArray[np.uint32] | None = None  # [words, characters] code points, then 0, of each <unk> in the order of `inputs`
    notes: tuple[str, ...] = ()  # what a person should know of how a separate file or object was read

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def counted(self) -> int:
        """The number of sequences whose weight is not 0."""
        return len(self) if self.weights is None else int((np.asarray(self.weights) > 0).sum())

    @property
    def tokens(self) -> NDArray[Any]:
        """The tokens [rows], without the characters that may be beside them."""
        return self.inputs if self.inputs.ndim == 1 else self.inputs[:, 0]


@dataclass(frozen=True)
class History:
    """The last `steps` values of some columns, up to and including each step; what lies before a series is its first value.

    With `units` [n, columns], the size of a unit in each sequence follows them in every row. `firsts` [n] as in `Sequences`.
    """

    steps: int
    columns: Ints
    units: NDArray[np.float64] | None = None
    firsts: Ints | None = None


@dataclass(frozen=True)
class View:
    """Sequence i is the steps `starts[i] … starts[i] + lengths[i] - 1` of `inputs`."""

    inputs: NDArray[Any]  # [rows] tokens or [rows, features]
    starts: Ints
    lengths: Ints  # number of steps that can be trained on
    targets_at: Callable[[NDArray[np.int64]], NDArray[Any]] | None = None  # rows [T, B] -> targets [T, B, …], int64 or float32
    labels: NDArray[Any] | None = None  # pooled tasks: one target per sequence
    weights: NDArray[np.float32] | None = None  # one per sequence, of its targets
    weights_at: Callable[[NDArray[np.int64]], NDArray[np.float32]] | None = None  # rows [T, B] -> weights of their targets, [T, B, …]
    labels_at: Callable[[Ints, int], NDArray[Any]] | None = None  # sequences [B], steps of the window -> labels in a row [B, L], then -1
    inputs_at: Callable[[NDArray[np.int64]], NDArray[Any]] | None = None  # rows [T, B] -> inputs, if they are more than rows of `inputs`
    warm: Ints | None = None  # leading steps of each sequence whose targets are ignored
    history: History | None = None  # the past values that a head reads beside each step
    resets_at: Callable[[NDArray[np.int64]], NDArray[np.bool_]] | None = None  # rows [T, B] -> True where the state starts anew
    linear: NDArray[np.float32] | None = None  # [n, answers + 1] what a linear part says of each sequence, and how much the network weighs


def token_dtype(size: int) -> DTypeLike:
    """Return the smallest dtype that holds tokens 0 … size - 1."""
    return np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.int32
