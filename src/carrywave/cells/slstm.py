"""The sLSTM of xLSTM (Beck et al., arXiv 2405.04517): an LSTM whose input gate is exponential, so that it can revise what it has stored.
Its gates are in the order input, forget, cell, output.

The memory c is a sum of candidates, each weighted by its input gate and by all forget gates since; the normaliser n is the sum of these
weights, and the output gate opens on the mean, c / n. Both are kept divided by exp(m), where the stabiliser m is about the logarithm of the
largest weight: so nothing overflows, and m cancels out. Of the two forget gates in the paper, this is the sigmoid. Heads (`num_heads`) are
the blocks of its recurrent matrix.

Shapes: B lane, H hidden, G = 4H.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from carrywave.cells.cell import Cell, StepWeights

if TYPE_CHECKING:
    from torch import Tensor

LEAST = 1e-30  # of the normaliser: a lane that has stored nothing yet divides 0 by it


class SLSTMCarry(NamedTuple):
    """Output, memory, normaliser and stabiliser."""

    h: Tensor
    c: Tensor
    n: Tensor
    m: Tensor


def step(gates_BG: Tensor, carry: tuple[Tensor, ...], weights: StepWeights) -> tuple[Tensor, ...]:
    """The definition: one step of one direction."""
    h_BH, c_BH, n_BH, m_BH = carry
    input_BH, forget_BH, cell_BH, output_BH = (gates_BG + weights.recurrent(h_BH)).chunk(4, dim=-1)
    kept_BH = m_BH - (-forget_BH).logaddexp(forget_BH.new_zeros(()))  # the logarithm of the sigmoid, and of the scale before this step
    next_m_BH = kept_BH.maximum(input_BH)
    keeps_BH, adds_BH = (kept_BH - next_m_BH).exp(), (input_BH - next_m_BH).exp()
    next_c_BH = keeps_BH * c_BH + adds_BH * weights.candidate(cell_BH.tanh())
    next_n_BH = keeps_BH * n_BH + adds_BH
    mean_BH = next_c_BH / next_n_BH.clamp_min(LEAST)
    return output_BH.sigmoid() * weights.normed(mean_BH), next_c_BH, next_n_BH, next_m_BH


CELL = Cell(
    name="slstm",
    gates=4,
    carry=SLSTMCarry,
    step=step,
    memory=True,
    free=("h",),  # the others are one number in three parts
    forget_gate=1,
    kernels=True,
    kept=18,  # gates, weights, memory, normaliser and stabiliser, and what autograd keeps between them
    wide=True,
)
