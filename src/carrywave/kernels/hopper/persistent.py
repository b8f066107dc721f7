"""Recurrent layers for Hopper GPUs in bf16 and fp16: one launch for a whole sequence, weights kept on the chip (`persistent.cu`).

Decides which layers it can run, and on which layout; the work itself is in `wave` (streams, autograd) and `recurrence` (launches).

Shapes: T time, B lane, I input, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from carrywave.cells.cell import by_name
from carrywave.kernels.carry import AnyCarry, changed
from carrywave.kernels.cuda import nvrtc
from carrywave.kernels.cuda.casting import HALVES
from carrywave.kernels.hopper import wave, windowed
from carrywave.kernels.hopper.chip import chip_of
from carrywave.kernels.hopper.choice import alone, heads_for, shape_for, wave_for
from carrywave.kernels.hopper.layout import SHARED_BYTES, Chip, Wave
from carrywave.kernels.lengths import reversed_steps
from carrywave.kernels.step_marks import StepMarks
from carrywave.kernels.weights import Layer, heads_of
from carrywave.kernels.window import WindowChunk

FAILED = "it failed: "  # how a refusal starts when a kernel was tried
_MOST = 400  # characters of an error: compilers say much


def refusal(x_TBI: Tensor, weights: Layer, marks: StepMarks | None = None, cell: str = "lstm") -> str:
    """Why this backend cannot run the layer; empty if it can."""
    if not x_TBI.is_cuda:
        return "x is not on a GPU"
    if x_TBI.dtype not in HALVES:
        return f"it supports bf16 and fp16, not {str(x_TBI.dtype).removeprefix('torch.')}"
    if weights[0].w_hr is not None:
        return "it does not support projections"
    if weights[0].w_ih.dtype not in (torch.float32, x_TBI.dtype):
        return f"its weights must be float32 or of x's dtype, got {str(weights[0].w_ih.dtype).removeprefix('torch.')}"
    learned = marks is not None and marks.initial is not None
    if marks is not None and marks.noise is not None and (len(weights) > 1 or learned):
        return "it supports noise inside the cell in one direction, and not together with resets to a learned carry"
    if learned and (cell == "slstm" or heads_of(weights, by_name(cell).gates) > 1):
        return "it supports resets to a learned carry only without heads, and not in an sLSTM"
    if refused := device_refusal(x_TBI.device.index or 0):
        return refused
    layout = _layout(x_TBI, weights, cell, plain=marks is None)
    if layout is None:
        return f"{heads_of(weights, by_name(cell).gates)} x {weights[0].w_hh.shape[1]} units and {x_TBI.shape[1]} lanes do not fit"
    resets = marks is not None and marks.resets is not None
    if resets and max(each.shared_bytes + each.reset_bytes for each in (layout.shape, layout.back)) > SHARED_BYTES:
        return "its shared memory has no room for resets besides the widest layers"
    return ""


def failure(error: nvrtc.KernelError) -> str:
    """A refusal after a kernel that was tried: its error on one line."""
    return f"{FAILED}{' '.join(str(error).split())[:_MOST]}"


def pays(x_TBI: Tensor, weights: Layer) -> bool:
    """True if it is faster than cuDNN inside a CUDA graph, as measured on an H200 (docs/benchmarks.md). It is not if the lanes need many
    passes through a layer that is too wide for `stream.cu`, but for LSTMs of more than 1,280 units with up to 64 lanes; nor in fp16 for
    short sequences in layers so narrow that cuDNN has a persistent kernel for them. It always is if the width is no multiple of 8: then
    rows of the weights do not start at multiples of 16 bytes, and cuDNN's products are slow.

    Call `refusal` first: only a GPU that can run the kernels can be asked how much of it they may fill.
    """
    rows, hidden = weights[0].w_hh.shape
    chip, (steps, lanes) = _chip(x_TBI), x_TBI.shape[:2]
    shape, plain = shape_for(chip, hidden, lanes), alone(chip, hidden, lanes, steps, plain=True)
    tiny = x_TBI.dtype == torch.float16 and hidden <= 64 and steps < 32
    few = shape is None or shape.passes <= 2 or shape.passes * shape.hidden <= 3072
    wide = shape is not None and shape.k_blocks > 5 and lanes <= 64 and rows == 4 * hidden  # a GRU's three gates take us as long as four
    streamed = plain is not None and plain.shape.streamed is not None
    return not tiny and (few or wide or streamed or hidden % 8 != 0)


@cache
def device_refusal(device: int) -> str:
    """Why this backend cannot run any layer on a GPU; empty if it can."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "it needs a Hopper GPU (compute capability 9.0)"
    if missing := nvrtc.available():
        return f"CUDA code cannot be compiled here ({missing})"
    try:
        chip_of(device)
    except nvrtc.KernelError as error:
        return failure(error)
    return ""


def _chip(x_TBI: Tensor) -> Chip:
    return chip_of(x_TBI.device.index or 0)


def layer(
    x_TBI: Tensor,
    carry: AnyCarry,
    weights: Layer,
    lengths_B: Tensor | None,
    cell: str = "lstm",
    *,
    marks: StepMarks | None = None,
    clean: bool = False,
    chunk: WindowChunk | None = None,
) -> tuple[Tensor, AnyCarry]:
    """One layer: outputs [T, B, H·D] and the carry at each lane's last real step. Weights and carry may have a wider dtype than x.

    `clean`: padding already holds zeros. `chunk`: the steps are one chunk of this window.
    """
    if len(weights) == 1:
        held = windowed.held_by(chunk, weights)
        how = _alone(x_TBI, weights, cell, plain=marks is None) if held is None else held.how
        marked = None if marks is None else (marks,)
        y_TBH, [end] = windowed.run(x_TBI, (carry,), weights, (None,), lengths_B, how, chunk, marks=marked, clean=clean)
        return y_TBH, end
    ys, ends, both = [], [], _alone(x_TBI, weights, cell, plain=marks is None)
    for direction, each in enumerate(weights):
        x = x_TBI if direction == 0 else reversed_steps(x_TBI, lengths_B)
        start = _one_way(carry, direction)
        of_way = None if marks is None else (marks.one_way(direction, lengths_B),)
        y_TBH, [end] = wave.run(x, (start,), (each,), (None,), lengths_B, both, marks=of_way, clean=clean)
        ys.append(y_TBH if direction == 0 else reversed_steps(y_TBH, lengths_B))
        ends.append(end)
    return torch.cat(ys, dim=-1), changed(ends[0], lambda *parts: torch.cat(parts), *ends[1:])


def _one_way(carry: AnyCarry, direction: int) -> AnyCarry:
    return changed(carry, lambda part: part[direction : direction + 1])


def _alone(x_TBI: Tensor, weights: Layer, cell: str, *, plain: bool) -> Wave:
    whole = _layout(x_TBI, weights, cell, plain=plain)
    if whole is None:
        raise ValueError(f"{weights[0].w_hh.shape[1]} units and {x_TBI.shape[1]} lanes do not fit; call `refusal` first")
    return whole


def _layout(x_TBI: Tensor, weights: Layer, cell: str, *, plain: bool) -> Wave | None:
    """How a layer runs; None if it does not fit. `plain`: without marks."""
    chip, (steps, lanes), units, heads = _chip(x_TBI), x_TBI.shape[:2], weights[0].w_hh.shape[1], heads_of(weights, by_name(cell).gates)
    if heads > 1:
        of_heads = heads_for(chip, units, heads, lanes, cell) if units % 64 == 0 else None
        return None if of_heads is None else Wave(of_heads, 1, steps)
    # Cells differ in shared memory, of which the widest layers need all that there is.
    whole = alone(chip, units, lanes, steps, plain=plain and cell != "slstm")
    whole = None if whole is None else whole.of_cell(cell)
    return whole if whole is not None and whole.shape.valid and whole.back.valid else None


def wave_of(x_TBI: Tensor, layers: Sequence[Layer], cell: str = "lstm", *, plain: bool = False) -> Wave | None:
    """How layers that this backend can run are run concurrently; None if they should run one by one. `plain`: without marks."""
    widths = {direction.w_hh.shape[1] for layer in layers for direction in layer}
    if cell == "slstm" or any(heads_of(layer, by_name(cell).gates) > 1 for layer in layers):
        return None
    if len(layers) < 2 or len(widths) > 1 or any(len(layer) > 1 for layer in layers):
        return None
    layout = wave_for(_chip(x_TBI), len(layers), widths.pop(), x_TBI.shape[1], x_TBI.shape[0], plain=plain)
    return layout.of_cell(cell) if layout is not None and (layout.streams > 1 or layout.shape.joined > 1) else None
