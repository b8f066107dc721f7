"""The plain cell of torch.nn.RNN with ReLU: h' = relu(W x + U h + b). `cw.RNN(nonlinearity="relu")` has it.

Shapes: B lane, H hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from carrywave.cells import rnn
from carrywave.cells.cell import OnnxForm, StepWeights

if TYPE_CHECKING:
    from torch import Tensor


def step(gates_BH: Tensor, carry: tuple[Tensor, ...], weights: StepWeights) -> tuple[Tensor, ...]:
    """The definition: one step of one direction."""
    return (weights.candidate((gates_BH + weights.recurrent(carry[0])).relu()),)


CELL = replace(
    rnn.CELL,
    name="rnn_relu",
    step=step,
    torch_arguments={"nonlinearity": "relu"},
    torch_function="rnn_relu",
    onnx=OnnxForm("RNN", order=(0,), attributes={"activations": ("Relu",)}),
)
