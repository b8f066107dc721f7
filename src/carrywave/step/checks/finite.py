"""Raises, in a user's own loop, if a step had non-finite numbers or nothing to divide by; and says what to do about such numbers.

A mean over no targets is 0 / 0. A loss that is such a mean times the number of targets is right until a chunk, a micro-batch or a replica
has none, and then not finite, however low the learning rate is.
"""

from __future__ import annotations

from carrywave.errors import Diverged, UserError
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.parallel.delayed_read import Later
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.step.checks.arguments import uncounted
from carrywave.step.nonfinite import LOSS, NonfiniteRecord
from carrywave.step.update import StepResult


def look(result: StepResult, before: Later | None, *, at_once: bool) -> tuple[Later | None, bool]:
    """Look at a step, or unless `at_once` at the one `before`, which is known without waiting; returns what to look at after the next step,
    and whether all was finite. All workers look at the same step.
    """
    now: Later | None = None
    if at_once:
        finite, counted = result.sound.tolist()
    else:
        now = Later(result.sound)
        finite, counted = (True, True) if before is None else before.read()
    if not counted:
        raise on_every_rank(uncounted())
    return now, finite


def diverged(model: Model | OpaqueModel, record: NonfiniteRecord, *, guards_weights: bool) -> UserError:
    """The error for a step that was not finite. Collective: every rank must call it."""
    cause = record.cause(record.look(), weights=guards_weights)
    advice = remedy(model, cause, "lower the learning rate, or set train.clip")
    return on_every_rank(
        Diverged(
            f"{cause} is no longer finite; {advice}; the weights are as they were before that step "
            "(to continue without it, set train.on_nan=skip)"
        )
    )


def remedy(model: Model | OpaqueModel, cause: str, usual: str) -> str:
    """The remedy for a cause as `NonfiniteRecord.cause` names it; a user's loss may be a mean over no targets."""
    own_loss = cause.startswith(LOSS) and not type(model.head).__module__.startswith("carrywave.")
    return f"{usual}, and let the loss be 0 where a part of a batch has no targets" if own_loss else usual
