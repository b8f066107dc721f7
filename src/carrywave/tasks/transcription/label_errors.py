"""Metrics of transcriptions: the edit distance from the likeliest class of each step to the labels, and how many are entirely right.

It is computed for all lanes at once, on the device. Shapes: T time, B lane, V classes, L labels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from carrywave.data.batch import IGNORED
from carrywave.tasks.label_metrics import Row


class LabelErrors:
    """Insertions, deletions and substitutions for each label; the share of sequences with any."""

    def __init__(self, labels: int, device: torch.device | str = "cpu") -> None:
        self.blank = labels
        self.sums_4 = torch.zeros(4, dtype=torch.int64, device=device)  # edits, labels, sequences with edits, sequences

    def fits(self, out: object, target: Tensor) -> bool:
        """True if there are log-probabilities of each label and the blank for the steps of each lane."""
        return isinstance(out, Tensor) and out.dim() == 3 and out.shape[1] == len(target) and out.shape[2] == self.blank + 1

    @torch.no_grad()
    def update(self, out: Tensor, target: Tensor, sequence_B: Tensor | None = None, first_B: Tensor | None = None) -> None:
        """Add log-probabilities [T, B, V] with labels [B, L], as the head `Ctc` has them."""
        real_B = target[:, 0] != IGNORED
        edits_B = torch.where(real_B, edit_distances(out.argmax(-1), target, self.blank), 0)
        labels_B = torch.where(real_B, (target >= 0).sum(-1), 0)
        self.sums_4 += torch.stack([edits_B.sum(), labels_B.sum(), (edits_B > 0).sum(), real_B.sum()])

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums."""
        return {"edits": self.sums_4}

    def values(self) -> dict[str, float]:
        """Return the label error rate, which may exceed 1, and the share of sequences that are not entirely right."""
        edits, labels, wrong, sequences = self.sums_4.tolist()
        return {
            "label_error": edits / labels if labels else math.nan,
            "sequence_error": wrong / sequences if sequences else math.nan,
        }

    def rows(self, by: str) -> list[Row]:
        """Return nothing: these metrics have no breakdown."""
        return []


def edit_distances(best_TB: Tensor, target_BL: Tensor, blank: int) -> Tensor:
    """[B]: the fewest insertions, deletions and substitutions from the collapsed classes of each lane to its labels."""
    before_TB = torch.cat([torch.full_like(best_TB[:1], blank), best_TB[:-1]])
    emits_TB = (best_TB != blank) & (best_TB != before_TB)
    count_B = (target_BL >= 0).sum(-1)
    place_P = torch.arange(target_BL.shape[1] + 1, device=target_BL.device)
    # A row of the table of distances: from what was emitted so far to each beginning of the labels.
    row_BP = place_P.expand(len(target_BL), -1)
    for best_B, emits_B in zip(best_TB, emits_TB, strict=True):
        deleted_BP = row_BP + 1
        matched_BL = row_BP[:, :-1] + (target_BL != best_B[:, None])
        reached_BP = torch.cat([deleted_BP[:, :1], torch.minimum(deleted_BP[:, 1:], matched_BL)], dim=1)
        # Insertions follow each other: the least over all earlier places, plus the way from there.
        reached_BP = (reached_BP - place_P).cummin(-1).values + place_P
        row_BP = torch.where(emits_B[:, None], reached_BP, row_BP)
    return row_BP.gather(1, count_B[:, None])[:, 0]
