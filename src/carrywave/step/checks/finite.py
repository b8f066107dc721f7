"""Raises, in a user's own loop, if a step had non-finite numbers or nothing to divide by; and says what to do about such numbers.

A mean over no targets is 0 / 0. A loss that is such a mean times the number of targets is right until a chunk, a micro-batch or a replica
has none, and then not finite, however low the learning rate is.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from carrywave.data.batch import IGNORED
from carrywave.errors import Diverged
from carrywave.kernels import random
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.state import State
from carrywave.parallel.delayed_read import Later
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.parallel.world import all_gather_text
from carrywave.step.checks.arguments import uncounted
from carrywave.step.checks.own_modules.module_runs import head, piecewise
from carrywave.step.checks.own_modules.module_traces import untouched
from carrywave.step.checks.own_modules.probe_sample import few_of, is_absent
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
    advice = remedy(trainer, cause, "lower the learning rate, or set train.clip")
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


def remedy(trainer: Trainer, cause: str, usual: str) -> str:
    """The remedy for a cause as `NonfiniteRecord.cause` names it. Collective: every rank must call it."""
    if not cause.startswith(LOSS) or not any(all_gather_text(trainer.mesh.world, "yes" if _fails_without_targets(trainer) else "")):
        return usual
    return (
        "it is not finite where all targets are missing, as they may be in a part of a batch; have the loss return 0 there (a mean over no "
        f"targets is 0/0), or, if that is not it, {usual}"
    )


def _fails_without_targets(trainer: Trainer) -> bool:
    """True if the loss of a few lanes of the last batch is not finite once their targets are masked."""
    stage, batch = trainer.stage, trainer.compute.last
    if batch is None or batch.targets is None or not stage.has_head:
        return False
    targets = batch.targets
    whole = isinstance(stage, OpaqueModel) or stage.whole_head
    if (targets.is_cuda or whole) and not bool(is_absent(targets).any()):
        return False  # what does not handle masked targets may kill the process: by a device-side assertion, or in torch's CTC loss
    sample = few_of(batch, random.key(0), stage.width_head, pooled=stage.pooled, whole_time=True)
    assert sample.targets is not None
    masked = torch.full_like(sample.targets, torch.nan if targets.is_floating_point() else IGNORED)
    roots: list[object]
    if isinstance(stage, OpaqueModel):
        roots, run = [stage.module, *stage.separate_loss.values()], piecewise(stage, "module")
    else:
        roots, run = [stage.head], head(stage.head, "head", pooled=stage.pooled)
    dtype = next((p.dtype for p in stage.head.parameters()), torch.float32)
    with suppress(Exception), untouched(roots, sample.x.device, dtype), torch.no_grad():
        return not bool(run(replace(sample, targets=masked).to(dtype), sample.whole.pieces).sums[0][0].isfinite())
    return False
