"""The peer of `bench replicas` for sequences of varying length: DDP over random batches, padded or packed.

Every worker draws its share through a DistributedSampler, which gives each worker the same number of sequences per batch, so DDP's mean
of means is the true mean. How long a worker's sequences are is left to chance, and every step waits for the slowest worker.

Shapes: T time, B lane, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from carrywave.benchmarks.peers.pipeline_loops import CLIP, LR, OURS, arithmetic
from carrywave.benchmarks.peers.plain_loops import PlainClassifier
from carrywave.model.lstm import LSTM


def classifier(features: int, hidden: int, classes: int, *, packed: bool = False) -> PlainClassifier:
    """The model with its initial weights, identical in every process and loop."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return PlainClassifier(features, hidden, 1, classes, packed=packed)


class DataParallelSequences:
    """One optimizer step per batch of a DataLoader with random order and `pad_sequence`."""

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
        rows: Any = list(zip(sequences, labels, strict=True))
        features = sequences[0].shape[1]
        plain = classifier(features, hidden, classes, packed=packed)
        if lstm == OURS:
            weights = plain.lstm.state_dict()
            # A drop-in replacement for nn.LSTM: same weights, same call, same results.
            plain.lstm = LSTM(features, hidden, 1)  # type: ignore[assignment]
            plain.lstm.load_state_dict(weights)
        self.lstm = lstm
        self.model = DistributedDataParallel(plain, gradient_as_bucket_view=True, static_graph=True)
        self.optimizer = torch.optim.Adam(self.model.parameters(), LR, fused=True)
        self.sampler: DistributedSampler[Any] = DistributedSampler(rows, size, rank, shuffle=True)
        self.loader: DataLoader[Any] = DataLoader(rows, batch_size=batch, sampler=self.sampler, collate_fn=collate)
        self.epoch = -1
        self.batches = self._next_epoch()

    def _next_epoch(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        self.epoch += 1
        self.sampler.set_epoch(self.epoch)
        return iter(self.loader)

    def step(self) -> tuple[Tensor, int]:
        """One optimizer step; returns the mean loss over this worker's sequences, and its real tokens."""
        got = next(self.batches, None)
        if got is None:
            self.batches = self._next_epoch()
            got = next(self.batches)
        x_TBF, lengths_B, labels_B = got
        with arithmetic(self.lstm):
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(x_TBF, lengths_B), labels_B)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
        return loss.detach(), int(lengths_B.sum())


def collate(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Padded sequences [T, B, F], lengths and labels."""
    lengths = torch.tensor([len(x_TF) for x_TF, _ in rows])
    return pad_sequence([x_TF for x_TF, _ in rows]), lengths, torch.tensor([label for _, label in rows])
