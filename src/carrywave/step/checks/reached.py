"""Tracks which parameters received a gradient. One that received none on any worker has its gradient removed, as on one device, so that the
optimizer leaves it alone.

Without this, a gradient bucket would hold zeros for such a parameter, and an optimizer with momentum or weight decay would still update it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from carrywave.step.gradients import Gradients


class ReachedParameters:
    """One worker's view: `names` are all parameters of the model, `held` those on this worker."""

    def __init__(
        self, names: Sequence[str], held: Mapping[str, nn.Parameter], gradients: Gradients, device: torch.device, *, several: bool
    ) -> None:
        self.names, self.held, self.gradients, self.device = names, held, gradients, device
        self.several = several  # True with several workers: all must send the same number of flags, even a stage with no parameters
        self._made: dict[tuple[bool, ...], Tensor] = {}  # few distinct patterns occur, so they are cached

    @property
    def count(self) -> int:
        """The number of flags; none with a single worker."""
        return len(self.names) if self.several else 0

    def own(self) -> Tensor:
        """A 0/1 flag per parameter: did backward reach it on this worker? Empty with a single worker."""
        if not self.several:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        missing = self.gradients.unreached
        pattern = tuple(name in self.held and id(self.held[name]) not in missing for name in self.names)
        if pattern not in self._made:
            self._made[pattern] = torch.tensor(pattern, dtype=torch.float64).to(self.device)
        return self._made[pattern]

    def forget(self, reached: Tensor) -> None:
        """Remove gradients that no worker produced. `reached` is the sum of all workers' `own`; it is read on the host only if backward
        missed a parameter on this worker, which is rare.
        """
        if not self.several or not self.gradients.unreached:
            return
        for name, count in zip(self.names, reached.tolist(), strict=True):
            parameter = self.held.get(name)
            if not count and parameter is not None and id(parameter) in self.gradients.unreached:
                parameter.grad = None
