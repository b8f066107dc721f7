"""Warns about a module in one piece that reads padding: sequences of different lengths then give what the longest of their batch decides.

A trainer hides padding from the layers of a `Model`, but any other module gets padded inputs, and must look at `lengths` itself. One that
takes `out[-1]`, reads backwards or averages over time without them learns from padding, on one device as on many, and without an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.stage import Stage
from carrywave.step.checks.own_modules.module_runs import piecewise
from carrywave.step.checks.own_modules.module_traces import untouched
from carrywave.step.checks.own_modules.probe_sample import LANES, ProbeSample

TOLERANCE = 1e-5  # of the loss: in float64 far above rounding, even if a module computes in float32 internally


class PaddingCheck:
    """Tries the module once, at the first step in which rank 0 has a padded lane. A `Model` is not tried."""

    def __init__(self, stage: Stage | OpaqueModel, rank: int) -> None:
        self.whole = stage if isinstance(stage, OpaqueModel) and rank == 0 else None  # what is yet to be tried

    def look(self, batches: Sequence[Batch], keys: Sequence[Tensor]) -> None:
        """Warn if the loss of some padded lanes changes when the padding behind all of them is cut off."""
        if self.whole is None:
            return
        for batch, key in zip(batches, keys, strict=True):
            real, with_padding = batch.cells
            sample = None if real == with_padding or batch.targets is None else _padded_lanes(batch, key, pooled=self.whole.pooled)
            if sample is not None:
                tried, self.whole = self.whole, None
                if _reads_padding(tried, sample):
                    warnings.warn(_message(tried), stacklevel=5)
                return


def _padded_lanes(batch: Batch, key: Tensor, *, pooled: bool) -> ProbeSample | None:
    """A few of the shortest lanes that have both real steps and padding."""
    order = torch.argsort(batch.lengths, stable=True)
    lengths = batch.lengths[order]
    chosen = order[(lengths > 0) & (lengths < batch.steps)][:LANES]
    if not len(chosen) or batch.targets is None:
        return None
    targets = batch.targets[chosen] if pooled and batch.resets is None else batch.targets[:, chosen]
    x = batch.inputs[:, chosen]
    weights = batch.weights
    if weights is not None:
        weights = weights[chosen] if weights.dim() == 1 else weights[:, chosen]
    return ProbeSample(x, x, targets, batch.lengths[chosen], batch.lanes[chosen], key.to(x.device), weights)


def _reads_padding(whole: OpaqueModel, sample: ProbeSample) -> bool:
    """True if the loss differs without the padding; False as well if the module cannot be run this way."""
    end = int(sample.lengths.max())
    targets = sample.targets if whole.pooled or sample.targets is None else sample.targets[:end]
    weights = sample.weights if sample.weights is None or sample.weights.dim() == 1 else sample.weights[:end]
    cut = replace(sample, x=sample.x[:end], y=sample.y[:end], targets=targets, weights=weights)
    run = piecewise(whole, "module")
    for dtype in dict.fromkeys((torch.float64, whole.dtype)):
        with suppress(Exception), untouched([whole.module, *whole.separate_loss.values()], sample.x.device, dtype), torch.no_grad():
            whole.module.eval()
            padded, again, short = (
                float(run(each, each.whole.pieces).sums[0][0]) for each in (sample.to(dtype), sample.to(dtype), cut.to(dtype))
            )
            return padded == again and abs(padded - short) > TOLERANCE * abs(padded)
    return False


def _message(whole: OpaqueModel) -> str:
    name = type(whole.module).__name__
    remedy = "use the lengths" if whole.takes_lengths else "let its forward take lengths (forward(self, x, lengths)) and use them"
    return (
        f"the module {name} reads padding: the loss of a sequence changes with how far it is padded; {remedy} to leave out what lies beyond"
    )
