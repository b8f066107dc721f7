"""What a step came to: sums over all workers, still on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

Votes = tuple[float, float]  # to stop as on Ctrl-C, to stop as on SIGTERM


@lru_cache
def _one_bad(device: torch.device) -> Tensor:
    return torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.float64, device=device)


@dataclass(frozen=True)
class StepResult:
    """Sums of one optimizer step over all workers, still on the device."""

    loss_sum: Tensor
    count: Tensor
    norm: Tensor  # gradient norm before clipping
    finite: Tensor  # bool: loss and gradient are finite (an overflow that the fp16 scaler skips counts as finite)
    votes: Tensor  # [2]: how many workers had been asked to stop, as in `Trainer.votes`
    marks: Tensor  # [workers, columns]: the checksums that `Agreement` compares
    codes: Tensor  # [workers]: each worker's code for non-finite numbers

    def mean(self, precision: str) -> Tensor:
        """The mean loss over the real targets."""
        mean = self.loss_sum / self.count.clamp(min=1e-30)
        return mean if precision == "fp64" else mean.to(torch.float32)

    def seen(self) -> Tensor:
        """[3]: what a look at a step reads: whether it is finite, loss and count."""
        return torch.stack([self.finite.double(), self.loss_sum, self.count])

    @property
    def learned(self) -> Tensor:
        """The targets that the weights were changed by: none if the step was skipped, as one that is not finite or overflowed in fp16."""
        return torch.where(self.finite & self.norm.isfinite(), self.count, 0.0)  # a step that fp16 skips has no norm

    def counted(self) -> Tensor:
        """[5]: loss, targets, norm and 1 for a step, or 1 in the last place for a non-finite one; sums of these describe several steps."""
        one = torch.ones_like(self.loss_sum)
        norm = torch.where(self.norm.isfinite(), self.norm, 0.0).double()  # a step that fp16 skips has no norm
        numbers = torch.stack([self.loss_sum, self.count, norm, one, torch.zeros_like(one)])
        return torch.where(self.finite, numbers, _one_bad(numbers.device))
