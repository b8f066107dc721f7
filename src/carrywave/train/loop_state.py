"""The state of a run between two steps: everything the loop knows besides the trainer, and whether there is more to do.

A snapshot holds it as plain JSON values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from carrywave.errors import option
from carrywave.launch.signals import Reason
from carrywave.spec.train_spec import TrainSpec
from carrywave.train import lr_schedule as rates

ASKED: tuple[Reason, ...] = ("interrupted", "terminated")
Ending = Literal["done", "early", "callback"] | Reason


@dataclass
class LoopState:
    """The position of a run, what it has reached, and the running sums since the last row of metrics."""

    sums: Tensor  # [5], on the device: loss, targets, norm and number of steps; number of non-finite steps
    cells: list[int] = field(default_factory=lambda: [0, 0])  # steps times lanes, without and with padding
    trained: list[float] = field(default_factory=lambda: [0.0, 0.0])  # loss and targets since the last evaluation, less those in `sums`

    epoch: int = 0
    batch: int = 0  # batches done in this epoch; with the epoch, the cursor
    step: int = 0  # optimizer steps done
    rate: rates.RateState = field(default_factory=rates.RateState)
    losses: list[float] = field(default_factory=list)  # of valid, at each evaluation
    evaluated: int = -1  # the step of the last evaluation
    latest: dict[str, float] = field(default_factory=dict)  # metrics of the last evaluation
    best: dict[str, float] | None = None  # metrics of the best evaluation
    best_step: int = -1  # the step of that evaluation
    ending: Ending | None = None
    lr: float = 0.0
    skipped: int = 0  # steps skipped because of non-finite values
    in_a_row: int = 0  # consecutive ones, up to this step
    backs: int = 0  # times the run went back to a snapshot because of them
    met: int = 0  # the step of the last meeting of replicas that train on their own
    met_before: int = 0  # and of the one before

    @staticmethod
    def start(device: torch.device) -> LoopState:
        """The state before the first step."""
        return LoopState(torch.zeros(5, dtype=torch.float64, device=device))

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return asdict(replace(self, sums=torch.empty(0))) | {"sums": self.sums.tolist()}

    @staticmethod
    def of_json(values: Mapping[str, Any], device: torch.device) -> LoopState:
        """The state from what `to_json` returned."""
        sums = torch.tensor(values["sums"], dtype=torch.float64, device=device)
        return LoopState(**{**values, "sums": sums, "rate": rates.RateState(**values["rate"])})

    def logged(self) -> None:
        """Begin new sums: the old ones have been written."""
        loss_sum, count = self.sums[:2].tolist()
        self.trained = [self.trained[0] + loss_sum, self.trained[1] + count]
        self.sums, self.cells = torch.zeros_like(self.sums), [0, 0]

    def train_loss(self) -> float | None:
        """The mean loss in training since the last evaluation; None if there was no target. Starts over: for the next evaluation."""
        loss_sum, count = self.sums[:2].tolist()
        total, targets = self.trained[0] + loss_sum, self.trained[1] + count
        self.trained = [-loss_sum, -count]  # what `sums` holds now has been counted, and is added once more when it is written
        return total / targets if targets else None

    @property
    def shown_epoch(self) -> int:
        """The current epoch, counted from 1; between two epochs, the one that just ended."""
        return self.epoch + 1 if self.batch else max(self.epoch, 1)

    @property
    def weights_step(self) -> int:
        """The step of the weights that are kept: the best, or without validation the last."""
        return self.best_step if self.best is not None else self.evaluated

    def trains(self, train: TrainSpec) -> bool:
        """True if there is anything left to train."""
        return self.ending is None and not self._reached(train)

    def extend(self, train: TrainSpec) -> None:
        """Let a finished run continue if the spec now asks for more epochs or steps, or no longer stops it early."""
        longer = self.ending == "done" and not self._reached(train)
        if longer or (self.ending == "early" and not rates.stops_early(train, self.rate)):
            self.ending = None

    def over(self, train: TrainSpec) -> str:
        """The message for a resumed run that has nothing left to train."""
        if self.ending == "callback":
            return f"nothing is left to train: a callback ended the run at step {self.step}; start a new run with {option('init')}"
        if self.ending == "early":
            key, verb = f"train.early_stop={train.early_stop}", "stopped early"
        elif train.max_steps is not None and self.step >= train.max_steps:
            key, verb = f"train.max_steps={train.max_steps}", "ended"
        else:
            key, verb = f"train.epochs={train.epochs}", "ended"
        return f"nothing is left to train: the run {verb} at step {self.step} with {key}; raise it to continue training"

    def _reached(self, train: TrainSpec) -> bool:
        return self.epoch >= train.epochs or (train.max_steps is not None and self.step >= train.max_steps)
