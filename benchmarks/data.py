"""Claim: one background thread makes variable-length batches at 5 times the real tokens/s of a `DataLoader`, with under 5% padding.

Peer: `torch.utils.data.DataLoader` as a good engineer sets it up: two persistent workers, a random sampler, `pad_sequence` in the
collate function, default prefetching. Both read the same in-memory tokens (log-normal lengths, clipped to 5 … 2,000) and return int64
inputs, targets (the next token) and lengths. Both put about the same number of real tokens in a batch: the peer's batch size is our
token budget divided by the mean length. The batches are not used, so this is the maximum throughput of each loader.

Method: the loaders alternate whole epochs, and medians count. One warm-up epoch each, in which the peer's workers start, is not counted.
Our time includes drawing the order of the epoch. torch runs with one thread, as it does inside the peer's workers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, RandomSampler

from benchmarks.harness.command import main
from benchmarks.harness.timing import one_thread, take_turns
from carrywave.data.loader import Loader
from carrywave.data.order import Cursor, SequenceOrder
from carrywave.data.sequences import Ints, View

BUDGET = 16_384

Size = tuple[int, int]  # of a batch: real tokens, tokens with padding


class _Corpus(Dataset[tuple[Tensor, Tensor]]):
    """A map-style dataset as a user would write it: one sequence per item."""

    def __init__(self, tokens: NDArray[np.uint16], starts: Ints, lengths: Ints) -> None:
        # Converted to the final dtype in advance, so that fetching an item is just two slices.
        self.tokens = torch.from_numpy(tokens.astype(np.int64))
        self.starts, self.lengths = starts.tolist(), lengths.tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start, length = self.starts[index], self.lengths[index]
        return self.tokens[start : start + length], self.tokens[start + 1 : start + length + 1]


def _collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    inputs, targets = zip(*items, strict=True)
    lengths = torch.tensor([len(sequence) for sequence in inputs])
    return pad_sequence(list(inputs)), pad_sequence(list(targets), padding_value=-100.0), lengths


def _ours(loader: Loader, epoch: int) -> Iterator[Size]:
    for batch in loader.batches(Cursor(epoch, 0)):
        yield batch.real, batch.inputs.numel()


def _theirs(loader: DataLoader[tuple[Tensor, Tensor]]) -> Iterator[Size]:
    for inputs, _, lengths in loader:
        yield int(lengths.sum()), inputs.numel()


def _timed(batches: Iterator[Size]) -> tuple[float, list[Size]]:
    begin = time.perf_counter()
    sizes = list(batches)
    return time.perf_counter() - begin, sizes


def run(*, quick: bool = False) -> list[dict[str, object]]:
    """One row per loader; `ratio` is its real tokens/s over the DataLoader's."""
    number, rounds = (4_000, 2) if quick else (20_000, 5)
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(4.5, 1.0, size=number)).astype(np.int64).clip(5, 2_000)
    starts = np.cumsum(lengths + 1) - (lengths + 1)  # each sequence has one extra token, the last target
    tokens = random.integers(0, 30_000, size=int((lengths + 1).sum())).astype(np.uint16)

    with one_thread():
        view = View(tokens, starts, lengths, targets_at=lambda rows: tokens[rows + 1])
        ours = Loader(view, SequenceOrder(lengths, tokens=BUDGET), device=torch.device("cpu"))
        corpus = _Corpus(tokens, starts, lengths)
        size = round(BUDGET / float(lengths.mean()))
        theirs = DataLoader(corpus, size, sampler=RandomSampler(corpus), num_workers=2, collate_fn=_collate, persistent_workers=True)
        epochs = itertools.count()
        loaders = {
            "carrywave, 1 thread": lambda: _timed(_ours(ours, next(epochs))),
            "DataLoader, 2 workers": lambda: _timed(_theirs(theirs)),
        }
        passes = take_turns(loaders, rounds + 1)

    rows: list[dict[str, object]] = []
    seconds = {name: median(taken for taken, _ in several[1:]) for name, several in passes.items()}  # without the warm-up
    for name, several in passes.items():
        sizes = several[-1][1]
        real, padded = (sum(values) for values in zip(*sizes, strict=True))
        rows.append(
            {
                "loader": name,
                "batches": len(sizes),
                "batches_per_second": len(sizes) / seconds[name],
                "real_tokens_per_second": real / seconds[name],
                "waste": 1.0 - real / padded,
                "ratio": seconds["DataLoader, 2 workers"] / seconds[name],  # both produce the same real tokens per epoch
            }
        )
    return rows


if __name__ == "__main__":
    main("benchmarks.data")
