"""A `View` is what a task reads of its data: sequences of steps, each step with an input and perhaps a target.

The loader asks it for whole matrices of row numbers at once, so building a batch is a few gathers in NumPy.
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
    lengths: Ints  # steps that can be trained on
    targets_at: Callable[[NDArray[np.int64]], NDArray[Any]] | None = None  # rows [T, B] -> targets [T, B, …], int64 or float32
    labels: NDArray[Any] | None = None  # pooled tasks: one target for each sequence
    inputs_at: Callable[[NDArray[np.int64]], NDArray[Any]] | None = None  # rows [T, B] -> inputs, where they are more than rows of `inputs`
    warm: Ints | None = None  # leading steps of each sequence whose targets do not count
