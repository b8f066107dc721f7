"""What a run does about steps whose loss or gradient was not finite: skip them and say so, or end with the reason."""

from __future__ import annotations

from collections.abc import Callable

from carrywave.errors import Diverged
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.nonfinite import BACK_FACTOR, MOST_BACKS, MOST_IN_A_ROW, Seen, remedy
from carrywave.step.trainer import Trainer
from carrywave.train.loop_state import LoopState


def handle_nonfinite(
    at: LoopState, train: TrainSpec, trainer: Trainer, seen: Seen, *, scale_gone: bool, say: Callable[[str], None]
) -> None:
    """Stop or skip if there were non-finite steps. Collective: every rank must call it, and with the same news."""
    at.skipped, at.in_a_row = at.skipped + seen.bad, seen.in_a_row
    if seen.ago is not None:
        cause = trainer.nonfinite.cause(seen, weights=trainer.guards_weights, world=trainer.mesh.world)
        step = at.step - seen.ago
    elif scale_gone:
        cause, step = "the loss or its gradient", at.step
    else:
        return
    skips = train.on_nan == "skip" and seen.longest > 0
    too_many = seen.longest >= MOST_IN_A_ROW
    if skips and too_many:
        step = min(step, at.step - seen.in_a_row + 1)  # the first of them, however many checks lie in between
    fact = f"{cause} is no longer finite at step {step} (epoch {at.shown_epoch})"
    if skips and not too_many:
        say(f"{fact}; {'that step was' if seen.bad == 1 else f'{seen.bad} steps since then were'} skipped")
        return
    skipped = f"{seen.longest} steps in a row were skipped; " if skips else ""
    advice = remedy(trainer.model, cause, f"lower train.lr={train.lr:g} or set train.clip")
    raise on_every_rank(Diverged(f"{fact}; {skipped}{advice}; nothing from {'those steps' if skips else 'that step'} was saved"))


def check_can_go_back(at: LoopState, train: TrainSpec, error: Diverged) -> None:
    """Raise the error again, on every rank, unless the spec asks to go back to a snapshot and the limit is not reached."""
    if train.on_nan != "back":
        raise error
    if at.backs >= MOST_BACKS:
        raise on_every_rank(Diverged(f"{error} (after going back {MOST_BACKS} times, down to a learning rate of {at.lr:g})"))


def went_back(at: LoopState, error: Diverged) -> str:
    """The line about a run that has just gone back to a snapshot, because of this error."""
    fact, factor = str(error).partition(";")[0], BACK_FACTOR**at.backs
    return f"{fact}; going back to step {at.step}, with the learning rate multiplied by {factor:g} from there on"
