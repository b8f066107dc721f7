"""Calls torch's own kernel of a recurrent layer: cuDNN on CUDA, oneDNN or torch's native loop on the CPU. Every step is real. Also selects
the library that torch uses on the CPU.

Resets cut the sequence: the kernel runs from one step at which any lane starts again to the next, and the carry of these lanes is replaced
in between. Where to cut is read on the host, which waits for the device once; inside a CUDA graph, which cannot, the definition runs (see
`serves`).

Shapes: T time, B lane, I input, G gates · hidden, O outputs of all directions.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from carrywave.kernels.carry import AnyCarries, AnyCarry
from carrywave.kernels.derivatives import plain_only, traced
from carrywave.kernels.step_marks import StepMarks, begins, both_ways, where_any
from carrywave.kernels.weights import Layer, LayerWeights

ON_X86 = platform.machine().lower() in ("x86_64", "amd64")
# Chosen by processor type, not by measuring at run time: the choice changes the last bits, and a run must be reproducible.
# Training one layer in float32, oneDNN took 0.5 to 1.1 times as long as `manual` on x86, and 1.2 to 2.8 times as long on ARM.
ONEDNN_IS_FAST = ON_X86
# At most so many steps are fastest in torch's native loop: neither our Python nor what oneDNN prepares is worth it. On one x86 core
# (2026-11-19), a call of 2 x 64 to 2 x 650 units in float32 took 0.4 to 0.9 times as long as on oneDNN without gradients, 0.2 to 1.1 in
# training; `manual` took 1.3 to 2 times as long as it in training.
FEW_STEPS = 2
CUDNN_STEPS = 65_535  # the longest sequence that cuDNN takes in one call; beyond it, it reports CUDNN_STATUS_NOT_SUPPORTED
Kernel = Callable[..., tuple[Tensor, ...]]  # torch.lstm and the like
OneWay = Callable[[Tensor, AnyCarry], tuple[Tensor, AnyCarry]]  # inputs and carry to outputs and the carry at the end


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Inside this context, torch multiplies with plain BLAS and runs its native LSTM."""
    # What torch.backends.mkldnn.flags calls too, which besides sets flags of GPUs, at ten times the cost and with a warning. The public
    # attribute cannot be set after torch.backends.disable_global_flags().
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def run(
    kernel: Kernel, x_TBI: Tensor, carry: AnyCarry, weights: Layer, *, layers: int = 1, onednn: bool = False
) -> tuple[Tensor, AnyCarry]:
    """Run torch's kernel over one or both directions: outputs [T, B, O] and the carry after the last step. `layers`: the weights and the
    carry are those of this many layers, one after the other. `onednn`: on the CPU.
    """
    if x_TBI.is_cuda and x_TBI.shape[0] > CUDNN_STEPS:
        return in_pieces(kernel, x_TBI, carry, weights, CUDNN_STEPS)
    if x_TBI.is_cuda and weights[0].b_ih is None:
        # cuDNN's weight buffer has room for biases whether they are used or not; zeros fill it.
        none_G = x_TBI.new_zeros(weights[0].w_ih.shape[0])
        weights = tuple(direction._replace(b_ih=none_G, b_hh=none_G) for direction in weights)
    biased = weights[0].b_ih is not None
    flat = _flat(weights, x_TBI)
    parts = tuple(part.to(x_TBI.dtype).contiguous() for part in carry)
    # `train` only matters for dropout inside the kernel, which is never used, and for whether cuDNN keeps what backward needs. A traced
    # graph may be run for training later.
    train = torch.is_grad_enabled() or traced()
    given = parts if len(parts) > 1 else parts[0]
    with contextlib.nullcontext() if x_TBI.is_cuda or onednn else without_onednn():
        y_TBO, *ends = kernel(x_TBI, given, flat, biased, layers, 0.0, train, len(weights) == 2 * layers, False)
    of_parts: Any = type(carry)
    return y_TBO, of_parts(*ends)


def runs_stacks(x_TBI: Tensor) -> bool:
    """True if `stack` takes such inputs: on the CPU, in the precisions that torch is fast in there, and where it needs no other form."""
    return (
        x_TBI.device.type == "cpu"
        and x_TBI.dtype in (torch.float32, torch.float64)
        and x_TBI.shape[1] > 0
        and not plain_only()
        and not torch.is_autocast_enabled("cpu")
    )


def stack(
    name: str, x_TBI: Tensor, parts: Sequence[Tensor], weights: list[Tensor], layers: int, *, biased: bool, both: bool, onednn: bool
) -> tuple[Tensor, ...]:
    """Outputs and the parts of the carry, by one call of torch's function of this name for layers in one or both directions, on the CPU. It
    takes the fewest steps of Python: with few steps and units, these are most of the time.
    """
    function: Kernel = getattr(torch, name)
    given = x_TBI, parts if len(parts) > 1 else parts[0], weights, biased, layers, 0.0, torch.is_grad_enabled(), both, False
    if onednn or name != "lstm":  # torch runs only LSTMs on oneDNN
        return function(*given)
    with without_onednn():
        return function(*given)


def together(kernel: Kernel, x_TBI: Tensor, carries: AnyCarries, layers: Sequence[Layer]) -> tuple[Tensor, AnyCarries]:
    """Run a stack in one call, whose layers cuDNN runs partly at the same time. Call `stackable` first."""
    of_parts: Any = type(carries[0])
    joined = of_parts(*[torch.cat(parts).to(x_TBI.dtype) for parts in zip(*carries, strict=True)])
    weights = tuple(direction for layer in layers for direction in layer)
    y_TBO, ends = run(kernel, x_TBI, joined, weights, layers=len(layers), onednn=True)
    dtypes = [part.dtype for part in carries[0]]
    each = zip(*(part.to(dtype).chunk(len(layers)) for part, dtype in zip(ends, dtypes, strict=True)), strict=True)
    return y_TBO, tuple(of_parts(*end) for end in each)


def stackable(x_TBI: Tensor, layers: Sequence[Layer]) -> bool:
    """True if one call can run these layers: all of one width, with biases or without, and none with a projection or norms."""
    of_first = layers[0][0]
    alike = {(len(layer), direction.w_hh.shape, direction.b_ih is None, direction.w_hr) for layer in layers for direction in layer}
    plain = of_first.w_hr is None and of_first.extra is None
    return plain and len(alike) == 1 and x_TBI.shape[0] <= CUDNN_STEPS and not traced()


def serves(x_TBI: Tensor, marks: StepMarks | None) -> bool:
    """True if torch's kernels can run a layer with these marks: without noise, and with resets only where the host can read them."""
    if marks is None:
        return True
    in_graph = x_TBI.is_cuda and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return marks.noise is None and not traced() and not x_TBI.is_meta and not in_graph


def cut_at_resets(run: OneWay, x_TBI: Tensor, carry: AnyCarry, way: StepMarks | None) -> tuple[Tensor, AnyCarry]:
    """Run one direction in pieces that begin where any lane starts again, from the initial carry."""
    *initial, resets_TB = begins(way, [part[0] for part in carry])
    of_parts: Any = type(carry)
    resets = where_any(resets_TB)
    if not resets:
        return run(x_TBI, carry)
    ys: list[Tensor] = []
    for start, end in pairwise((*sorted({0, *resets}), x_TBI.shape[0])):
        if start in resets:
            again = resets[start]
            carry = of_parts(*(torch.where(again, new, old) for new, old in zip(initial, carry, strict=True) if new is not None))
        y_TBP, carry = run(x_TBI[start:end], carry)
        ys.append(y_TBP)
    return torch.cat(ys), carry


def in_pieces(kernel: Kernel, x_TBI: Tensor, carry: AnyCarry, weights: Layer, most_steps: int) -> tuple[Tensor, AnyCarry]:
    """The same in pieces of at most this many steps, with the carry passed from each to the next; one direction at a time."""
    of_parts: Any = type(carry)

    def one_way(x_TBI: Tensor, parts: Sequence[Tensor], each: LayerWeights, _: StepMarks | None) -> tuple[Tensor, Sequence[Tensor]]:
        passed, pieces = of_parts(*(part[None] for part in parts)), []
        for piece_TBI in torch.split(x_TBI, most_steps):
            y_TBP, passed = run(kernel, piece_TBI, passed, (each,))
            pieces.append(y_TBP)
        return torch.cat(pieces), [part[0] for part in passed]

    return both_ways(one_way, x_TBI, carry, weights, None)


def _flat(weights: Layer, like: Tensor) -> list[Tensor]:
    """The weights in the order of torch's modules; on CUDA, views of one buffer in cuDNN's order, which torch would else build and warn."""
    each = [[tensor for tensor in w[:5] if tensor is not None] for w in weights]
    if any(tensor.dtype != like.dtype for tensor in each[0]):
        each = [[tensor.to(like.dtype) for tensor in tensors] for tensors in each]
    if not like.is_cuda:
        return [tensor for tensors in each for tensor in tensors]
    # cuDNN stores the matrices of all directions first, then the biases.
    order = [(d, n) for want in (2, 1) for d, tensors in enumerate(each) for n, tensor in enumerate(tensors) if tensor.dim() == want]
    parts = torch.split(torch.cat([each[d][n].reshape(-1) for d, n in order]), [each[d][n].numel() for d, n in order])
    for (d, n), part in zip(order, parts, strict=True):
        each[d][n] = part.view_as(each[d][n])
    return [tensor for tensors in each for tensor in tensors]
