"""Warns about a module in one piece that reads padding: sequences of different lengths then give what the longest of their batch decides.

A trainer hides padding from the layers of a `Model`, but any other module gets padded inputs, and must look at `lengths` itself. One that
takes `out[-1]`, reads backwards or averages over time without them learns from padding, on one device as on many, and without an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress

import torch

from carrywave.data.batch import Batch
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.stage import Stage
from carrywave.model.state import Chunk, State
from carrywave.step.checks.trial import IN_DOUBLE, twin, unseen

LANES = 5  # most that are tried


class PaddingCheck:
    """Tries the module once, at the first step in which rank 0 has a padded lane. A `Model` is not tried."""

    def __init__(self, stage: Stage | OpaqueModel, rank: int) -> None:
        self.whole = stage if isinstance(stage, OpaqueModel) and rank == 0 else None  # what is yet to be tried

    def before(self, batches: Sequence[Batch]) -> None:
        """Warn if the loss of some padded lanes changes when the padding behind all of them is cut off."""
        for batch in batches:
            if self.whole is None:
                return
            real, with_padding = batch.cells
            padded = None if real == with_padding or batch.targets is None else _padded_lanes(batch, pooled=self.whole.pooled)
            if padded is not None:
                tried, self.whole = self.whole, None
                if _reads_padding(tried, padded):
                    remedy = "use the lengths" if tried.takes_lengths else "let its forward take them (forward(self, x, lengths))"
                    what = f"the module {type(tried.module).__name__} reads padding"
                    warnings.warn(f"{what}: the loss of a sequence changes with how far it is padded; {remedy}", stacklevel=5)


def _padded_lanes(batch: Batch, *, pooled: bool) -> Batch | None:
    """A few of the shortest lanes that have both real steps and padding."""
    order = torch.argsort(batch.lengths, stable=True)
    lengths = batch.lengths[order]
    chosen = order[(lengths > 0) & (lengths < batch.steps)][:LANES]
    by_lane = {"targets"} if pooled else set()
    by_lane |= {"weights"} if batch.weights is not None and batch.weights.dim() == 1 else set()
    by_time = {"inputs", "targets", "weights"} - by_lane
    part = batch.each_tensor(lambda name, tensor: tensor[:, chosen] if name in by_time else tensor[chosen])
    return part if len(chosen) else None


def _reads_padding(whole: OpaqueModel, batch: Batch) -> bool:
    """True if the loss differs without the padding; False as well if the module cannot be run this way."""
    end = int(batch.lengths.max())
    by_time = {"inputs", *({"targets", "weights"} if not whole.pooled else ())}
    short = batch.each_tensor(lambda name, tensor: tensor[:end] if name in by_time and tensor.dim() > 1 else tensor)
    for dtype in dict.fromkeys((torch.float64, whole.dtype)):
        with suppress(Exception), unseen(batch.lengths.device), torch.no_grad():
            padded, again, cut = (_loss(whole, each, dtype) for each in (batch, batch, short))
            return padded == again and abs(padded - cut) > IN_DOUBLE * abs(padded)
    return False


def _loss(whole: OpaqueModel, batch: Batch, dtype: torch.dtype) -> float:
    made = twin(whole, dtype).eval()
    assert isinstance(made, OpaqueModel)
    assert batch.targets is not None
    chunk = Chunk(batch.lengths, None, batch.lanes, whole=True, weights=batch.weights)
    out, _, state = made(batch.inputs.clone(), State(()), chunk)
    return float(made.loss(out, state, batch.targets.clone(), chunk)[0])
