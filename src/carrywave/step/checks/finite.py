"""Raises, in a user's own loop, if a step had non-finite numbers or nothing to divide by; and says what to do about such numbers.

A mean over no targets is 0 / 0. A loss that is such a mean times the number of targets is right until a chunk, a micro-batch or a replica
has none, and then not finite, however low the learning rate is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from carrywave.errors import Diverged
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.state import State
from carrywave.parallel.delayed_read import Later
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.step.checks.arguments import uncounted
from carrywave.step.nonfinite import LOSS, reset_nonfinite_lanes
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
    advice = remedy(trainer.model, cause, "lower the learning rate, or set train.clip")
    state, stage = trainer.state, trainer.stage
    if state is not None and state.carries:
        left = state.carries
        start = stage.start(left[0][0].shape[1], trainer.device).detach().carries
        state = State(stage.carries(reset_nonfinite_lanes(left, start)))
    trainer.state = state  # on workers that have no lanes too
    raise on_every_rank(
        Diverged(
            f"{cause} is no longer finite; {advice}; the weights are as they were before that step "
            "(to continue without it, set train.on_nan=skip)"
        )
    )


def remedy(model: Model | OpaqueModel, cause: str, usual: str) -> str:
    """The remedy for a cause as `NonfiniteRecord.cause` names it; a user's loss may be a mean over no targets."""
    own_loss = cause.startswith(LOSS) and not type(model.head).__module__.startswith("carrywave.")
    return f"{usual}, and let the loss be 0 where a part of a batch has no targets" if own_loss else usual
