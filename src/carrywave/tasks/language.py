"""Language: each token predicts the next one in its stream; the loss is the cross entropy, from which perplexity and bits follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from carrywave.data.sequences import Ints, Sequences, View
from carrywave.errors import DataError
from carrywave.model.encoders import Embedding
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.heads.classes import Softmax
from carrywave.tasks.kind import Kind, Part
from carrywave.tasks.metrics.errors import Metric
from carrywave.tasks.network import Encoder
from carrywave.tasks.views import resets, weighted


class Language(Kind):
    """Documents end where `data.reset` says."""

    def view(self, name: str, data: Sequences) -> View:
        """Each token except the last of a sequence predicts its successor."""
        ends, tokens = self.task.document_ends, data.inputs
        if name == "train" and ends is not None and not ends.any_in(tokens):
            raise DataError(f"train never has data.reset={self.spec.data.reset!r}, which is to end its documents; set what does")

        def next_token(rows: Ints) -> NDArray[np.int64]:
            return np.asarray(tokens[rows + 1], dtype=np.int64)

        read = View(tokens, data.starts, data.lengths - 1, targets_at=next_token, resets_at=resets(data, ends))
        return weighted(read, data, lambda rows: rows + 1)

    def unlabelled(self, data: Sequences) -> View:
        """Every token of every sequence."""
        return replace(super().unlabelled(data), resets_at=resets(data, self.task.document_ends))

    def head(self, width: int, encoder: Encoder, train: Sequences | None, device: str | None) -> nn.Module:
        """A softmax over the vocabulary, which may share the embedding's matrix or score rare tokens in clusters."""
        if self.spec.model.softmax == "adaptive":
            return AdaptiveSoftmax(width, self.facts.vocabulary, self.spec.model.cutoffs_of(self.facts.vocabulary))
        tied = encoder.weight if self.spec.model.tie and isinstance(encoder, Embedding) else None
        return Softmax(width, self.facts.vocabulary, tied=tied, device=device)

    def meter(self, device: torch.device, part: Part, *, by_series: bool, tops: Sequence[int]) -> Metric | None:
        """None: see `derived`."""
        return None

    def derived(self, loss: float) -> dict[str, float]:
        """Perplexity and bits per token, from the mean loss in nats."""
        # Beyond this, exp overflows float64.
        return {"perplexity": math.exp(loss) if loss < 709.0 else loss if math.isnan(loss) else math.inf, "bits": loss / math.log(2.0)}
