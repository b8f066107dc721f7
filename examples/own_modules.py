"""Your own encoder and your own head around the LSTM, trained by cw.fit.

The task is probabilistic forecasting: the encoder is a small network applied to each step, the head predicts the mean and standard
deviation of a normal distribution for the next value, and the loss is the negative log-likelihood.

    python examples/own_modules.py
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import carrywave as cw


class Encoder(nn.Module):
    """Any module that maps [time, lane, numbers] to [time, lane, width] step by step. Its nn.Dropout is replaced by keyed dropout."""

    def __init__(self, numbers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(numbers, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Normal(nn.Module):
    """A head needs `loss(y, target) -> (sum, count)`. Missing targets in [time, lane, horizon, columns] are NaN."""

    def __init__(self, width: int, columns: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 2 * columns)

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_deviation = self.out(y).unsqueeze(-2).chunk(2, dim=-1)
        real = torch.isfinite(target)
        # Mask before squaring; masking afterwards would make the gradient NaN times zero.
        gap = torch.where(real, target - mean, 0.0) * torch.exp(-log_deviation)
        nats = 0.5 * gap.square() + log_deviation + 0.5 * math.log(2 * math.pi)
        return torch.where(real, nats, 0.0).sum(), real.sum()


def series(steps: int) -> np.ndarray:
    """A sine wave with a period of 48 steps, whose noise is loud for half of each period."""
    draw = np.random.default_rng(1)
    time = np.arange(steps)
    loud = np.where((time // 24) % 2 == 0, 0.05, 0.4)
    return (np.sin(time * 2 * np.pi / 48) + draw.normal(size=steps) * loud)[:, None]


def main(steps: int = 6000, epochs: int = 8, hidden: int = 32, run: Path | None = None) -> cw.Model:
    """Returns the trained model."""
    model = cw.Model(Encoder(1, 16), cw.LSTM(16, hidden, num_layers=2, dropout=0.1), Normal(hidden, 1))
    result = cw.fit(
        model,
        series(steps),
        task="forecasting",
        data={"horizon": 1, "split": [0.7, 0.15, 0.15]},
        batch={"lanes": 8, "steps": 48},
        train={"lr": 5e-3, "epochs": epochs, "clip": 1.0},
        run=run,
    )
    # The head has no forward, so the loss is the only metric. A constant normal distribution would reach about 1.4 nats.
    print(f"{result.run}: {result.metrics['test']['loss']:.3f} nats a value on the test part")
    # The run stores the weights, not your modules. Build the same modules again to open the run.
    rebuilt = cw.Model(Encoder(1, 16), cw.LSTM(16, hidden, num_layers=2, dropout=0.1), Normal(hidden, 1))
    print(f"opened again, on another series: {cw.evaluate(result.run, series(steps // 4), model=rebuilt)['loss']:.3f} nats a value")
    return result.model


if __name__ == "__main__":
    torch.manual_seed(1)
    main()
