"""captum's attributions go through `cw.LSTM`: integrated gradients add up to what the output differs from that of the baseline."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw

attr = pytest.importorskip("captum.attr")


def test_integrated_gradients_add_up() -> None:
    torch.manual_seed(0)
    lstm, out = cw.LSTM(3, 8, 2, batch_first=True).double(), nn.Linear(8, 1).double()

    def forward(x: Tensor) -> Tensor:
        last: Tensor = out(lstm(x)[0][:, -1])[:, 0]
        return last

    x = torch.randn(4, 6, 3, dtype=torch.float64)
    parts = attr.IntegratedGradients(forward).attribute(x, n_steps=200)
    torch.testing.assert_close(parts.sum((1, 2)), forward(x) - forward(torch.zeros_like(x)), rtol=1e-4, atol=1e-6)  # of a sum of 200 steps
