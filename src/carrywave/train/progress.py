"""What a run tells while it trains: rows for metrics.jsonl, positions for a watcher, moments for callbacks, and how fast it is.

None of what depends on the clock reaches metrics.jsonl.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial

from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.runs.run import Run, Value
from carrywave.runs.watcher import StepInfo, Watcher
from carrywave.step.nonfinite import uncounted
from carrywave.step.result import StepResult
from carrywave.tasks.kind import Part
from carrywave.tasks.task import Task
from carrywave.train.callbacks import Moment
from carrywave.train.loop_state import LoopState

TICK_SECONDS = 0.25  # between two updates of the watcher, for which a CUDA device is synchronized

Row = dict[str, Value]


def place_of(at: LoopState, split: str = "train") -> Row:
    """What every row begins with."""
    return {"split": split, "epoch": at.shown_epoch, "step": at.step}


def _loss(result: StepResult) -> float:
    """The mean loss of a step's targets. Waits for the device."""
    return float(result.mean("fp64").item())


class Progress:
    """What is told of one run of `total_steps` (infinite: not known). Evaluations do not count in the speed of training."""

    def __init__(self, task: Task, run: Run, watch: Watcher, total_steps: float) -> None:
        self.train, self.run, self.watch, self.total_steps = task.spec.train, run, watch, total_steps
        self._unit = "tokens" if task.facts.vocabulary else "steps"
        now = time.monotonic()
        self._started = self._lap_start = self._last_shown = now
        self._tokens = self._lap_tokens = self._steps = 0

    def count(self, tokens: int) -> None:
        """Count one more step, of so many real tokens."""
        self._tokens, self._lap_tokens, self._steps = self._tokens + tokens, self._lap_tokens + tokens, self._steps + 1

    @property
    def due(self) -> bool:
        """True if it is time to show the watcher something."""
        return time.monotonic() - self._last_shown >= TICK_SECONDS

    def show_step(self, at: LoopState, batches: int, result: StepResult) -> None:
        """Show the position in an epoch of so many batches. Waits for the device."""
        if self.train.max_steps is not None:
            batches = min(batches, at.batch + (self.train.max_steps - at.step) * self.train.accumulate)
        self._show(at, "train", (at.batch, batches), self._tokens / max(time.monotonic() - self._started, 1e-9), _loss(result))

    def show_evaluation(self, at: LoopState, part: Part, done: int, total: int, started: float) -> None:
        """Show how far an evaluation is, if it is time to."""
        if self.due:
            rate = int(part.view.lengths.sum()) * done / total / max(time.monotonic() - started, 1e-9)
            self._show(at, part.name, (done, total), rate, None)

    def _show(self, at: LoopState, phase: str, place: tuple[int, int], rate: float, loss: float | None) -> None:
        self._last_shown = time.monotonic()
        left = max(0.0, self.total_steps - at.step)
        eta = (self._last_shown - self._started) / self._steps * left if self._steps and math.isfinite(left) else None
        waste = 1.0 - at.cells[0] / at.cells[1] if at.cells[1] else 0.0
        where = at.shown_epoch, self.train.epochs, *place
        self.watch.step(StepInfo(*where, loss, rate, waste, at.lr, eta, phase=phase, unit=self._unit))

    def write_steps(self, at: LoopState) -> None:
        """Write one row for the steps since the last one, if there were any. Waits for the device."""
        loss_sum, count, norm, steps, skipped = at.sums.tolist()
        if not steps:
            return
        if count <= 0 and loss_sum:
            raise on_every_rank(uncounted())
        # Rows at the end of an epoch may cover fewer steps than others, so each gives their number.
        row: Row = {
            "loss": loss_sum / count if count else 0.0,
            "lr": at.lr,
            "norm": norm / steps,
            "steps": round(steps),
            "targets": int(count),
        }
        row |= {"waste": 1.0 - at.cells[0] / at.cells[1]} | ({"skipped": int(skipped)} if self.train.on_nan == "skip" else {})
        self.run.write_metrics(place_of(at) | row)
        now = time.monotonic()
        seconds, tokens = now - self._lap_start, self._lap_tokens
        self._lap_start, self._lap_tokens = now, 0
        self.run.write_timing(place_of(at) | {"seconds": seconds, "tokens_per_second": tokens / max(seconds, 1e-9)})
        at.logged()

    def write_evaluation(self, place: Row, values: Mapping[str, float], more: Row, started: float) -> None:
        """Write the row of an evaluation, and show it. `more` goes to metrics.jsonl alone."""
        self.run.write_metrics({**place, **more, **values})
        seconds = time.monotonic() - started
        self.run.write_timing(place | {"seconds": seconds})
        self.watch.evaluated({**place, **more, **values})
        self._started, self._lap_start = self._started + seconds, self._lap_start + seconds  # it is no time of steps

    def moment(self, at: LoopState, split: str, metrics: Mapping[str, float], result: StepResult | None = None) -> Moment:
        """Where the run is, for a callback."""
        loss = None if result is None else partial(_loss, result)
        return Moment(self.run.path, at.shown_epoch, self.train.epochs, at.step, at.lr, split, dict(metrics), loss)
