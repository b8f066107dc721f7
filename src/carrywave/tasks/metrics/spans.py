"""Precision, recall and F1 of spans, as conlleval counts them: a span is right if its type, its first step and its last are.

What begins and ends a span is conlleval's, too, for BIO, IOB1 and BIOES alike, so that labels which break their scheme still have spans: an
I-X after O begins one. Steps without a target are left out of a sequence, as those of the pieces of a word usually are.

A span may be cut by a chunk, a window or a micro-batch, so the labels of all steps are kept until the part has been read, each in its
place: those of several workers add up to the whole. Shapes: T time, B lane, N labels, R rows of a part, Y types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.data.batch import IGNORED
from carrywave.data.sequences import UNSEEN, UNSEEN_INSIDE, Sequences
from carrywave.data.text.tag_scheme import OUTSIDE, Tag, tags_of
from carrywave.tasks.metrics.errors import Row
from carrywave.tasks.metrics.labels import Confusion

Ints = NDArray[np.int64]
NO_TYPE = "span"  # the name of the type of labels B, I and O
NOT_IN_TRAIN = "not in train"  # the type of spans that are written with labels which train does not have


class Spans(NamedTuple):
    """Spans in order: their first and last row, and the number of their type."""

    first: Ints
    last: Ints
    type: Ints


def spans_of(tags_R: Ints, tags: Sequence[Tag], types: Sequence[str]) -> Spans:
    """The spans of labels in a row, the last of which is O."""
    prefix_N = np.array([tag.prefix for tag in tags])
    type_N = np.array([types.index(tag.type) if tag.prefix != OUTSIDE else -1 for tag in tags], np.int64)
    now, kind = prefix_N[tags_R], type_N[tags_R]
    before, kind_before = np.concatenate([[OUTSIDE], now[:-1]]), np.concatenate([[-1], kind[:-1]])
    inside, apart = now != OUTSIDE, kind != kind_before
    goes_on = np.isin(now, ("I", "E")) & np.isin(before, ("B", "I")) & ~apart
    begins, ends = inside & ~goes_on, (before != OUTSIDE) & ~goes_on
    first = np.flatnonzero(begins)
    return Spans(first, np.flatnonzero(ends) - 1, kind[first])


class TagConfusion(Confusion):
    """As `Confusion`, for labels that write spans: F1 of spans beside it, over all types and by type."""

    def __init__(
        self,
        labels: Sequence[str],
        data: Sequences,
        device: torch.device | str = "cpu",
        tops: Sequence[int] = (),
        *,
        weighted: bool = False,
        chosen: bool = False,
    ) -> None:
        super().__init__(len(labels), device, labels, tops, weighted=weighted, chosen=chosen)
        tags = tags_of(labels)
        assert tags is not None
        # The last two stand for labels that train does not have, whose spans are never found.
        self.tags = (*tags, Tag("B", NOT_IN_TRAIN), Tag("I", NOT_IN_TRAIN))
        self.types = tuple(dict.fromkeys(tag.type for tag in self.tags if tag.prefix != OUTSIDE))
        ends = np.cumsum(data.lengths)
        self._starts = torch.from_numpy(ends - data.lengths).to(device)
        rows = int(data.lengths.sum())
        # One more than the label, 0 where there is none: of targets and predictions. The last row is of steps that do not count.
        self.seen_2R = torch.zeros(2, rows + 1, dtype=torch.int32, device=device)
        begins = np.zeros(rows + 1, np.bool_)
        begins[ends] = True
        if data.resets is not None:
            for start, length, to in zip(data.starts.tolist(), data.lengths.tolist(), (ends - data.lengths).tolist(), strict=True):
                begins[to : to + length] |= np.asarray(data.resets[start : start + length])
        self._begins = begins  # rows before which a sequence has ended

    @torch.no_grad()
    def update(self, out: Tensor, target: Tensor, sequence_B: Tensor | None = None, first_B: Tensor | None = None) -> None:
        """Add logits [T, B, N], or labels [T, B], and targets [T, B]."""
        super().update(out, target, sequence_B, first_B)
        assert sequence_B is not None
        assert first_B is not None
        step_T1 = torch.arange(target.shape[0], device=target.device)[:, None]
        rows_TB = self._starts[sequence_B.clamp(min=0)] + first_B + step_T1
        known = len(self.labels)
        target = torch.where(target == UNSEEN, known, torch.where(target == UNSEEN_INSIDE, known + 1, target))
        real_TB = (target != IGNORED) & (sequence_B >= 0)
        rows_TB = torch.where(real_TB, rows_TB, self.seen_2R.shape[1] - 1)
        for seen_R, labels_TB in zip(self.seen_2R, (target, self.decided(out)), strict=True):
            seen_R[rows_TB.reshape(-1)] = torch.where(real_TB, labels_TB + 1, 0).reshape(-1).to(torch.int32)

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums."""
        return super().tensors() | {"seen": self.seen_2R}

    def values(self) -> dict[str, float]:
        """Return what `Confusion` does, and precision, recall and F1 of all spans; 0 if there are none, as conlleval has it."""
        right, wanted, predicted = self.counts().sum(1).tolist()
        scores = {
            "span_precision": _ratio(right, predicted),
            "span_recall": _ratio(right, wanted),
            "span_f1": _ratio(2 * right, wanted + predicted),
        }
        return super().values() | scores

    def rows(self, by: str) -> list[Row]:
        """Return precision, recall and F1 by `label`, or of spans by `type`."""
        if by != "type":
            return super().rows(by)
        return [
            {
                "type": kind or NO_TYPE,
                **{"precision": _ratio(right, predicted), "recall": _ratio(right, wanted), "f1": _ratio(2 * right, wanted + predicted)},
                **{"targets": wanted, "predicted": predicted},
            }
            for kind, right, wanted, predicted in zip(self.types, *self.counts().tolist(), strict=False)
        ]

    def counts(self) -> Ints:
        """How many spans of each type are right, wanted and predicted [3, Y]; the last type, `NOT_IN_TRAIN`, only if there are some."""
        seen_2R = self.seen_2R.cpu().numpy().astype(np.int64) - 1
        known_R = seen_2R[0] >= 0
        # Between sequences, and after the last, there is an O, which ends what is open; so that labels are one row of them.
        outside = len(self.tags)
        tags = (*self.tags, Tag(OUTSIDE))
        place_R = np.cumsum(known_R) - known_R  # among those that are known
        stops = np.unique(place_R[self._begins])
        wanted, predicted = (
            spans_of(np.append(np.insert(seen_R[known_R], stops, outside), outside), tags, self.types) for seen_R in seen_2R
        )
        _, one, other = np.intersect1d(wanted.first, predicted.first, assume_unique=True, return_indices=True)
        same = (wanted.last[one] == predicted.last[other]) & (wanted.type[one] == predicted.type[other])
        kinds = (wanted.type[one][same], wanted.type, predicted.type)
        counts = np.stack([np.bincount(kind, minlength=len(self.types)) for kind in kinds])
        return counts if counts[1, -1] else counts[:, :-1]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
