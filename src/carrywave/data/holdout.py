"""Hold validation data out of the training data if no file is given for it: a keyed share of the sequences, or the end of a stream.

The choice of sequences is a pure function of (seed, sequence index), independent of the number of workers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Sequences
from carrywave.data.shuffle import HELD_OUT, permutation
from carrywave.errors import DataError

LEAST_TOKENS = 2  # a token and its successor, the target


def held_out(count: int, share: float, seed: int) -> NDArray[np.bool_]:
    """Select the held-out sequences, those with the smallest keys; with two or more, at least one is held out and at least one is not."""
    held = np.zeros(count, np.bool_)
    if share > 0 and count >= 2:
        wanted = min(max(round(count * share), 1), count - 1)
        held[permutation(count, seed=seed, epoch=0, site=HELD_OUT)[:wanted]] = True
    return held


def pick(sequences: Sequences, wanted: NDArray[np.bool_]) -> Sequences:
    """Return the selected sequences."""
    return replace(
        sequences,
        starts=sequences.starts[wanted],
        lengths=sequences.lengths[wanted],
        labels=sequences.labels if sequences.labels is None or sequences.spans is not None else sequences.labels[wanted],
        weights=None if sequences.weights is None else sequences.weights[wanted],
        spans=None if sequences.spans is None else sequences.spans[wanted],
        names=None if sequences.names is None else tuple(name for name, keep in zip(sequences.names, wanted, strict=True) if keep),
    )


def split_tail(stream: Sequences, share: float, name: str) -> tuple[Sequences, Sequences]:
    """Split one stream into train and valid: the last `share` of its tokens is held out."""
    total = int(stream.lengths[0])
    if total < 2 * LEAST_TOKENS:
        raise DataError(
            f"{name} has {total} token{'s' * (total != 1)}, too few to hold out validation data; set data.valid, or data.share=0"
        )
    held = min(max(round(total * share), LEAST_TOKENS), total - LEAST_TOKENS)
    start = int(stream.starts[0])
    return (
        replace(stream, lengths=np.array([total - held], np.int64)),
        replace(stream, starts=np.array([start + total - held], np.int64), lengths=np.array([held], np.int64)),
    )
