"""The peers of `train`: training loops as a good engineer writes them by hand in plain PyTorch.

They are as fast as plain PyTorch gets without tricks: one `nn.LSTM` for the whole stack, one softmax for the whole window, no needless
synchronisation, the fused optimizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader


class PlainLanguageModel(nn.Module):
    """Embedding, nn.LSTM or nn.GRU, linear."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, dropout: float, cell: type[nn.LSTM | nn.GRU] = nn.LSTM) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = cell(hidden, hidden, layers, dropout=dropout)
        self.linear = nn.Linear(hidden, vocabulary)

    def forward(self, x_TB: Tensor, carry: Any) -> tuple[Tensor, Any]:
        """Logits of the next token, and the carry for the next window."""
        y_TBH, carry = self.lstm(self.drop(self.embedding(x_TB)), carry)
        return self.linear(self.drop(y_TBH)), carry


class PlainClassifier(nn.Module):
    """nn.LSTM over padded or packed sequences, linear on the last real step."""

    def __init__(self, features: int, hidden: int, layers: int, classes: int, *, packed: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, layers)
        self.linear = nn.Linear(hidden, classes)
        self.packed = packed

    def forward(self, x_TBF: Tensor, lengths_B: Tensor) -> Tensor:
        """Logits of the label."""
        if self.packed:
            y_TBH, _ = pad_packed_sequence(self.lstm(pack_padded_sequence(x_TBF, lengths_B, enforce_sorted=False))[0])
        else:
            y_TBH, _ = self.lstm(x_TBF)
        logits_BK: Tensor = self.linear(y_TBH[lengths_B.to(y_TBH.device) - 1, torch.arange(y_TBH.shape[1], device=y_TBH.device)])
        return logits_BK


def descend(loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> None:
    """Backward, clipping and the optimizer's step."""
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


class PlainStreams:
    """Truncated back-propagation through a corpus cut into lanes, as in PyTorch's word-level language model example."""

    def __init__(
        self, tokens: Tensor, model: PlainLanguageModel, *, lanes: int, steps: int, lr: float, clip: float, device: torch.device
    ) -> None:
        rows = tokens.numel() // lanes
        self.data_TB = tokens[: rows * lanes].view(lanes, rows).t().contiguous().to(device)
        self.model, self.steps, self.clip = model.to(device), steps, clip
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
        self.position = 0
        self.carry: Any = None
        self.model.train()

    def step(self) -> int:
        """One optimizer step; returns the number of tokens trained on."""
        if self.position + 1 >= len(self.data_TB):
            self.position, self.carry = 0, None
        end = min(self.position + self.steps, len(self.data_TB) - 1)
        x_TB, target_TB = self.data_TB[self.position : end], self.data_TB[self.position + 1 : end + 1]
        logits_TBV, carry = self.model(x_TB, self.carry)
        self.carry = carry.detach() if isinstance(carry, Tensor) else tuple(part.detach() for part in carry)
        loss = nn.functional.cross_entropy(logits_TBV.flatten(0, 1), target_TB.flatten())
        self.optimizer.zero_grad()
        descend(loss, self.model, self.optimizer, self.clip)
        self.position = end
        return x_TB.numel()


class PlainSequences:
    """A DataLoader with random order and `pad_sequence`; one step per batch."""

    def __init__(
        self, examples: Sequence[tuple[Tensor, int]], model: nn.Module, *, batch: int, lr: float, clip: float, device: torch.device
    ) -> None:
        given: Any = examples
        self.loader: DataLoader[Any] = DataLoader(given, batch, shuffle=True, collate_fn=collate)
        self.model, self.clip, self.device = model.to(device), clip, device
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
        self.batches = itertools.chain.from_iterable(itertools.repeat(self.loader))
        self.model.train()

    def step(self) -> int:
        """One optimizer step; returns the number of real tokens trained on."""
        x_TBF, lengths_B, labels_B = next(self.batches)
        self.optimizer.zero_grad()
        logits_BK = self.model(x_TBF.to(self.device, non_blocking=True), lengths_B)
        loss = nn.functional.cross_entropy(logits_BK, labels_B.to(self.device, non_blocking=True))
        descend(loss, self.model, self.optimizer, self.clip)
        return int(lengths_B.sum())


def collate(examples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Padded sequences [T, B, F], lengths and labels."""
    lengths = torch.tensor([len(x_TF) for x_TF, _ in examples])
    return pad_sequence([x_TF for x_TF, _ in examples]), lengths, torch.tensor([label for _, label in examples])
