"""The peer of `bench replicas` for sequences of varying length: DDP over random batches, padded or packed.

Every worker draws its share through a DistributedSampler, which gives each worker the same number of sequences per batch, so DDP's mean
of means is the true mean. How long a worker's sequences are is left to chance, and every step waits for the slowest worker.

Shapes: T time, B lane, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from carrywave.benchmarks.peers.pipeline_loops import CLIP, CPU, LR, OURS, arithmetic
from carrywave.benchmarks.peers.plain_loops import PlainClassifier, PlainSequences
from carrywave.model.lstm import LSTM


def classifier(features: int, hidden: int, classes: int, *, packed: bool = False) -> PlainClassifier:
    """The model with its initial weights, identical in every process and loop."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return PlainClassifier(features, hidden, 1, classes, packed=packed)


class DataParallelSequences(PlainSequences):
    """The same loop on every worker, over its part of the sequences, with gradients averaged by DDP."""

    def __init__(
        self,
        sequences: Sequence[Tensor],
        labels: Sequence[int],
        *,
        hidden: int,
        classes: int,
        batch: int,
        lstm: str,
        packed: bool,
        rank: int,
        size: int,
    ) -> None:
        features = sequences[0].shape[1]
        plain = classifier(features, hidden, classes, packed=packed)
        if lstm == OURS:
            weights = plain.lstm.state_dict()
            # A drop-in replacement for nn.LSTM: same weights, same call, same results.
            plain.lstm = LSTM(features, hidden, 1)  # type: ignore[assignment]
            plain.lstm.load_state_dict(weights)
        self.lstm = lstm
        model = DistributedDataParallel(plain, gradient_as_bucket_view=True, static_graph=True)
        numbered: Any = labels  # a sampler only counts what it samples
        sampler: DistributedSampler[Any] = DistributedSampler(numbered, size, rank, shuffle=True)
        super().__init__(sequences, labels, model, batch=batch, lr=LR, clip=CLIP, device=CPU, sampler=sampler)

    def step(self) -> tuple[Tensor, int]:
        """One optimizer step; returns the mean loss over this worker's sequences, and its real tokens."""
        with arithmetic(self.lstm):
            return super().step()
