"""Gradient accumulation in your own loop: several batches per optimizer step, on one worker or many.

trainer.step(*batches) sums the loss over all batches and divides once by the number of real targets, so batches are weighted by what they
contain. Workers communicate once per step, in the last backward. (With cw.fit and on the command line, set train.accumulate.)

    python examples/accumulate.py
    torchrun --nproc-per-node 2 examples/accumulate.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import carrywave as cw

LANES, STEPS = 24, 20


class Next(nn.Module):
    """A head that predicts the next number. Targets beyond a sequence's length are NaN and do not count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 1)

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        real = torch.isfinite(target)
        gap = torch.where(real, target - self.out(y), 0.0)
        return gap.square().sum(), real.sum()


def trainer() -> cw.Trainer:
    """A trainer with the same initial weights on every call. Under torchrun every worker becomes a replica."""
    torch.manual_seed(1)
    model = cw.Model(nn.Linear(1, 8), cw.LSTM(8, 16, num_layers=2), Next(16))
    return cw.Trainer(model, {"optimizer": "adam", "lr": 1e-2, "clip": 1.0, "precision": "fp64"})


def main(passes: int = 30) -> tuple[float, float]:
    """Returns the final loss with all lanes in one batch, and with three accumulated batches."""
    time = torch.arange(STEPS + 1, dtype=torch.float64)[:, None, None]
    waves = torch.sin(time / 2 + torch.linspace(0, 6, LANES, dtype=torch.float64)[None, :, None])
    lengths = torch.linspace(3, STEPS, LANES).long()  # so the three batches have very different numbers of targets
    x, target = waves[:-1], waves[1:]
    at_once, in_parts = trainer(), trainer()
    # Every worker passes the whole batch; the trainer takes this worker's lanes from it.
    parts = [cw.Batch.of(x[:, low : low + 8], target[:, low : low + 8], lengths[low : low + 8]) for low in range(0, LANES, 8)]
    for step in range(passes):
        whole = at_once.step(cw.Batch.of(x, target, lengths))
        pieces = in_parts.step(*parts)
        if at_once.mesh.world.rank == 0 and step in (0, passes - 1):
            print(f"step {step}: loss {whole:.5f} at once, {pieces:.5f} in 3 batches, {at_once.mesh.world.size} workers")
    return whole.item(), pieces.item()


if __name__ == "__main__":
    main()
