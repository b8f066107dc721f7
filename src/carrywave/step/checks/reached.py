"""Which parameters backward came to. One that it came to on no worker has no gradient, as on one device: an optimizer leaves it alone.

A buffer that is summed over workers holds zeros for such a parameter, which an optimizer with momentum or weight decay would act on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from carrywave.step.gradients import Reducer
from carrywave.step.reproducible.fixed_tree import Tree


class Reach:
    """Of one worker: `names` are all parameters of the model, `held` those that are here."""

    def __init__(
        self, names: Sequence[str], held: Mapping[str, nn.Parameter], summed: Reducer | Tree | None, device: torch.device, *, several: bool
    ) -> None:
        self.names, self.held, self.summed, self.device = names, held, summed, device
        self.several = several  # workers: they send alike, also a stage without parameters, which sums none
        self._made: dict[tuple[bool, ...], Tensor] = {}  # few patterns come again and again

    def own(self) -> Tensor:
        """For each parameter whether backward came to it here; empty with one worker."""
        if not self.several:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        missing = self.summed.unreached if self.summed is not None else ()
        pattern = tuple(name in self.held and id(self.held[name]) not in missing for name in self.names)
        if pattern not in self._made:
            self._made[pattern] = torch.tensor(pattern, dtype=torch.float64).to(self.device)
        return self._made[pattern]

    def forget(self, reached: Tensor) -> None:
        """`reached`: the sum of all workers' `own`. It is read on the host only where something was not reached here, which is rare."""
        if self.summed is None or not self.summed.unreached:
            return
        for name, count in zip(self.names, reached.tolist(), strict=True):
            parameter = self.held.get(name)
            if not count and parameter is not None and id(parameter) in self.summed.unreached:
                parameter.grad = None
