"""What a run reports of its steps: a row for metrics.jsonl, the position for a watcher, a moment for a callback."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.runs.run import Value
from carrywave.runs.watcher import StepInfo
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.nonfinite import uncounted
from carrywave.step.result import StepResult
from carrywave.train.callbacks import Moment
from carrywave.train.loop_state import LoopState
from carrywave.train.run_clock import RunClock

Row = dict[str, Value]


def mean_loss(result: StepResult) -> float:
    """The mean loss of a step's targets; waits for the device."""
    return float((result.loss_sum / result.count.clamp(min=1e-30)).item())  # weights may add up to less than 1


def place_of(at: LoopState, split: str = "train") -> Row:
    """What every row begins with."""
    return {"split": split, "epoch": at.shown_epoch, "step": at.step}


def train_row(at: LoopState, train: TrainSpec) -> Row | None:
    """The row for the steps since the last one; None if there were none. Waits for the device."""
    loss_sum, count, norm, steps, skipped = at.sums.tolist()
    if not steps:
        return None
    if count <= 0 and loss_sum:
        raise on_every_rank(uncounted())
    loss = loss_sum / count if count else 0.0
    waste = 1.0 - at.cells[0] / at.cells[1]
    # Rows at the end of an epoch may cover fewer steps than others, so each gives their number.
    extra: Row = {"skipped": int(skipped)} if train.on_nan == "skip" else {}
    means: Row = {"loss": loss, "lr": at.lr, "norm": norm / steps, "waste": waste, "steps": round(steps), "targets": int(count)}
    return place_of(at) | means | extra


def moment_of(
    at: LoopState, train: TrainSpec, run: Path, split: str, metrics: Mapping[str, float], result: StepResult | None = None
) -> Moment:
    """Where the run is, for a callback."""
    loss = None if result is None else partial(mean_loss, result)
    return Moment(run, at.shown_epoch, train.epochs, at.step, at.lr, split, dict(metrics), loss)


def batches_of_epoch(at: LoopState, train: TrainSpec, batches: int) -> int:
    """How many batches of this epoch the run takes: all of them, or those before `train.max_steps`."""
    return batches if train.max_steps is None else min(batches, at.batch + (train.max_steps - at.step) * train.accumulate)


def info_of(
    at: LoopState,
    train: TrainSpec,
    clock: RunClock,
    total_steps: float,
    *,
    phase: str,
    done: int,
    total: int,
    loss: float | None,
    unit: str,
    rate: float | None = None,
) -> StepInfo:
    """Where the run is, for a watcher: `done` of `total` batches of a phase."""
    return StepInfo(
        epoch=at.shown_epoch,
        epochs=train.epochs,
        step=done,
        steps=total,
        loss=loss,
        tokens_per_second=clock.rate if rate is None else rate,
        waste=1.0 - at.cells[0] / at.cells[1] if at.cells[1] else 0.0,
        lr=at.lr,
        eta_seconds=clock.eta(at.step, total_steps),
        phase=phase,
        unit=unit,
    )
