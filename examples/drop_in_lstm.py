"""cw.LSTM as a drop-in replacement for nn.LSTM in a plain PyTorch program: same weights, lengths instead of packing.

A model is trained with nn.LSTM and packed sequences. Its state_dict is loaded into the same model built with cw.LSTM, which gives the same
outputs, and training continues in the same ordinary loop.

    python examples/drop_in_lstm.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import carrywave as cw


class Before(nn.Module):
    """nn.LSTM: padding is handled by packing."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, hidden, num_layers=2, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        _, (h, _) = self.lstm(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return self.out(h[-1])[:, 0]


class After(nn.Module):
    """cw.LSTM: lengths are passed instead. Parameters and state_dict are the same."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = cw.LSTM(3, hidden, num_layers=2, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        _, (h, _) = self.lstm(x, lengths=lengths)
        return self.out(h[-1])[:, 0]


def sequences(number: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Padded sequences of 3 to 20 steps, their lengths, and the target: the mean of each sequence."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 21, (number,), generator=draw)
    rows = [torch.randn(int(length), 3, generator=draw) for length in lengths]
    return pad_sequence(rows, batch_first=True), lengths, torch.stack([row.mean() for row in rows])


def train(model: nn.Module, steps: int) -> float:
    """An ordinary training loop, independent of which LSTM is used; returns the final loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, lengths, target = sequences(64, seed=step)
        loss = nn.functional.mse_loss(model(x, lengths), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main(steps: int = 100, hidden: int = 32) -> float:
    """Returns the largest difference between the outputs of the two models."""
    torch.manual_seed(1)
    before, after = Before(hidden), After(hidden)
    print(f"nn.LSTM, packed: loss {train(before, steps):.4f}")
    after.load_state_dict(before.state_dict())
    x, lengths, _ = sequences(100, seed=steps)
    with torch.no_grad():
        difference = (before(x, lengths) - after(x, lengths)).abs().max().item()
    print(f"cw.LSTM with its weights: outputs differ by at most {difference:.1e}")
    print(f"trained on: loss {train(after, steps):.4f}")
    before.load_state_dict(after.state_dict())  # the weights also load back into nn.LSTM
    return difference


if __name__ == "__main__":
    main()
