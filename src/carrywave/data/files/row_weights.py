"""Collects the weights of rows, from which `Sequences` has one for each sequence or one for each of its steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from carrywave.data.files import fields
from carrywave.data.files.arrays import Appender, NewArray
from carrywave.data.files.rows import Row
from carrywave.errors import DataError

Weights = NDArray[np.float32]


class Weigher:
    """Nothing is written until a row has a weight; rows without one have 1. `per_step`: the task has a target for each step."""

    def __init__(self, new: NewArray, *, per_step: bool) -> None:
        self.new, self.per_step = new, per_step
        self.by_row: Appender | None = None
        self.by_step: Appender | None = None
        self.lists = False  # True if the steps of some row have weights of their own
        self.rows = self.steps = 0
        self.largest = 0.0

    def add(self, row: Row, steps: int, where: str) -> None:
        """Append the weight of one row."""
        weight = fields.weight_of(row, steps, where)
        if isinstance(weight, np.ndarray) and not self.per_step:
            raise DataError(f"{where}: the weight is a list, but the row has one target; write one number")
        if weight is not None and self.by_row is None:
            self.by_row = self._begun(self.rows)
            self.by_step = self._begun(self.steps) if self.per_step else None
        if self.by_row is not None:
            self.by_row.append(np.array([1.0 if weight is None or isinstance(weight, np.ndarray) else weight], np.float32))
        if self.by_step is not None:
            self.by_step.append(np.broadcast_to(np.float32(1.0) if weight is None else np.asarray(weight, np.float32), (steps,)))
        self.lists |= isinstance(weight, np.ndarray)
        self.largest = max(self.largest, 1.0 if weight is None else float(np.max(weight, initial=0.0)))
        self.rows, self.steps = self.rows + 1, self.steps + steps

    def _begun(self, before: int) -> Appender:
        made = self.new(np.float32, None)
        made.append(np.ones(before, np.float32))
        return made

    def close(self, *, join: bool, name: str) -> tuple[Weights | None, Weights | None]:
        """Return the weights of sequences or of steps; of steps if their rows are joined."""
        by_row, by_step = (None if each is None else each.close() for each in (self.by_row, self.by_step))
        if by_row is not None:
            fields.check_largest_weight(self.largest, f"{name}: every weight", "remove data.weight")
        return (None, by_step) if self.lists or join else (by_row, None)
