"""Heads with one result per sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from carrywave.errors import UserError
from carrywave.kernels.deferred_gradients import linear
from carrywave.model.heads.scoring import check_loss, class_weights, count_of, keyword, numbers, score_classes, score_labels, score_numbers
from carrywave.model.over_time import pooling

Accumulator = tuple[Tensor, Tensor]  # (what was seen of each lane [B, R], as `pooling` keeps it; steps so far [B] int64)


class Pooled(nn.Module):
    """Base of the pooled heads: a linear layer over what `pooling` makes of all real steps.

    With two directions, the last step is the forward half at the last real step and the reverse half at the first one, where
    the reverse direction ends.
    """

    pooled = True

    def __init__(self, width: int, outputs: int, pool: str, bidirectional: bool) -> None:
        super().__init__()
        if bidirectional and width % 2:
            raise UserError(f"a bidirectional head has width {width}; use an even width")
        self.width = width
        self.pooling = pooling.check_pool(pool)
        self.bidirectional = bidirectional
        read = pooling.result_width(pool, width)
        self.weight = nn.Parameter(torch.empty(outputs, read).uniform_(-(read**-0.5), read**-0.5))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.query = nn.Parameter(torch.zeros(width)) if pool == "attention" else None  # at zero, attention is the mean

    @property
    def row_width(self) -> int:
        """The width of the accumulator's first part."""
        return pooling.row_width(self.pooling, self.width)

    def start(self, lanes: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Accumulator:
        """The accumulator before the first step, in float32 or wider so that long sums keep their small terms."""
        dtype = torch.promote_types(dtype or self.weight.dtype, torch.float32)
        device = device or self.weight.device
        return torch.zeros(lanes, self.row_width, dtype=dtype, device=device), torch.zeros(lanes, dtype=torch.int64, device=device)

    def pool(self, y_TBW: Tensor, lengths_B: Tensor, acc: Accumulator) -> Accumulator:
        """The accumulator after a chunk in which each lane has `lengths_B` real steps."""
        seen_BR, count_B = acc
        y_TBW = y_TBW.to(seen_BR.dtype)
        seen_BR = pooling.add(self.pooling, y_TBW, lengths_B, seen_BR, count_B, two_ways=self.bidirectional, query_W=self.query)
        return seen_BR, count_B + lengths_B

    def over_steps(self, acc: Accumulator) -> Tensor:
        """What was pooled of each lane."""
        return pooling.result(self.pooling, *acc).to(self.weight.dtype)

    def forward(self, acc: Accumulator, beside_BV: Tensor | None = None) -> Tensor:
        """One result per lane; `beside` [B, V + 1]: what a linear part says, and in the last column how much the network weighs."""
        out_BV = self.found(acc)
        return out_BV if beside_BV is None else self.mixed(out_BV, beside_BV[:, :-1], beside_BV[:, -1:])

    def found(self, acc: Accumulator) -> Tensor:
        """What the network says of each lane."""
        return linear(self.over_steps(acc), self.weight, self.bias)

    def mixed(self, out_BV: Tensor, linear_BV: Tensor, share_B1: Tensor) -> Tensor:
        """The network's result mixed with that of a linear part."""
        return torch.lerp(linear_BV, out_BV, share_B1)

    def extra_repr(self) -> str:
        return f"{self.width}, {self.weight.shape[0]}, pool={self.pooling!r}, bidirectional={self.bidirectional}"


class PooledSoftmax(Pooled):
    """Cross entropy over classes, one label per sequence. `label_smoothing`: as in `Softmax`."""

    def __init__(
        self,
        width: int,
        classes: int,
        pool: str = "last",
        weights: Tensor | None = None,
        *,
        bidirectional: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(width, classes, pool, bidirectional)
        self.classes = classes
        self.label_smoothing = label_smoothing
        self.weights: Tensor | None
        self.register_buffer("weights", class_weights(weights, classes))

    def score(self, logits_BV: Tensor, label_B: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss sum and count."""
        return score_classes(logits_BV, label_B, self.weights, self.label_smoothing if self.training else 0.0, weights)

    def mixed(self, out_BV: Tensor, linear_BV: Tensor, share_B1: Tensor) -> Tensor:
        """The logarithms of probabilities, of which the linear part gives its own, mixed."""
        return torch.lerp(linear_BV, out_BV.log_softmax(1), share_B1)

    def loss(
        self, acc: Accumulator, label_B: Tensor, beside_BV: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss sum and count, from the accumulator."""
        return self.score(self(acc, beside_BV), label_B, **keyword(weights))


class PooledSigmoid(PooledSoftmax):
    """Labels of which any number may hold for a sequence: as `Sigmoid` is to `Softmax`."""

    def mixed(self, out_BV: Tensor, linear_BV: Tensor, share_B1: Tensor) -> Tensor:
        """The log odds of labels, of which the linear part gives its own, mixed."""
        return torch.lerp(linear_BV, out_BV, share_B1)

    def score(self, logits_BV: Tensor, target_BV: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss sum and the number of sequences with a target."""
        return score_labels(logits_BV, target_BV, self.weights, self.label_smoothing if self.training else 0.0, weights)


class PooledNumbers(Pooled):
    """A vector of numbers per sequence; a lane's error is the mean over its numbers, and it counts only if all targets are present."""

    def __init__(self, width: int, outputs: int, pool: str = "last", loss: str = "mse", *, bidirectional: bool = False) -> None:
        super().__init__(width, outputs, pool, bidirectional)
        self.outputs = outputs
        self.kind = check_loss(loss)

    def found(self, acc: Accumulator) -> Tensor:
        """The numbers of each lane."""
        return numbers(self.over_steps(acc), self.weight, self.bias)

    def score(self, out_BC: Tensor, target_BC: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss sum and count."""
        whole_B1 = torch.isfinite(target_BC).all(dim=-1, keepdim=True)
        errors_BC, real_BC = score_numbers(out_BC, torch.where(whole_B1, target_BC, torch.nan), self.kind, weights)
        return errors_BC.sum() / self.outputs, count_of(real_BC[:, 0], weights, errors_BC.dtype)

    def loss(
        self, acc: Accumulator, target_BC: Tensor, beside_BC: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss sum and count, from the accumulator."""
        return self.score(self(acc, beside_BC), target_BC, **keyword(weights))
