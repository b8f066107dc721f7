"""An adaptive softmax (Grave et al. 2017): frequent classes have logits of their own, the others are reached through clusters.

The classes are sorted by decreasing frequency. Those before the first cutoff, and one class for each cluster, are scored at every step; the
classes of a cluster only at steps whose target is in it, from a narrower projection of the output. This is another model than a full
softmax, and cheaper: most steps never meet the rare classes, which are most of the vocabulary.

The parameters, their names and the loss are those of torch's AdaptiveLogSoftmaxWithLoss, summed instead of averaged.

Shapes: T time, B lane, N = T B, W width of the last layer, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from carrywave.errors import UserError
from carrywave.kernels import cross_entropy
from carrywave.kernels.deferred_gradients import linear
from carrywave.model.heads.scoring import IGNORED, at_least_float32, count_of, score_classes, weighted_targets


class AdaptiveSoftmax(nn.Module):
    """Cross entropy over classes at every step. `cutoffs` are the first classes of the clusters; the projection of each cluster is narrower
    than the one before it by the factor `divide`.
    """

    pooled = False
    picks_rows = True  # how much it computes depends on the targets, so that a CUDA graph cannot hold it

    def __init__(self, width: int, classes: int, cutoffs: Sequence[int], divide: float = 4.0) -> None:
        super().__init__()
        if not cutoffs or any(low >= high for low, high in pairwise((0, *cutoffs, classes))):
            raise UserError(f"the cutoffs {list(cutoffs)} do not divide {classes} classes; list increasing numbers from 1 to {classes - 1}")
        widths = narrow_widths(width, len(cutoffs), divide)
        if widths[-1] < 1:
            raise UserError(
                f"{len(cutoffs)} clusters cannot each be {divide:g} times narrower than the last, from {width}; use fewer cutoffs"
            )
        self.width, self.classes, self.cutoffs = width, classes, (*cutoffs, classes)
        self.head = nn.Linear(width, self.cutoffs[0] + len(cutoffs), bias=False)
        self.tail = nn.ModuleList(
            nn.Sequential(nn.Linear(width, narrow, bias=False), nn.Linear(narrow, high - low, bias=False))
            for narrow, (low, high) in zip(widths, pairwise(self.cutoffs), strict=True)
        )

    def forward(self, y_TBW: Tensor) -> Tensor:
        """Log-probabilities of all classes [T, B, V]."""
        first = self.cutoffs[0]
        scores = functional.log_softmax(at_least_float32(linear(y_TBW, self.head.weight)), dim=-1)
        parts = [scores[..., :first]]
        for number in range(len(self.tail)):
            in_cluster = functional.log_softmax(at_least_float32(self._cluster(number, y_TBW)), dim=-1)
            parts.append(in_cluster + scores[..., first + number, None])
        return torch.cat(parts, dim=-1)

    def score(self, out_TBV: Tensor, target_TB: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss sum and count, from log-probabilities: they are logits whose exponentials add up to one."""
        return score_classes(out_TBV, target_TB, None, weights=weights)

    def loss(self, y_TBW: Tensor, target_TB: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss sum and count, from the last layer's output."""
        y_NW, target_N = y_TBW.reshape(-1, self.width), weighted_targets(target_TB, weights).reshape(-1)
        weights_N = None if weights is None else weights.reshape(-1)
        first, label_N = self.cutoffs[0], target_N
        for number, low in enumerate(self.cutoffs[:-1]):
            label_N = torch.where(target_N >= low, first + number, label_N)
        total = cross_entropy.summed(linear(y_NW, self.head.weight), label_N, IGNORED, weights_N=weights_N)
        for number, (low, high) in enumerate(pairwise(self.cutoffs)):
            # Also for no rows at all: the weights then have a gradient of zero under every plan, not none under some.
            rows_n = ((target_N >= low) & (target_N < high)).nonzero()[:, 0]
            weights_n = None if weights_N is None else weights_N[rows_n]
            total = total + cross_entropy.summed(self._cluster(number, y_NW[rows_n]), target_N[rows_n] - low, IGNORED, weights_N=weights_n)
        return total, count_of(target_N != IGNORED, weights_N, total.dtype)

    def _cluster(self, number: int, y: Tensor) -> Tensor:
        """The logits within a cluster."""
        narrow, wide = self.tail[number].children()
        return linear(linear(y, narrow.weight), wide.weight)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"{self.width}, {self.classes}, cutoffs={list(self.cutoffs[:-1])}"


def narrow_widths(width: int, clusters: int, divide: float) -> list[int]:
    """The width of each cluster's projection, as torch divides it."""
    return [int(width // divide ** (number + 1)) for number in range(clusters)]
