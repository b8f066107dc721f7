"""Metrics of targets of which any number may hold (`data.multi_label`): F1 over all decisions and over labels, exact matches.

A label counts as predicted if its probability is at least one half. A missing target (NaN) adds nothing.

Shapes: T time, B lane, K labels, N all leading dimensions flattened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

Row = dict[str, str | int | float]


class LabelDecisions:
    """How often each label was wanted, predicted, and both; how often all labels of a step or sequence were right.

    If the loss is `weighted`, by label or by target, the loss without weights is a metric beside it.
    """

    def __init__(
        self,
        classes: int,
        device: torch.device | str = "cpu",
        labels: Sequence[str] = (),
        *,
        weighted: bool = False,
    ) -> None:
        self.labels = tuple(labels) or tuple(map(str, range(classes)))
        # The rows are: targets that are known, those that are 1, decisions for a label, and those of them that are right.
        self.counts_4K = torch.zeros(4, classes, dtype=torch.int64, device=device)
        self.whole_2 = torch.zeros(2, dtype=torch.int64, device=device)  # steps or sequences, and those with every label right
        self.plain_loss = torch.zeros((), dtype=torch.float64, device=device) if weighted else None

    def fits(self, out: object, target: Tensor) -> bool:
        """True if there is one logit per label."""
        return isinstance(out, Tensor) and out.shape == target.shape and out.shape[-1] == len(self.labels)

    @torch.no_grad()
    def update(self, out: Tensor, target: Tensor, sequence_B: Tensor | None = None, first_B: Tensor | None = None) -> None:
        """Add logits and targets, [B, K] or [T, B, K]."""
        out_NK, target_NK = (each.reshape(-1, each.shape[-1]) for each in (out, target))
        real_NK = target_NK.isfinite()
        wanted_NK, chosen_NK = (target_NK > 0.5) & real_NK, (out_NK >= 0) & real_NK
        self.counts_4K += torch.stack([each.sum(0) for each in (real_NK, wanted_NK, chosen_NK, wanted_NK & chosen_NK)])
        real_N = real_NK.any(-1)
        self.whole_2 += torch.stack([real_N.sum(), (real_N & (wanted_NK == chosen_NK).all(-1)).sum()])
        if self.plain_loss is not None:
            errors = binary_cross_entropy_with_logits(out_NK.to(torch.float64), wanted_NK.to(torch.float64), reduction="none")
            self.plain_loss += torch.where(real_NK, errors, 0.0).sum()

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums."""
        sums = {"decisions": self.counts_4K, "whole": self.whole_2}
        return sums if self.plain_loss is None else sums | {"plain_loss": self.plain_loss}

    def values(self) -> dict[str, float]:
        """Return the loss without weights if there are any; F1 over all decisions (micro) and averaged over the labels that occur as a
        target or a prediction (macro); the share of steps or sequences with every label right; and, as `naive_loss`, the loss of anyone
        who knows nothing but how often each label occurs here.
        """
        targets_K, wanted_K, chosen_K, right_K = self.counts_4K.cpu().to(torch.float64)
        total, exact = self.whole_2.tolist()
        f1_K = (2.0 * right_K / (wanted_K + chosen_K))[wanted_K + chosen_K > 0]
        share_K = wanted_K / targets_K.clamp(min=1.0)
        entropy_K = -(torch.xlogy(share_K, share_K) + torch.xlogy(1.0 - share_K, 1.0 - share_K))
        plain = {} if self.plain_loss is None else {"unweighted_loss": _ratio(self.plain_loss.item(), total)}
        return plain | {
            "micro_f1": _ratio(2.0 * right_K.sum().item(), (wanted_K + chosen_K).sum().item()),
            "macro_f1": f1_K.mean().item() if len(f1_K) else math.nan,
            "exact_match": _ratio(exact, total),
            "naive_loss": _ratio((targets_K * entropy_K).sum().item(), total),
        }

    def rows(self, by: str) -> list[Row]:
        """Return precision, recall and F1 by `label`."""
        rows: list[Row] = []
        for label, (_, wanted, chosen, right) in zip(self.labels, self.counts_4K.T.tolist(), strict=True):
            scores = {"precision": _ratio(right, chosen), "recall": _ratio(right, wanted), "f1": _ratio(2 * right, wanted + chosen)}
            rows.append({"label": label, **scores, "targets": wanted, "predicted": chosen})
        return rows


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
