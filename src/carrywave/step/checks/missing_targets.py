"""Says what to do about a loss that is not finite: is it that of a part of a batch whose targets are all missing?

A mean over no targets is 0 / 0. A loss that is such a mean times the number of targets is right until a chunk, a micro-batch or a replica
has none.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from carrywave.data.batch import IGNORED
from carrywave.kernels import random
from carrywave.model.opaque_model import Whole
from carrywave.parallel.world import all_gather_text
from carrywave.step.checks.module_runs import head, piecewise
from carrywave.step.checks.probe import untouched
from carrywave.step.checks.probe_sample import few_of, is_absent
from carrywave.step.nonfinite import LOSS

if TYPE_CHECKING:
    from carrywave.step.trainer import Trainer


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
    if targets.is_cuda and not bool(is_absent(targets).any()):
        return False  # a head that does not handle masked targets may trigger a device-side assertion, which kills the process
    sample = few_of(batch, random.key(0), stage.width_head, pooled=stage.pooled, whole_time=True)
    assert sample.targets is not None
    masked = torch.full_like(sample.targets, torch.nan if targets.is_floating_point() else IGNORED)
    if isinstance(stage, Whole):
        root, run = stage.module, piecewise(stage, "module")
    else:
        root, run = stage.head, head(stage.head, "head", pooled=stage.pooled)
    dtype = next((p.dtype for p in root.parameters()), torch.float32)
    with suppress(Exception), untouched(root, sample.x.device, dtype), torch.no_grad():
        return not bool(run(replace(sample, targets=masked).to(dtype), sample.whole.pieces).sums[0][0].isfinite())
    return False
