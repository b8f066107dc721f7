"""What the executor is given and gives back for each batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.model.state import State

# The head's output, the targets, the sequence in each lane, and the step of it with which the output begins.
Observer = Callable[[Tensor, Tensor | None, Tensor, Tensor], None]


@dataclass(frozen=True)
class Job:
    """One batch to run: the lanes' state before it, and how to run it."""

    batch: Batch
    state: State | None  # None: continue from the previous job
    key: Tensor | None = None  # random key for dropout; None in evaluation
    scale: Tensor | None = None  # multiplies the loss before backward (fp16)
    alpha: float = 0.0
    beta: float = 0.0
    per_change: Tensor | None = None  # as in `regularize`
    precision: str = "fp32"  # of the forward pass; backward follows automatically
    observe: Observer | None = None  # called with every output of the head, in evaluation


@dataclass(frozen=True)
class BatchOutcome:
    """Sums over the part of the batch that this stage scored, and the state of every lane after it. Detached."""

    sums: Tensor  # [3]: loss over real targets, real targets, regularisation, which was differentiated with the loss
    state: State

    @property
    def loss_sum(self) -> Tensor:
        """The loss over real targets."""
        return self.sums[0]

    @property
    def count(self) -> Tensor:
        """Real targets."""
        return self.sums[1]

    @property
    def penalty(self) -> Tensor:
        """Regularisation; not in `loss_sum`."""
        return self.sums[2]
