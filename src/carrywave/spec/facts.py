"""Facts of the data that shape the model and the plan: torch-free, small enough to print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DataFacts:
    """What the data says about the model: sizes, names, lengths."""

    vocabulary: int = 0  # tokens; 0 where the inputs are numbers
    features: int = 0  # numbers in a step; 0 where the inputs are tokens
    labels: tuple[str, ...] = ()  # classes or tags, in order of their number
    outputs: int = 0  # numbers in a target of regression; forecast columns
    sequences: int = 0  # separate sequences, or series, in train
    steps: int = 0  # real steps in train
    longest: int = 0  # steps of the longest sequence
    histogram: tuple[tuple[int, int], ...] = ()  # (up to this length, sequences), at most 64 bins

    @staticmethod
    def of(known: Mapping[str, Any]) -> DataFacts:
        """The facts from what JSON made of them."""
        return DataFacts(**{**known, "labels": tuple(known["labels"]), "histogram": tuple((a, b) for a, b in known["histogram"])})
