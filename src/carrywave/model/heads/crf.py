"""A conditional random field: chooses the labels of a whole sequence together, by scores of each label and of each pair of neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from carrywave.data.text.tag_scheme import Allowed, scheme_of
from carrywave.errors import UserError
from carrywave.kernels.crf import dispatch
from carrywave.kernels.crf.definition import Chain
from carrywave.model.heads.scoring import IGNORED, numbers
from carrywave.model.heads.word_scores import WordScores


class CRF(nn.Module):
    """The best path of labels for each sequence, by a linear layer over the steps and a score for each pair of neighbouring labels.

    `labels`: their names, or how many there are. If the names write spans (B-X, I-X, O), transitions that `scheme` forbids are off, in
    training and in what is predicted; `scheme` is bio, bioes, none or auto, which goes by the names.

    The loss of a sequence is the negative logarithm of the probability of its labels. A step without a label (-100) may have any: the
    probabilities of all of them are added up. What is counted are steps with a label, as with `Softmax`, not sequences: the mean loss is
    in nats for each label, so that it can be compared with a tagger's without a CRF, and long sequences weigh as much as they do there.

    With `words`, their scores are added to those of the linear layer, and the head reads the codes of characters [T, B, L, 1] too.
    """

    pooled = False
    reads_whole = True

    def __init__(self, width: int, labels: int | Sequence[str], scheme: str = "auto", words: WordScores | None = None) -> None:
        super().__init__()
        names = tuple(map(str, range(labels))) if isinstance(labels, int) else tuple(labels)
        if not names:
            raise UserError("a CRF needs at least one label; pass their names or their number")
        self.width, self.classes = width, len(names)
        self.scheme = scheme_of(names, scheme)
        self.words = words
        self.past_steps = 0 if words is None else 1  # of the inputs, that the head reads beside each step
        self.weight = nn.Parameter(torch.empty(self.classes, width).uniform_(-(width**-0.5), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(self.classes))
        self.start = nn.Parameter(torch.zeros(self.classes))
        self.transitions = nn.Parameter(torch.zeros(self.classes, self.classes))  # [from, to]
        self.end = nn.Parameter(torch.zeros(self.classes))
        # Not saved: they follow from the labels.
        for name, allowed in Allowed.by(self.scheme, names)._asdict().items():
            self.register_buffer(name, None if self.scheme is None else torch.from_numpy(allowed), persistent=False)

    @property
    def chain(self) -> Chain:
        """The scores of first labels, pairs and last labels, -inf where the scheme forbids them."""
        given = (self.start, self.starts_N), (self.transitions, self.pairs_NN), (self.end, self.ends_N)
        return Chain(*(score if allowed is None else torch.where(allowed, score, -torch.inf) for score, allowed in given))  # type: ignore[arg-type]

    def emissions(self, y_TBW: Tensor, lengths_B: Tensor, codes_TBL1: Tensor | None = None) -> Tensor:
        """The score of each label at each step [T, B, V], in the dtype of the weights under autocast too: they are added up over steps."""
        scores_TBV = numbers(y_TBW, self.weight, self.bias)
        return scores_TBV if self.words is None or codes_TBL1 is None else scores_TBV + self.words(codes_TBL1.squeeze(-1), lengths_B)

    def forward(self, y_TBW: Tensor, lengths_B: Tensor, codes_TBL1: Tensor | None = None) -> Tensor:
        """The labels of the best path of each lane [T, B], -100 after its end."""
        return dispatch.best_paths(self.emissions(y_TBW, lengths_B, codes_TBL1), lengths_B, self.chain)

    def loss(
        self, y_TBW: Tensor, target_TB: Tensor, lengths_B: Tensor, codes_TBL1: Tensor | None = None, *, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss sum and the number of steps with a label; each sequence times its weight [B]. One of weight 0 is as if it had no steps."""
        scores_TBV = self.emissions(y_TBW, lengths_B, codes_TBL1)
        lengths_B = lengths_B if weights is None else torch.where(weights > 0, lengths_B, 0)
        total = dispatch.summed(scores_TBV, target_TB, lengths_B, self.chain, weights)
        step_T1 = torch.arange(len(target_TB), device=target_TB.device)[:, None]
        count_B = ((target_TB != IGNORED) & (step_T1 < lengths_B)).sum(0)
        return total, (count_B if weights is None else count_B * weights).sum().to(total.dtype)

    def extra_repr(self) -> str:
        return f"{self.width}, {self.classes}, scheme={self.scheme}"
