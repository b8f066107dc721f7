"""Metrics of labels: of one for each target (`Confusion`), of any number that may hold (`LabelDecisions`), and of labels in a row, by edit
distance (`LabelErrors`).

Ignored targets (-100, or NaN) add nothing; labels that train does not have (below -100) count as answered wrongly. A label of which any
number may hold counts as predicted if its probability is at least one half. Shapes: T time, B lane, K labels, V classes, L labels in a row,
N all leading dimensions flattened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from carrywave.data.batch import IGNORED
from carrywave.data.sequences import UNSEEN
from carrywave.model.heads.scoring import known
from carrywave.tasks.metrics.errors import Row

TOP = 5  # how many of the most likely labels may be right for the top-5 accuracy


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


class Confusion:
    """Accuracy and macro F1, from a confusion matrix; how often the target is among the `tops` likeliest classes, for each of `tops`.

    If the loss is `weighted`, by class or by target, the loss without weights is a metric beside it. `chosen`: outputs are not logits but
    the classes themselves, of which none is likelier than another, and which have no loss.
    """

    def __init__(
        self,
        classes: int,
        device: torch.device | str = "cpu",
        labels: Sequence[str] = (),
        tops: Sequence[int] = (),
        *,
        weighted: bool = False,
        chosen: bool = False,
    ) -> None:
        self.counts_KK = torch.zeros(classes, classes, dtype=torch.int64, device=device)  # [target, prediction]
        self.unseen_K = torch.zeros(classes, dtype=torch.int64, device=device)  # predictions for labels that train does not have
        self.labels = tuple(labels) or tuple(map(str, range(classes)))
        # With few labels, the right one is always among the `TOP` likeliest.
        self.tops = () if chosen else tuple(dict.fromkeys([*([TOP] if classes > TOP else []), *tops]))
        self.chosen = chosen
        self.hits_N = torch.zeros(len(self.tops), dtype=torch.int64, device=device)
        self.plain_loss = torch.zeros((), dtype=torch.float64, device=device) if weighted and not chosen else None

    def fits(self, out: object, target: Tensor) -> bool:
        """True if there is one logit per class, or the class itself."""
        return isinstance(out, Tensor) and out.shape == (target.shape if self.chosen else (*target.shape, self.counts_KK.shape[0]))

    @torch.no_grad()
    def update(self, out: Tensor, target: Tensor, sequence_B: Tensor | None = None, first_B: Tensor | None = None) -> None:
        """Add logits [B, K] or [T, B, K] and classes [B] or [T, B]."""
        real, unseen = (target > IGNORED).reshape(-1), (target <= UNSEEN).reshape(-1)
        decided = self.decided(out).reshape(-1)
        place = target.reshape(-1) * self.counts_KK.shape[0] + decided
        # Ignored targets add zero to the first cell: selecting the others would synchronise with the device to learn their number.
        self.counts_KK.view(-1).scatter_add_(0, torch.where(real, place, 0), real.to(torch.int64))
        self.unseen_K.scatter_add_(0, torch.where(unseen, decided, 0), unseen.to(torch.int64))
        if self.tops:
            rank = _rank(out, target).reshape(-1)
            for number, top in enumerate(self.tops):
                self.hits_N[number] += ((rank < top) & real).sum()
        if self.plain_loss is not None:
            logits_NK = out.reshape(-1, out.shape[-1]).to(torch.float64)
            self.plain_loss += cross_entropy(logits_NK, known(target).reshape(-1), ignore_index=IGNORED, reduction="sum")

    def decided(self, out: Tensor) -> Tensor:
        """Return the classes that outputs stand for."""
        return out.to(torch.int64) if self.chosen else out.argmax(-1)

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums."""
        sums = {"confusion": self.counts_KK, "unseen": self.unseen_K} | ({"top_hits": self.hits_N} if self.tops else {})
        return sums if self.plain_loss is None else sums | {"plain_loss": self.plain_loss}

    def values(self) -> dict[str, float]:
        """Return the loss without weights if there are any, accuracy, F1 averaged over the classes that occur as a target or a
        prediction, and the accuracies of `tops`. Labels that train does not have are one more class, which is never predicted.
        """
        counts_KK, unseen_K = self.counts_KK.cpu().to(torch.float64), self.unseen_K.cpu().to(torch.float64)
        hits_K, total = counts_KK.diagonal(), counts_KK.sum() + unseen_K.sum()
        hits_L = torch.cat([hits_K, hits_K.new_zeros(1)])
        occurrences_L = torch.cat([counts_KK.sum(0) + unseen_K + counts_KK.sum(1), unseen_K.sum()[None]])
        f1_L = (2.0 * hits_L / occurrences_L)[occurrences_L > 0]
        scores = {} if self.plain_loss is None else {"unweighted_loss": _share(self.plain_loss, counts_KK.sum())}
        scores |= {"accuracy": _share(hits_K.sum(), total), "macro_f1": f1_L.mean().item() if len(f1_L) else math.nan}
        shares = [_share(hits, total) for hits in self.hits_N]
        return scores | {f"top_{top}_accuracy": share for top, share in zip(self.tops, shares, strict=True)}

    def rows(self, by: str) -> list[Row]:
        """Return precision, recall and F1 by `label`."""
        counts_KK, unseen_K = self.counts_KK.cpu().to(torch.float64), self.unseen_K.cpu().to(torch.float64)
        rows: list[Row] = []
        for place, label in enumerate(self.labels):
            hits, predicted, targets = counts_KK[place, place], counts_KK[:, place].sum() + unseen_K[place], counts_KK[place].sum()
            scores = {"precision": _share(hits, predicted), "recall": _share(hits, targets), "f1": _share(2 * hits, predicted + targets)}
            rows.append({"label": label, **scores, "targets": int(targets), "predicted": int(predicted)})
        return rows


def _rank(out: Tensor, target: Tensor) -> Tensor:
    """How many classes come before the target: those of a larger logit, and of equal ones those with a lower number.

    Counted from behind, so that a target whose logit is NaN comes last.
    """
    place = target.clamp(min=0).unsqueeze(-1)
    logit = out.gather(-1, place)
    later = torch.arange(out.shape[-1], device=out.device) > place
    return out.shape[-1] - 1 - ((out < logit) | ((out == logit) & later)).sum(-1)


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


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _share(part: Tensor, whole: Tensor) -> float:
    return _ratio(part.item(), whole.item())
