"""Heads that choose among classes at every step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from carrywave.errors import UserError
from carrywave.kernels.deferred_gradients import linear
from carrywave.model.heads.scoring import class_weights, keyword, score_classes, score_labels


class Softmax(nn.Module):
    """Cross entropy over classes at every step. `tied` is the embedding's matrix, which is then shared.

    `label_smoothing`: of the loss in training, as torch defines it; evaluation has none.
    """

    pooled = False

    def __init__(
        self,
        width: int,
        classes: int,
        tied: nn.Parameter | None = None,
        bias: bool = True,
        weights: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if tied is not None and tied.shape != (classes, width):
            raise UserError(
                f"a tied matrix of shape {list(tied.shape)} does not match {classes} classes x width {width}; use one of that shape"
            )
        self.width = width
        self.classes = classes
        self.label_smoothing = label_smoothing
        self.weight = (
            nn.Parameter(torch.empty(classes, width, device=device).uniform_(-(width**-0.5), width**-0.5)) if tied is None else tied
        )
        self.bias = nn.Parameter(torch.zeros(classes, device=device)) if bias else None
        self.weights: Tensor | None
        self.register_buffer("weights", class_weights(weights, classes))

    def forward(self, y_TBW: Tensor) -> Tensor:
        """Logits [T, B, V]."""
        return linear(y_TBW, self.weight, self.bias)

    def score(self, logits_TBV: Tensor, target_TB: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss sum and count."""
        return score_classes(logits_TBV, target_TB, self.weights, self.label_smoothing if self.training else 0.0, weights)

    def loss(self, y_TBW: Tensor, target_TB: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss sum and count, from the last layer's output."""
        return self.score(self(y_TBW), target_TB, **keyword(weights))

    def extra_repr(self) -> str:
        return f"{self.width}, {self.classes}"


class Sigmoid(Softmax):
    """Labels of which any number may hold at a step, each with its binary cross entropy; as `Softmax` in everything but the loss.

    Targets are 0 or 1, NaN where one is missing. The loss of a step is the sum over its labels, and steps are what is counted.
    """

    def __init__(self, width: int, classes: int, weights: Tensor | None = None, *, label_smoothing: float = 0.0) -> None:
        super().__init__(width, classes, weights=weights, label_smoothing=label_smoothing)

    def score(self, logits_TBV: Tensor, target_TBV: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss sum and the number of steps with a target."""
        return score_labels(logits_TBV, target_TBV, self.weights, self.label_smoothing if self.training else 0.0, weights)


def tie(head: Softmax, embedding: nn.Module) -> None:
    """Make head and embedding share one matrix: the same Parameter object."""
    weight = embedding.weight
    if not isinstance(weight, nn.Parameter) or weight.shape != head.weight.shape:
        shape = list(weight.shape) if isinstance(weight, Tensor) else None
        raise UserError(f"the embedding matrix {shape} cannot be tied to the softmax matrix {list(head.weight.shape)}; use equal widths")
    head.weight = weight
