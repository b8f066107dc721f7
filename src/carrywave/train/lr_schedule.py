"""The learning rate schedule: a pure function of the spec, the position, and a small state that evaluations update.

There are no hidden counters: `lr` takes the step, and `after_evaluation` returns the next state. So a resumed run, or one with another
plan, follows the same schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from carrywave.spec.train_spec import TrainSpec


@dataclass(frozen=True)
class RateState:
    """The effect of the evaluations so far on the learning rate."""

    scale: float = 1.0  # the product of all plateau reductions
    best: float | None = None  # the lowest evaluation loss
    bad_evals: int = 0  # evaluations since the best one, or since the last reduction
    since_best: int = 0  # evaluations since the best one


def lr(spec: TrainSpec, state: RateState, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step` (from 0) of `total_steps`.

    Warmup is linear and reaches the full rate at step `warmup`; cosine and linear lower it from `hold` steps later, and would reach 0 at
    step `total_steps`.
    """
    full = spec.warmup + spec.hold  # the first step that may have less than the full rate again
    progress = min(1.0, max(0.0, (step - full) / max(1, total_steps - full)))
    match spec.schedule:
        case "cosine":
            rate = spec.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
        case "linear":
            rate = spec.lr - spec.lr * progress
        case "plateau":
            rate = spec.lr * state.scale
        case "constant":
            rate = spec.lr
    if step < spec.warmup:
        rate *= (step + 1) / (spec.warmup + 1)
    return rate


def after_evaluation(spec: TrainSpec, state: RateState, loss: float) -> RateState:
    """The state after an evaluation with this loss; NaN is no improvement."""
    if not math.isnan(loss) and (state.best is None or loss < state.best):
        return replace(state, best=loss, bad_evals=0, since_best=0)
    bad, since = state.bad_evals + 1, state.since_best + 1
    if spec.schedule == "plateau" and bad > spec.patience:
        return replace(state, scale=state.scale * spec.factor, bad_evals=0, since_best=since)
    return replace(state, bad_evals=bad, since_best=since)


def stops_early(spec: TrainSpec, state: RateState) -> bool:
    """True if training ends because too many evaluations in a row brought no improvement."""
    return bool(spec.early_stop) and state.since_best >= (spec.early_stop or 0)
