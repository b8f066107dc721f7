"""The result of a run: its folder, its metrics, and the trained model with a way to feed it data."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from carrywave.data.batch import Batch
from carrywave.data.loader import build
from carrywave.data.order import Cursor, Window
from carrywave.data.prepare import read_python
from carrywave.tasks.task import Task
from carrywave.train.loop_state import Ending

if TYPE_CHECKING:
    from carrywave.prediction.stepper import Stepper


@dataclass(frozen=True)
class Result:
    """The result of a run.

    `model` has the best weights and is in evaluation mode. It reads what it was trained on: standardized numbers (`data.standardize`), or
    text as token ids. `batch` converts raw data to that form, and `cw.predict(result.run, data)` does everything.
    """

    run: Path
    ending: Ending | None  # None: nothing was trained (a dry run)
    metrics: dict[str, dict[str, float]]  # loss and metrics of the best weights, by part: valid, test
    model: Any  # the Model, or the user's own module
    task: Task  # its `codec` holds scales, vocabulary and labels
    table: Mapping[str, Any] = field(default_factory=dict)  # of series: how the training table was read

    def __repr__(self) -> str:
        losses = "".join(f", {part} loss {values['loss']:.4g}" for part, values in self.metrics.items() if "loss" in values)
        return f"Result(run={str(self.run)!r}, ending={self.ending!r}{losses})"

    def batch(self, data: Any) -> Batch:
        """Convert raw data, as `cw.fit` and `cw.predict` accept it, to what the model reads: scaled, or as tokens; labels are not needed.

        `y, state = result.model(batch.inputs, lengths=batch.lengths, resets=batch.resets)`; inputs are [time, sequence, …], padded, on the
        model's device. `result.model.output(y, state, linear=batch.linear)` is what `cw.predict` tells, mixed with a linear
        part if there is one.
        """
        sequences = read_python(data, self.task.codec, self.task.spec, labelled=False)
        view = self.task.unlabelled(sequences)
        count = len(view.lengths)
        window = Window(
            steps=int(view.lengths.max()),
            sequence=np.arange(count),
            offset=np.zeros(count, np.int64),
            length=np.asarray(view.lengths, np.int64),
            fresh=np.ones(count, np.bool_),
        )
        batch = build(view, window, Cursor(0, 0))
        weight = next((p for p in self.model.parameters() if p.is_floating_point()), torch.empty(0))
        batch = batch.to(weight.device)
        floats = {name: each for name in ("inputs", "linear") if (each := getattr(batch, name)) is not None and each.is_floating_point()}
        return replace(batch, **{name: each.to(weight.dtype) for name, each in floats.items()})

    def stepper(self) -> Stepper:
        """The trained model, to be fed step by step for many clients at once, with the weights that it has now; as `cw.stepper(run)`."""
        from carrywave.prediction.stepper import Stepper

        return Stepper(deepcopy(self.model), self.task)
