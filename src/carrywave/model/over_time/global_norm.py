"""`GlobalNorm`: a batch norm over the global batch, the same function of it however many workers share it.

Mean and variance of each channel are over all real steps of all lanes, whoever holds them: sums and counts are summed over the replicas of
a step, and so are the gradients of these sums, since the loss is one sum over all replicas. Padding counts for nothing. Accumulated batches
have statistics of their own, on any plan. In evaluation the running values count, as those of torch's batch norm do.

The stage that calls a module says which steps are real (`real_lanes`), and the trainer how to sum over replicas (`summed_by`); a norm that
is called by itself takes all that it is given. Shapes: T time, B lane, C channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.errors import UserError
from carrywave.kernels.lengths import real_steps

Sum = Callable[[Tensor], Tensor]  # over replicas, in place
_lengths: ContextVar[Tensor | None] = ContextVar("lengths", default=None)
_sum: ContextVar[Sum | None] = ContextVar("sum", default=None)


@contextmanager
def real_lanes(lengths_B: Tensor | None) -> Iterator[None]:
    """Norms inside this context read sequences of these lengths; None: every step is real."""
    before = _lengths.set(lengths_B)
    try:
        yield
    finally:
        _lengths.reset(before)


@contextmanager
def summed_by(total: Sum) -> Iterator[None]:
    """Norms inside this context are over all replicas. Collective: every replica must call the same norms in the same order."""
    before = _sum.set(total)
    try:
        yield
    finally:
        _sum.reset(before)


class GlobalNorm(nn.Module):
    """A norm of each channel over all real steps of the global batch, for an encoder or a module in one piece.

    Reads [T, B, C], or [B, C], with the parameters and buffers of `torch.nn.BatchNorm1d`, and is as `nn.BatchNorm1d` is on one device.

    >>> import torch
    >>> import carrywave as cw
    >>> norm = cw.GlobalNorm(3)
    >>> y = norm(5.0 + 2.0 * torch.randn(20, 4, 3))
    >>> bool(y.mean((0, 1)).abs().max() < 1e-4), norm.eval()(torch.zeros(20, 4, 3)).shape
    (True, torch.Size([20, 4, 3]))
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, *, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, y: Tensor) -> Tensor:
        """The same shape; padding is not told from the rest in what comes out."""
        if y.dim() not in (2, 3) or y.shape[-1] != len(self.weight):
            raise UserError(
                f"a GlobalNorm of {len(self.weight)} channels got {list(y.shape)}; pass [time, lane, channel] or [lane, channel]"
            )
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        mean_C, var_C = self._statistics(wide) if self.training else (self.running_mean, self.running_var)
        return ((wide - mean_C) * (torch.rsqrt(var_C + self.eps) * self.weight) + self.bias).to(y.dtype)

    def _statistics(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the variance of each channel, which the running values follow."""
        lengths_B, total = _lengths.get(), _sum.get()
        near_C = self.running_mean.to(y.dtype, copy=True)  # a sum of squares around a number near the mean is exact enough
        away, axes = y - near_C, tuple(range(y.dim() - 1))
        count = y.new_full((1,), y[..., 0].numel())
        if lengths_B is not None:
            real = real_steps(lengths_B, y.shape[0]) if y.dim() == 3 else (lengths_B > 0)[:, None]
            away, count = torch.where(real, away, 0.0), real.sum().to(y.dtype)[None]
        sums = torch.cat([away.sum(axes), away.square().sum(axes), count])
        if total is not None:
            sums = _ReplicaSum.apply(sums, total)  # type: ignore[no-untyped-call]
        sum_C, squares_C, count = torch.split(sums, [len(near_C), len(near_C), 1])
        count = count.detach().clamp(min=1.0)
        drift_C = sum_C / count
        mean_C, var_C = near_C + drift_C, (squares_C / count - drift_C.square()).clamp(min=0.0)
        with torch.no_grad():
            now_CC = torch.stack([mean_C, var_C * (count / (count - 1.0).clamp(min=1.0))])
            running_CC = torch.stack([self.running_mean, self.running_var])
            # A step that is not finite leaves a model as it was.
            new_CC = torch.where(now_CC.isfinite().all(), running_CC.lerp(now_CC.to(running_CC.dtype), self.momentum), running_CC)
            self.running_mean.copy_(new_CC[0])
            self.running_var.copy_(new_CC[1])
        return mean_C, var_C

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, momentum={self.momentum}, eps={self.eps}"


class _ReplicaSum(torch.autograd.Function):
    """A sum over replicas, whose gradient is summed over them, too."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, total: Sum) -> Tensor:
        ctx.total = total
        return total(local.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.total(gradient.clone()), None


def has_norms(module: nn.Module | None) -> bool:
    """True if there is such a norm in the module."""
    return module is not None and any(isinstance(each, GlobalNorm) for each in module.modules())
