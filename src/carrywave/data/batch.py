"""A `Batch` is what one step trains on: tensors [time, lane, …], the real length of each lane, and where lanes start anew.

Padding carries no target: an integer target of -100, a float target of NaN. So what is real can be read off the targets,
and nothing else has to be passed to a loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORED = -100  # an integer target that counts for nothing; NaN plays this part among float targets


@dataclass(frozen=True)
class Batch:
    """One window of every lane. Lanes are global numbers, whatever part of them this process holds."""

    inputs: Tensor  # [T, B] int64 tokens, or [T, B, F] float32
    targets: Tensor | None  # per step [T, B, …]; pooled [B, …]; None where there are none (prediction)
    lengths: Tensor  # [B] int64, real steps of each lane in this window, 0 for an idle lane
    fresh: Tensor  # [B] bool, the lane starts a new sequence in this window
    lanes: Tensor  # [B] int64, global number of each lane
    sequence: Tensor  # [B] int64, number of the sequence in each lane, -1 for an idle lane
    offset: Tensor  # [B] int64, first step of the window within its sequence
    epoch: int = 0
    step: int = 0  # position in the epoch; (epoch, step) is the cursor, and keys the randomness
    real: int = 0  # real steps, the sum of lengths, known on the host

    @property
    def steps(self) -> int:
        """Steps of the window, padding included."""
        return self.inputs.shape[0]

    @property
    def waste(self) -> float:
        """Share of the batch that is padding."""
        total = self.inputs.shape[0] * self.inputs.shape[1]
        return 1.0 - self.real / total if total else 0.0

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; copies from pinned memory do not block."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("inputs", "targets", "lengths", "fresh", "lanes", "sequence", "offset")
            if getattr(self, name) is not None
        }
        return replace(self, **moved)
