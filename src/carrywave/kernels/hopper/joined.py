"""The layers of a stack in one launch (`joined.cu`): its arguments, on the buffers of `stack`.

Each layer is a step behind the one below it, on blocks of its own, and takes its outputs as it takes its own h: as soon as they are there.
So only the lowest layer's input product comes before the launch, and only the gradient of its inputs comes after that of backward.

Shapes: T time, B lane, J input (padded), H hidden (P padded), Q = 4P, N = T·B, S = T + 1, E groups of lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from carrywave.kernels.hopper import recurrence
from carrywave.kernels.hopper.buffers import Activations, Ends, LayerGradients
from carrywave.kernels.hopper.layout import LayerShape
from carrywave.kernels.hopper.recurrence import Packed, SortedLanes


class ForwardLayer(NamedTuple):
    """What `joined.cu` is told of a layer, in its order."""

    w_hh_QP: Tensor
    w_ih_QP: Tensor | None  # None in the lowest layer
    bias_Q: Tensor
    below_NP: Tensor | None  # the outputs of the layer below
    hs_SBP: Tensor
    outputs_NP: Tensor | None  # h times the mask; None without a mask
    mask: Tensor | None  # [T, B, P], or [1, B, P] if it is the same at all steps
    gates_NQ: Tensor  # in the lowest layer the input product
    cells_TBP: Tensor | None
    first_c_BP: Tensor
    last_c_BP: Tensor


class BackwardLayer(NamedTuple):
    """The same for backward."""

    turned_hh_PQ: Tensor
    turned_ih_PQ: Tensor | None  # of the layer above; None in the highest
    above_NQ: Tensor | None  # its gate gradients
    gates_NQ: Tensor
    cells_TBP: Tensor | None
    first_c_BP: Tensor
    from_y: Tensor | None  # the gradient of the outputs in the highest layer; elsewhere their mask
    grad_last_h_BP: Tensor | None
    grad_last_c_BP: Tensor | None
    grads_NQ: Tensor
    grad_first_h_BP: Tensor
    grad_first_c_BP: Tensor
    grad_bias_EQ: Tensor


class Turned(NamedTuple):
    """The weights of a layer as backward reads them."""

    w_ih_QJ: Tensor
    w_hh_PQ: Tensor  # transposed
    w_ih_JQ: Tensor | None = None  # transposed; None where only the product of all steps needs it


def forward(shape: LayerShape, packs: Sequence[Packed], layers: Sequence[Activations], piece: int, dealt: SortedLanes) -> None:
    """Run the layers over one piece, to which all buffers but the memory at the ends of pieces are cut."""
    lowest = layers[0]
    assert lowest.inputs_NJ is not None
    torch.addmm(packs[0].bias_Q, lowest.inputs_NJ, packs[0].w_ih_QJ.t(), out=lowest.gates_NQ)
    each = []
    for number, (layer, pack) in enumerate(zip(layers, packs, strict=True)):
        mask = layer.mask if number < len(layers) - 1 else None
        each.append(
            ForwardLayer(
                pack.w_hh_QP, pack.w_ih_QJ if number else None, pack.bias_Q, layer.inputs_NJ if number else None, layer.hs_SBP,
                None if mask is None else layers[number + 1].inputs_NJ, mask, layer.gates_NQ, layer.cells_TBP,
                layer.cs_CBP[piece], layer.cs_CBP[piece + 1],
            )
        )  # fmt: skip
    steps, lanes = lowest.hs_SBP.shape[0] - 1, lowest.hs_SBP.shape[1]
    launch_forward(shape, each, dealt, lanes, steps, kept=lowest.cells_TBP is not None, mask_steps=_mask_steps(layers))


def backward(
    shape: LayerShape,
    weights: Sequence[Turned],
    layers: Sequence[Activations],
    grads: Sequence[LayerGradients],
    grad_y_TBP: Tensor,
    ends: Sequence[Ends],
    piece: int,
    dealt: SortedLanes,
    dx_NJ: Tensor | None,
    *,
    after: bool,
    before: bool,
) -> None:
    """Run backward over one piece, to which the buffers are cut as in `forward`. `after` and `before` as in `recurrence.backward`."""
    (steps, lanes), highest = grad_y_TBP.shape[:2], len(layers) - 1
    each = []
    for number, (layer, of_layer, turned) in enumerate(zip(layers, grads, weights, strict=True)):
        above = None if number == highest else grads[number + 1].gates_NQ
        each.append(
            BackwardLayer(
                turned.w_hh_PQ, None if number == highest else weights[number + 1].w_ih_JQ, above, layer.gates_NQ, layer.cells_TBP,
                layer.cs_CBP[piece], grad_y_TBP if number == highest else layer.mask, *ends[number], of_layer.gates_NQ,
                of_layer.starts[0][piece], of_layer.starts[1][piece], of_layer.bias_CEQ[piece],
            )
        )  # fmt: skip
    launch_backward(shape, each, grads[0].ring[piece], dealt, lanes, steps, after=after, before=before, mask_steps=_mask_steps(layers))
    if dx_NJ is not None:
        torch.mm(grads[0].gates_NQ, weights[0].w_ih_QJ, out=dx_NJ)


def launch_forward(
    shape: LayerShape, layers: Sequence[ForwardLayer], dealt: SortedLanes, lanes: int, steps: int, *, kept: bool, mask_steps: bool
) -> None:
    """Compute h, gates and memory of all layers at all steps. `mask_steps`: masks differ from step to step."""
    hs_SBP = layers[0].hs_SBP
    recurrence.launch("forward", shape, hs_SBP, layers, *dealt, lanes, shape.groups, steps, int(kept), int(mask_steps))


def launch_backward(
    shape: LayerShape,
    layers: Sequence[BackwardLayer],
    ring: Tensor,
    dealt: SortedLanes,
    lanes: int,
    steps: int,
    *,
    after: bool,
    before: bool,
    mask_steps: bool,
) -> None:
    """Compute the gradients of all layers at all steps but those of weights and of the lowest layer's inputs."""
    like = layers[0].gates_NQ
    recurrence.launch("backward", shape, like, layers, ring, *dealt, lanes, shape.groups, steps, int(after), int(before), int(mask_steps))


def _mask_steps(layers: Sequence[Activations]) -> bool:
    return any(layer.mask is not None and layer.mask.shape[0] > 1 for layer in layers[:-1])
