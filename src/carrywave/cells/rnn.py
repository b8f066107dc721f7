"""The plain cell of torch.nn.RNN with tanh: h' = tanh(W x + U h + b). It has no gates that could keep anything, and is the shortest example
of a cell.

Shapes: B lane, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from carrywave.cells.cell import Cell, OnnxForm, StepWeights

if TYPE_CHECKING:
    from torch import Tensor


class RNNCarry(NamedTuple):
    """The output of the step before."""

    h: Tensor


def step(gates_BH: Tensor, carry: tuple[Tensor, ...], weights: StepWeights) -> tuple[Tensor, ...]:
    """The definition: one step of one direction."""
    return (weights.candidate((gates_BH + weights.recurrent(carry[0])).tanh()),)


CELL = Cell(
    name="rnn",
    gates=1,
    carry=RNNCarry,
    step=step,
    torch_module="RNN",
    torch_arguments={"nonlinearity": "tanh"},
    torch_function="rnn_tanh",
    onnx=OnnxForm("RNN", order=(0,)),
    kept=3,  # the sum, its tanh, and the copy that is the output
)
