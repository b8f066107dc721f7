"""Inputs with gaps (`data.missing: mask`): the last value seen, whether there is one at this step, and for how long there has been none.

What a GRU-D reads of each value, for any cell. Before the first value of a series there is none to repeat: the mean, 0, stands for it.
Shapes: N rows, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Ints

SEEN, AGE = "_seen", "_age"


def mask_columns(names: Sequence[str]) -> tuple[str, ...]:
    """The names of the further columns: whether each value is there, then how long ago the last one was."""
    return (*(name + SEEN for name in names), *(name + AGE for name in names))


def masked(values_NC: NDArray[np.float32], starts: Ints, totals: Ints) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Standardised values with their gaps closed, and the further columns [N, 2 C]: 1 or 0, and the logarithm of 1 + the steps since the
    last value. Series begin at `starts` and have `totals` rows, one after the other.
    """
    present_NC = ~np.isnan(values_NC)
    row_N1 = np.arange(len(values_NC))[:, None]
    start_N1 = np.repeat(starts, totals)[:, None]
    last_NC = np.maximum.accumulate(np.where(present_NC, row_N1, -1), axis=0)
    preceded_NC = last_NC >= start_N1  # otherwise it is of an earlier series, or of none
    repeated_NC = np.take_along_axis(values_NC, np.maximum(last_NC, 0), axis=0)
    age_NC = np.where(preceded_NC, row_N1 - last_NC, row_N1 - start_N1 + 1)
    further = np.concatenate([present_NC, np.log1p(age_NC)], axis=1).astype(np.float32)
    return np.where(preceded_NC, repeated_NC, np.float32(0.0)), further
