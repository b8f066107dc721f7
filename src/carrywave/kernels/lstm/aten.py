"""The LSTM layer on torch's own kernels: cuDNN on CUDA, oneDNN or torch's native loop on the CPU.

Lengths need neither packing nor a device synchronisation. Padded steps run like any other, but their input has a flag column whose
weights saturate the input gate at 0 and the forget gate at 1, so c passes through them bit for bit; h is read at the last real
step, and later outputs are zeroed.

Resets cut the sequence: a kernel runs from one step at which any lane is reset to the next, and the carry of the lanes that are reset is
replaced between them. Where to cut is read on the host, which waits for the device once; inside a CUDA graph, which cannot, the definition
runs (see `serves`).

Shapes: T time, B lane, I input, H hidden, G = 4H, P output width (the projection, or H), D directions.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from carrywave.kernels.blas import ONEDNN_IS_FAST, without_onednn
from carrywave.kernels.carry import Carry
from carrywave.kernels.derivatives import traced
from carrywave.kernels.lengths import last_real, real_steps, reversed_steps
from carrywave.kernels.step_marks import StepMarks
from carrywave.kernels.weights import Layer, LayerWeights

# sigmoid(±1e4) is exactly 1 and 0 in every precision, whatever the other inputs add, and 1e4 is still within fp16's range.
_SATURATED = 1.0e4
CUDNN_STEPS = 65_535  # the longest sequence that cuDNN takes in one call; beyond it, it reports CUDNN_STATUS_NOT_SUPPORTED
LONG_STEPS = 32  # shorter sequences do not amortise oneDNN's weight preparation


def layer(x_TBI: Tensor, carry: Carry, weights: Layer, lengths_B: Tensor | None, *, marks: StepMarks | None = None) -> tuple[Tensor, Carry]:
    """One layer: outputs [T, B, P·D] and the carry at each lane's last real step."""
    if lengths_B is None and marks is None:
        return _run(x_TBI, carry, weights)
    real_TB1 = None if lengths_B is None else real_steps(lengths_B, x_TBI.shape[0])
    padded_TBJ = x_TBI if real_TB1 is None else _flagged(x_TBI, real_TB1)
    begins = None if marks is None else marks.begins(carry, lengths_B, x_TBI.shape[0])
    ys, hs, cs = [], [], []
    for direction, direction_weights in enumerate(weights):
        each = padded_TBJ if direction == 0 else reversed_steps(padded_TBJ, lengths_B)
        start = Carry(carry.h[direction : direction + 1], carry.c[direction : direction + 1])
        if real_TB1 is not None:
            direction_weights = _with_flag(direction_weights, padded_TBJ.shape[-1])
        y_TBP, end = _cut_at_resets(each, start, direction_weights, *((None,) * 3 if begins is None else begins[direction]))
        hs.append(end.h[0])
        cs.append(end.c[0])
        if real_TB1 is not None and lengths_B is not None:
            y_TBP = torch.where(real_TB1, y_TBP, 0.0)
            hs[-1] = last_real(y_TBP, lengths_B, start.h[0].to(y_TBP.dtype))
        ys.append(y_TBP if direction == 0 else reversed_steps(y_TBP, lengths_B))
    return torch.cat(ys, dim=-1), Carry(torch.stack(hs), torch.stack(cs))


def serves(x_TBI: Tensor, marks: StepMarks | None) -> bool:
    """True if this backend supports the layer; resets cannot be read in a CUDA graph, or by a tracer."""
    if marks is None or marks.resets is None:
        return True
    in_graph = x_TBI.is_cuda and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not traced() and not x_TBI.is_meta and not in_graph


def prefers_onednn(x_TBI: Tensor, weights: Layer) -> bool:
    """True if oneDNN's LSTM is the fastest for this layer; it supports no projection, and prepares the weights again for every chunk."""
    steps: object = x_TBI.shape[0]
    if not isinstance(steps, int):  # a tracer leaves the number of steps free, and a question about it would bind it
        return False
    long_float = x_TBI.dtype == torch.float32 and steps >= LONG_STEPS
    return ONEDNN_IS_FAST and x_TBI.device.type == "cpu" and long_float and weights[0].w_hr is None


def _flagged(x_TBI: Tensor, real_TB1: Tensor) -> Tensor:
    """The input with padding zeroed and a column that is 1 at padded steps, its width rounded up to a multiple of 8."""
    steps, lanes, inputs = x_TBI.shape
    rest = -(inputs + 1) % 8
    columns = [torch.where(real_TB1, x_TBI, 0.0), (~real_TB1).to(x_TBI.dtype)]
    if rest:
        columns.append(x_TBI.new_zeros(steps, lanes, rest))
    return torch.cat(columns, dim=-1)


def _with_flag(weights: LayerWeights, width: int) -> LayerWeights:
    hidden = weights.w_ih.shape[0] // 4
    extra_GJ = weights.w_ih.new_zeros(4 * hidden, width - weights.w_ih.shape[1])
    extra_GJ[:hidden, 0] = -_SATURATED
    extra_GJ[hidden : 2 * hidden, 0] = _SATURATED
    return weights._replace(w_ih=torch.cat((weights.w_ih, extra_GJ), dim=1))


def _run(x_TBI: Tensor, carry: Carry, weights: Layer) -> tuple[Tensor, Carry]:
    """Run torch's kernel over one or both directions, with every step real."""
    if x_TBI.is_cuda and x_TBI.shape[0] > CUDNN_STEPS:
        return _in_pieces(x_TBI, carry, weights, CUDNN_STEPS)
    if x_TBI.is_cuda and weights[0].b_ih is None:
        # cuDNN's weight buffer has room for biases whether they are used or not; zeros fill it.
        none_G = x_TBI.new_zeros(weights[0].w_ih.shape[0])
        weights = tuple(direction._replace(b_ih=none_G, b_hh=none_G) for direction in weights)
    biased = weights[0].b_ih is not None
    flat = _flat(weights, x_TBI)
    h_DBP, c_DBH = carry.h.to(x_TBI.dtype).contiguous(), carry.c.to(x_TBI.dtype).contiguous()
    # `train` only matters for dropout inside the kernel, which is never used, and for whether cuDNN keeps what backward needs. A traced
    # graph may be run for training later.
    train = torch.is_grad_enabled() or traced()
    with contextlib.nullcontext() if x_TBI.is_cuda or prefers_onednn(x_TBI, weights) else without_onednn():
        y_TBO, h_DBP, c_DBH = torch.lstm(x_TBI, (h_DBP, c_DBH), flat, biased, 1, 0.0, train, len(weights) == 2, False)
    return y_TBO, Carry(h_DBP, c_DBH)


def _cut_at_resets(
    x_TBI: Tensor, carry: Carry, weights: LayerWeights, h_1P: Tensor | None, c_1H: Tensor | None, resets_TB: Tensor | None
) -> tuple[Tensor, Carry]:
    """Run one direction in pieces that begin where any lane is reset, to the initial carry."""
    if resets_TB is None or h_1P is None or c_1H is None:
        return _run(x_TBI, carry, (weights,))
    starts = [t for t, some in enumerate(resets_TB.any(1).tolist()) if some]
    ends = [*starts, x_TBI.shape[0]]
    ys = []
    if ends[0]:
        y_TBP, carry = _run(x_TBI[: ends[0]], carry, (weights,))
        ys.append(y_TBP)
    for start, end in zip(starts, ends[1:], strict=True):
        reset_B1 = resets_TB[start][:, None]
        carry = Carry(torch.where(reset_B1, h_1P, carry.h), torch.where(reset_B1, c_1H, carry.c))
        y_TBP, carry = _run(x_TBI[start:end], carry, (weights,))
        ys.append(y_TBP)
    return torch.cat(ys), carry


def _in_pieces(x_TBI: Tensor, carry: Carry, weights: Layer, most_steps: int) -> tuple[Tensor, Carry]:
    """The same in pieces of at most so many steps, with the carry passed from each to the next; one direction at a time."""
    ys, hs, cs = [], [], []
    for direction, direction_weights in enumerate(weights):
        each_TBI = x_TBI if direction == 0 else x_TBI.flip(0)
        passed = Carry(carry.h[direction : direction + 1], carry.c[direction : direction + 1])
        pieces = []
        for piece_TBI in torch.split(each_TBI, most_steps):
            y_TBP, passed = _run(piece_TBI, passed, (direction_weights,))
            pieces.append(y_TBP)
        y_TBP = torch.cat(pieces)
        ys.append(y_TBP if direction == 0 else y_TBP.flip(0))
        hs.append(passed.h)
        cs.append(passed.c)
    return torch.cat(ys, dim=-1), Carry(torch.cat(hs), torch.cat(cs))


def _flat(weights: Layer, like: Tensor) -> list[Tensor]:
    """The weights in nn.LSTM's order; on CUDA, views of one buffer in cuDNN's order, which torch would otherwise build, with a warning."""
    each = [[tensor.to(like.dtype) for tensor in (w.w_ih, w.w_hh, w.b_ih, w.b_hh, w.w_hr) if tensor is not None] for w in weights]
    if not like.is_cuda:
        return [tensor for tensors in each for tensor in tensors]
    # cuDNN stores the matrices of all directions first, then the biases.
    order = [(d, n) for want in (2, 1) for d, tensors in enumerate(each) for n, tensor in enumerate(tensors) if tensor.dim() == want]
    parts = torch.split(torch.cat([each[d][n].reshape(-1) for d, n in order]), [each[d][n].numel() for d, n in order])
    for (d, n), part in zip(order, parts, strict=True):
        each[d][n] = part.view_as(each[d][n])
    return [tensor for tensors in each for tensor in tensors]
