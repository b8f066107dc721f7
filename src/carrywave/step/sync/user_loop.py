"""`train.sync: local` and `diloco` in a user's own loop: replicas meet and exchange after every so many steps, as they do in ours.

What depends on all replicas (an evaluation, the whole model's weights) is asked for right after an exchange of everything, which the user
may have at any step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from carrywave.errors import Diverged, UserError
from carrywave.parallel.liveness import lost_contact
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.step.checks.finite import remedy
from carrywave.step.nonfinite import MOST_IN_A_ROW
from carrywave.step.sync.meeting import SMALLEST_SCALE, Meetings
from carrywave.step.update import StepResult

if TYPE_CHECKING:
    from carrywave.step.trainer import Trainer


class UserExchanges:
    """The exchanges of one trainer's replicas."""

    def __init__(self, trainer: Trainer) -> None:
        self.meetings = Meetings(weakref.proxy(trainer))  # the trainer holds this object
        self.alone = trainer.plan.replicas == 1 and trainer.spec.sync == "local"  # the mean of one replica's weights is these weights
        self.steps = 0
        self.met = 0  # the step after which everything was exchanged last

    def after(self, trainer: Trainer, result: StepResult) -> None:
        """Count a step of this replica, and exchange what is due. Collective at the same steps on every rank."""
        self.meetings.add(result)
        self.steps += 1
        due = self.meetings.sync.due(self.steps, last=False)
        if due:
            self._meet(trainer, due)

    def everything(self, trainer: Trainer) -> None:
        """Exchange all weights now, unless that was the last thing done. Collective: every rank must call it after the same step."""
        if self.met != self.steps:
            self._meet(trainer, self.meetings.sync.due(self.steps, last=True))

    def check_met(self) -> None:
        """Refuse what needs the weights that all replicas agree on, where they have not agreed since their last step."""
        if self.met != self.steps and not self.alone:
            raise UserError("replicas have trained on their own since their last exchange; call trainer.exchange() on all workers first")

    @lost_contact.kept
    def _meet(self, trainer: Trainer, due: Sequence[int]) -> None:
        met = self.meetings.meet()
        seen = met.seen
        stops = trainer.spec.on_nan == "stop" or seen.longest >= MOST_IN_A_ROW
        if met.scale_gone or (seen.ago is not None and stops):  # before anything non-finite reaches another replica
            cause = trainer.nonfinite.cause(seen, weights=trainer.guards_weights, world=trainer.mesh.world)
            gone = f" at any loss scale down to {SMALLEST_SCALE:g}" if met.scale_gone else ""
            advice = remedy(trainer.model, cause, "lower the learning rate, or set train.clip")
            raise on_every_rank(Diverged(f"{cause} is no longer finite{gone}; {advice}"))
        self.meetings.sync.exchange(due, met.targets)
        if len(due) == self.meetings.sync.fragments:
            self.met = self.steps


def check_unsaved(sync: str) -> None:
    """Refuse to save or load a state that would lack what each replica has of its own."""
    if sync != "step":
        raise UserError(
            f"with train.sync={sync} each replica has an optimizer state of its own, which a trainer's state does not hold; "
            "save trainer.gathered() inside trainer.evaluation_weights() and start from these weights, or use cw.fit"
        )
