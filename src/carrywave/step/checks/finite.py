"""Raises, in a user's own loop, if a step had non-finite numbers or nothing to divide by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carrywave.errors import Diverged
from carrywave.model.state import State
from carrywave.parallel.delayed_read import Later
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.step.checks.arguments import uncounted
from carrywave.step.nonfinite import mended
from carrywave.step.update import StepResult

if TYPE_CHECKING:
    from carrywave.step.trainer import Trainer


def look(trainer: Trainer, result: StepResult, before: Later | None) -> Later | None:
    """Look at a step, or with a GPU at the one `before`, which is known without waiting; returns what to look at after the next step. All
    workers look at the same step.
    """
    now: Later | None = None
    if trainer.agreement.at_once:
        finite, counted = result.sound.tolist()
    else:
        now = Later(result.sound)
        finite, counted = (True, True) if before is None else before.read()
    if not counted:
        raise on_every_rank(uncounted())
    if finite:
        return now
    seen = trainer.nonfinite.look()
    cause = trainer.nonfinite.cause(seen, weights=trainer.guards_weights)
    if trainer.state is not None and trainer.state.carries:
        left, stage = trainer.state.carries, trainer.stage
        start = stage.start(left[0][0].shape[1], trainer.device).detach().carries
        trainer.state = State(stage.carries(mended(left, start)))
    raise on_every_rank(
        Diverged(
            f"{cause} is no longer finite; lower the learning rate, or set train.clip; the weights are as they were before that step "
            "(to continue without it, set train.on_nan=skip)"
        )
    )
