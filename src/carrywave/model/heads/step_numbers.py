"""The head of regression at every step.

Shapes: T time, B lane, W width, C numbers to estimate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from carrywave.errors import UserError
from carrywave.model.heads.scoring import count_of, keyword, numbers, score_numbers

LOSSES = ("mse", "mae", "nse")


class StepNumbers(nn.Module):
    """Numbers at each step. A target that is missing (NaN) adds nothing to the loss, nor to the count.

    With the loss `nse`, targets are [T, B, C, 2]: each number with the weight of its squared error, one over the squared deviation of its
    series. Its mean over all targets is 1 - NSE, up to what is added to the deviations.
    """

    pooled = False

    def __init__(self, width: int, outputs: int, loss: str = "mse") -> None:
        super().__init__()
        if loss not in LOSSES:
            raise UserError(f"loss={loss} is unknown; use mse, mae or nse")
        self.outputs = outputs
        self.kind = loss
        self.weight = nn.Parameter(torch.empty(outputs, width).uniform_(-(width**-0.5), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, y_TBW: Tensor) -> Tensor:
        """The numbers [T, B, C] of each step."""
        return numbers(y_TBW, self.weight, self.bias)

    def score(self, out_TBC: Tensor, target: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss sum over the targets that are present, and their number."""
        target_TBC, share_TBC = target.unbind(-1) if self.kind == "nse" else (target, None)
        errors_TBC, real_TBC = score_numbers(out_TBC, target_TBC, "mae" if self.kind == "mae" else "mse", weights)
        if share_TBC is not None:
            errors_TBC = errors_TBC * torch.where(real_TBC, share_TBC.to(errors_TBC.dtype), 0.0)
        return errors_TBC.sum(), count_of(real_TBC, weights, errors_TBC.dtype)

    def loss(self, y_TBW: Tensor, target: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss sum and count, from the last layer's output."""
        return self.score(self(y_TBW), target, **keyword(weights))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.outputs}, loss={self.kind!r}"
