"""Helpers shared by all backends to honour lengths without packing: masks, the last real step, reversal of lanes. Also padded outputs in
the form of torch's packed sequences, and the check of what a user gives for each lane, which would otherwise be broadcast.

Shapes: T time, B lane, I input, P output width of a direction. Lengths never leave the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from carrywave.errors import UserError


def for_each_lane(value: Tensor | Sequence[int] | Sequence[bool], name: str, count: int, dtype: torch.dtype) -> Tensor:
    """[B]: a flag (torch.bool) or a whole number for each of `count` lanes; anything else is refused."""
    value_B = torch.as_tensor(value)
    if value_B.shape != (count,) or value_B.is_floating_point() or (value_B.dtype == torch.bool) != (dtype == torch.bool):
        kind = "true or false" if dtype == torch.bool else "a whole number"
        raise UserError(f"{name} has shape {list(value_B.shape)} and dtype {value_B.dtype}; pass {kind} for each of the {count} lanes")
    return value_B


def real_steps(lengths_B: Tensor, steps: int) -> Tensor:
    """[T, B, 1] bool: True at real steps."""
    return (torch.arange(steps, device=lengths_B.device)[:, None] < lengths_B)[..., None]


def out_of_range(lengths_B: Tensor, steps: int) -> tuple[int, int] | None:
    """The least and the greatest length, if one is below 0 or above the number of steps; None if all are within, or cannot be known."""
    # Lengths on a GPU are not looked at: that would synchronise with it. A tracer has no values to look at.
    if lengths_B.is_cuda or torch.compiler.is_compiling() or not lengths_B.numel():
        return None
    while torch._C._functorch.is_functorch_wrapped_tensor(lengths_B):  # by vmap, which allows no decision by its values
        lengths_B = torch._C._functorch.get_unwrapped(lengths_B)
    low, high = (int(each) for each in lengths_B.aminmax())
    return (low, high) if low < 0 or high > steps else None


def last_real(y_TBP: Tensor, lengths_B: Tensor, otherwise_BP: Tensor) -> Tensor:
    """[B, P]: each lane's output at its last real step, or `otherwise_BP` for a lane without real steps."""
    index_1BP = (lengths_B - 1).clamp(min=0)[None, :, None].expand(1, *y_TBP.shape[1:])
    return torch.where(lengths_B[:, None] > 0, y_TBP.gather(0, index_1BP)[0], otherwise_BP)


def reversed_steps(x_TBI: Tensor, lengths_B: Tensor | None) -> Tensor:
    """Reverse each lane within its length; padding stays in place. Its own inverse."""
    if lengths_B is None:
        return x_TBI.flip(0)
    step_T1 = torch.arange(x_TBI.shape[0], device=x_TBI.device)[:, None]
    index_TB = torch.where(step_T1 < lengths_B, lengths_B - 1 - step_T1, step_T1)
    return x_TBI.gather(0, index_TB[..., None].expand(x_TBI.shape))


def into_outputs(
    grad_y_TBP: Tensor | None, grad_h_BP: Tensor | None, lengths_B: Tensor | None, like_TBP: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the outputs, with that of the final h added at each lane's last real step; and the gradient of the final h that lanes
    without real steps pass on to their initial h.
    """
    if lengths_B is None:
        grad = torch.zeros_like(like_TBP) if grad_y_TBP is None else grad_y_TBP
        if grad_h_BP is not None:
            grad = grad.clone() if grad is grad_y_TBP else grad
            grad[-1] += grad_h_BP
        return grad, None
    real_TB1 = real_steps(lengths_B, like_TBP.shape[0])
    grad = torch.zeros_like(like_TBP) if grad_y_TBP is None else torch.where(real_TB1, grad_y_TBP, 0.0)
    if grad_h_BP is None:
        return grad, None
    some_B1 = lengths_B[:, None] > 0
    index_1BP = (lengths_B - 1).clamp(min=0)[None, :, None].expand(1, *grad_h_BP.shape)
    grad.scatter_add_(0, index_1BP, torch.where(some_B1, grad_h_BP, 0.0)[None])
    return grad, torch.where(some_B1, 0.0, grad_h_BP)


def packed_like(y_TBP: Tensor, lengths_B: Tensor, packed: PackedSequence) -> PackedSequence:
    """The real steps of padded outputs, in the places of the inputs that they belong to."""
    order_B, lengths_B = packed.sorted_indices, lengths_B.cpu()
    if order_B is not None:
        y_TBP, lengths_B = y_TBP.index_select(1, order_B), lengths_B[order_B.cpu()]
    data = pack_padded_sequence(y_TBP, lengths_B).data
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
