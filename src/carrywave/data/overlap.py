"""Tells if sequences that a model is judged by are also those that it is trained on.

Nothing is refused: equal sequences may be right, as with short texts. Only part of very large data is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from carrywave.data.sequences import Sequences

MOST = 1 << 16  # sequences of a part that are looked at
ENOUGH = 0.01  # share of them that is worth a line


def notes(parts: Mapping[str, Sequences]) -> Iterator[str]:
    """A line for each part of which much is in train, too."""
    for name, other in parts.items():
        if name == "train" or len(parts["train"]) == len(other) == 1:  # within one text, passages may well come again
            continue
        train, judged = set(_contents(parts["train"])), _contents(other)
        repeated = sum(content in train for content in judged)
        if repeated >= max(1, ENOUGH * len(judged)):
            many = f"all {repeated:,}" if repeated == len(judged) else f"{repeated:,} of {len(judged):,}"
            better = "so the figures look better than they are; keep them in only one of the two"
            yield f"{name}: {many} sequences are also in train, {better}"


def _contents(data: Sequences) -> list[bytes]:
    """The rows of each sequence."""
    bounds = zip(data.starts[:MOST].tolist(), data.lengths[:MOST].tolist(), strict=True)
    return [np.ascontiguousarray(data.inputs[start : start + length]).tobytes() for start, length in bounds]
