"""A `View` is what a task reads of its data: sequences of steps, each with an input and possibly a target.

The loader queries it with whole matrices of row numbers, so building a batch takes a few NumPy gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Ints


@dataclass(frozen=True)
class View:
    """Sequence i is the steps `starts[i] … starts[i] + lengths[i] - 1` of `inputs`."""

    inputs: NDArray[Any]  # [rows] tokens or [rows, features]
    starts: Ints
    lengths: Ints  # number of steps that can be trained on
    targets_at: Callable[[NDArray[np.int64]], NDArray[Any]] | None = None  # rows [T, B] -> targets [T, B, …], int64 or float32
    labels: NDArray[Any] | None = None  # pooled tasks: one target per sequence
    inputs_at: Callable[[NDArray[np.int64]], NDArray[Any]] | None = None  # rows [T, B] -> inputs, if they are more than rows of `inputs`
    warm: Ints | None = None  # leading steps of each sequence whose targets are ignored
