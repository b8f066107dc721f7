"""A head that transcribes: a sequence of labels, of which there may be fewer than steps, without saying where each of them lies (CTC)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from carrywave.errors import UserError
from carrywave.kernels.deferred_gradients import linear
from carrywave.kernels.lengths import real_steps
from carrywave.model.heads.alignments import negative_log_likelihood
from carrywave.model.heads.scoring import IGNORED, at_least_float32, keyword, weighted, weighted_targets


class Ctc(nn.Module):
    """Labels 0 to `labels` - 1, and a blank as the last class, scored over all ways to lay the labels along the steps.

    With `upsample`, it answers that many times for each step, so that there may be more labels than steps.

    Targets are [B, L]: the labels of a lane, then -1; a row that begins with -100 is missing and adds nothing. Labels are what is counted,
    and a lane without any counts as one: losses of long and short transcriptions can be compared, and so can steps that train on them.
    After the end of a lane, its blank is certain. That changes no probability of a transcription, so what reads the output needs no
    lengths.
    """

    pooled = True  # a row of targets for each lane
    reads_whole = True

    def __init__(self, width: int, labels: int, *, upsample: int = 1) -> None:
        super().__init__()
        if labels < 1 or upsample < 1:
            raise UserError(f"a transcription has {labels} labels and {upsample} answers for a step; use at least 1 of each")
        self.width, self.classes, self.upsample = width, labels + 1, upsample
        self.blank = labels
        outputs = upsample * self.classes
        self.weight = nn.Parameter(torch.empty(outputs, width).uniform_(-(width**-0.5), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, y_TBW: Tensor, lengths_B: Tensor) -> Tensor:
        """Log-probabilities [T * upsample, B, classes]."""
        logits = self._logits(y_TBW)
        certain_V = logits.new_full((self.classes,), -math.inf)
        certain_V[self.blank :].zero_()  # `= 0.0` would copy a number from the host, which a CUDA graph cannot hold
        return torch.where(real_steps(lengths_B * self.upsample, logits.shape[0]), functional.log_softmax(logits, dim=-1), certain_V)

    def _logits(self, y_TBW: Tensor) -> Tensor:
        if self.upsample > 1 and torch.compiler.is_exporting():
            # The same, answer by answer: torch 2.11 would fix the number of lanes where steps and answers become one dimension.
            parts = zip(self.weight.chunk(self.upsample), self.bias.chunk(self.upsample), strict=True)
            by_answer = torch.cat([at_least_float32(linear(y_TBW, weight, bias)) for weight, bias in parts])
            at = torch.arange(by_answer.shape[0], device=y_TBW.device)
            return by_answer[at % self.upsample * y_TBW.shape[0] + at // self.upsample]
        logits = at_least_float32(linear(y_TBW, self.weight, self.bias))
        if self.upsample == 1:
            return logits
        return logits.view(*y_TBW.shape[:2], self.upsample, self.classes).transpose(1, 2).flatten(0, 1)

    def score(self, logs_TBV: Tensor, target_BL: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The sum of negative log-likelihoods, and the number of labels; `weights` [B]."""
        target_BL = weighted_targets(target_BL, weights)
        real_B = target_BL[:, 0] != IGNORED
        losses_B = torch.where(real_B, negative_log_likelihood(logs_TBV, target_BL, self.blank), 0.0)
        count_B = torch.where(real_B, (target_BL >= 0).sum(-1).clamp(min=1), 0).to(losses_B.dtype)
        return weighted(losses_B, weights).sum(), weighted(count_B, weights).sum()

    def loss(self, y_TBW: Tensor, target_BL: Tensor, lengths_B: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss sum and count, from the last layer's output."""
        return self.score(self(y_TBW, lengths_B), target_BL, **keyword(weights))

    def extra_repr(self) -> str:
        return f"{self.width}, {self.classes - 1}, upsample={self.upsample}"
