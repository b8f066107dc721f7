"""fp16 loss scaling that stays on the device: no flag is read on the host, so a step can run ahead or be captured.

How a step with an overflow is skipped: the flag goes along to the optimizer as its `found_inf`. The fused SGD, Adam and
AdamW of torch, and our NTASGD, leave parameters and state as they are, bit for bit, where that tensor is 1; all that
`optimizer.build` returns are of this kind, on CPU and on CUDA. An optimizer that a user brings and that cannot do so gets
one read on the host instead, which is slower and just as right.

One step: backward of the loss times `scale`, then `unscale_`, then division and clipping, then `step`. Replicas take the
maximum of `found_inf` between the last two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from carrywave.errors import RunError
from carrywave.step.gradients import by_dtype


def step_unless(found_inf: Tensor, optimizer: Optimizer) -> None:
    """The optimizer's step, or none where this float32 scalar on the device is 1."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
    elif not bool(found_inf):
        optimizer.step()


class Scaler:
    """The scale, the number of good steps since it last changed, and whether this step overflowed; all tensors."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        # Our loss is a sum, whose gradients are larger than a mean's by the number of targets: so a smaller start than 2**16.
        initial: float = 2.0**10,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ) -> None:
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.scale = torch.full((), initial, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def unscale_(self, grads: Sequence[Tensor]) -> Tensor:
        """Divide the gradients by the scale; returns whether any of them is not finite (a bool scalar on the device)."""
        self.found_inf.zero_()
        for part in by_dtype(grads):
            # The scale is a power of two (as long as growth and backoff are): multiplying by its inverse is exact.
            torch._foreach_mul_(part, self.scale.double().reciprocal().to(part[0].dtype))
            largest = torch.stack(list(torch._foreach_norm(part, torch.inf)))
            self.found_inf.copy_(torch.maximum(self.found_inf, (~largest.isfinite()).any().to(torch.float32)))
        return self.found_inf > 0

    def step(self, optimizer: Optimizer) -> None:
        """The optimizer's step, or none where the gradients overflowed; then the scale for the next step."""
        step_unless(self.found_inf, optimizer)
        self.update_()

    @torch.no_grad()
    def update_(self) -> None:
        """Halve the scale after an overflow; double it after `interval` good steps in a row."""
        overflow = self.found_inf > 0
        streak = self.good_steps + 1
        grow = streak >= self.interval
        grown = self.scale * self.growth
        grown = torch.where(grown.isfinite(), grown, self.scale)
        self.scale.copy_(torch.where(overflow, self.scale * self.backoff, torch.where(grow, grown, self.scale)))
        self.good_steps.copy_(torch.where(overflow | grow, 0, streak))

    def tensors(self) -> dict[str, Tensor]:
        """The state, for a snapshot."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up a state from a snapshot."""
        for name, own in self.tensors().items():
            given = tensors.get(name)
            if given is None or given.shape != own.shape or given.dtype != own.dtype:
                raise RunError(
                    f"the snapshot holds no loss scale ({name}); resume with the train.precision it was made with, or start a new run"
                )
            own.copy_(given)
