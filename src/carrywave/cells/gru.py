"""The GRU of torch.nn.GRU, with gates in the order reset, update, new. The reset gate acts on the product with the output of the step
before, not on that output (in Keras, `reset_after=True`; in ONNX, `linear_before_reset=1`).

Shapes: B lane, H hidden, G = 3H.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from carrywave.cells.cell import Cell, OnnxForm, StepWeights

if TYPE_CHECKING:
    from torch import Tensor


class GRUCarry(NamedTuple):
    """The output of the step before."""

    h: Tensor


def step(gates_BG: Tensor, carry: tuple[Tensor, ...], weights: StepWeights) -> tuple[Tensor, ...]:
    """The definition: one step of one direction."""
    [h_BH] = carry
    reset_BH, update_BH, new_BH = gates_BG.chunk(3, dim=-1)
    past_reset_BH, past_update_BH, past_new_BH = weights.recurrent(h_BH).chunk(3, dim=-1)
    update_BH = (update_BH + past_update_BH).sigmoid()
    new_BH = weights.candidate((new_BH + (reset_BH + past_reset_BH).sigmoid() * past_new_BH).tanh())
    return ((1.0 - update_BH) * new_BH + update_BH * h_BH,)


CELL = Cell(
    name="gru",
    gates=3,
    carry=GRUCarry,
    step=step,
    forget_gate=1,  # the update gate: open, it keeps h
    kernels=True,
    torch_module="GRU",
    torch_function="gru",
    onnx=OnnxForm("GRU", order=(1, 0, 2), attributes={"linear_before_reset": 1}),
    kept=5,  # three gates, what the reset gate multiplies, and h
)
