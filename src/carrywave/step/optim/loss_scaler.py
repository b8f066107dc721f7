"""fp16 loss scaling that stays on the device: no flag is read on the host, so a step can run ahead of the device or be captured.

A step that overflows is skipped by passing the overflow flag to the optimizer as its `found_inf`. torch's fused SGD, Adam and AdamW and our
NTASGD leave parameters and state bit-for-bit unchanged when that tensor is 1; every optimizer that `optimizer.build` returns supports this,
on CPU and on CUDA. For a user's optimizer that does not, the flag is read on the host instead, which is slower but equally correct.

One step: run backward on the loss times `scale`, call `unscale_`, divide and clip, call `step`. With several workers, `found_inf` must be
set on all of them before `step` if any of them overflowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from carrywave.errors import RunError
from carrywave.step.stats import by_dtype


def step_unless(found_inf: Tensor, optimizer: Optimizer) -> None:
    """Step the optimizer unless `found_inf`, a float32 scalar on the device, is 1."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
    elif not bool(found_inf):
        optimizer.step()


class Scaler:
    """The scale, the number of good steps since it last changed, and the overflow flag of the current step, all tensors on the device."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        # Our loss is a sum over targets, so its gradients exceed a mean's by the target count: start lower than the usual 2**16.
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
        """Divide the gradients by the scale; returns whether any of them is non-finite, as a bool scalar on the device."""
        self.found_inf.zero_()
        for part in by_dtype(grads):
            # The scale is a power of two (as long as growth and backoff are), so multiplying by its reciprocal is exact.
            torch._foreach_mul_(part, self.scale.double().reciprocal().to(part[0].dtype))
            largest = torch.stack(list(torch._foreach_norm(part, torch.inf)))
            self.found_inf.copy_(torch.maximum(self.found_inf, (~largest.isfinite()).any().to(torch.float32)))
        return self.found_inf > 0

    def step(self, optimizer: Optimizer) -> None:
        """Step the optimizer unless the gradients overflowed, then update the scale."""
        step_unless(self.found_inf, optimizer)
        self.update_()

    @torch.no_grad()
    def update_(self) -> None:
        """Multiply the scale by `backoff` after an overflow, or by `growth` after `interval` good steps in a row."""
        overflow = self.found_inf > 0
        streak = self.good_steps + 1
        grow = streak >= self.interval
        grown = self.scale * self.growth
        grown = torch.where(grown.isfinite(), grown, self.scale)
        self.scale.copy_(torch.where(overflow, self.scale * self.backoff, torch.where(grow, grown, self.scale)))
        self.good_steps.copy_(torch.where(overflow | grow, 0, streak))

    def tensors(self) -> dict[str, Tensor]:
        """The state to store in a snapshot."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Reject a state that `load` could not take."""
        for name, current in self.tensors().items():
            given = tensors.get(name)
            if given is None or given.shape != current.shape or given.dtype != current.dtype:
                raise RunError(
                    f"the snapshot has no loss scale ({name}); resume with the train.precision it was made with, or start a new run"
                )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the state from a snapshot."""
        self.check(tensors)
        for name, current in self.tensors().items():
            current.copy_(tensors[name])
