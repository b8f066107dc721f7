"""Helpers shared by all backends to honour lengths without packing: masks, the last real step, reversal of lanes. And torch's packed
sequences, to padded ones and back.

Shapes: T time, B lane. Lengths never leave the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from carrywave.errors import UserError


def real_steps(lengths_B: Tensor, steps: int) -> Tensor:
    """[T, B, 1] bool: True at real steps."""
    return (torch.arange(steps, device=lengths_B.device)[:, None] < lengths_B)[..., None]


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


def padded(packed: PackedSequence, given: object = None) -> tuple[Tensor, Tensor]:
    """[T, B, …] and lengths, in the order in which the lanes were before they were packed. `given`: lengths from elsewhere, refused."""
    if given is not None:
        raise UserError("LSTM got a PackedSequence, which has its own lengths; remove lengths")
    x_TBI, lengths_B = pad_packed_sequence(packed)
    return x_TBI, lengths_B


def packed_like(y_TBP: Tensor, lengths_B: Tensor, packed: PackedSequence) -> PackedSequence:
    """The real steps of padded outputs, in the places of the inputs that they belong to."""
    order_B, lengths_B = packed.sorted_indices, lengths_B.cpu()
    if order_B is not None:
        y_TBP, lengths_B = y_TBP.index_select(1, order_B), lengths_B[order_B.cpu()]
    data = pack_padded_sequence(y_TBP, lengths_B).data
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
