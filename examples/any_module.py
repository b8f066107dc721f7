"""Any nn.Module on replicas, with your own loss: it need not be an LSTM, and needs no changes.

The module maps [time, lane, …] to whatever the loss expects. The loss returns a sum and the number of targets in it; the trainer sums both
over the workers and divides once. All workers start from the weights of rank 0. A single module cannot be split into stages; that needs
cw.Model(encoder, lstm, head).

    python examples/any_module.py
    torchrun --nproc-per-node 2 examples/any_module.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import carrywave as cw


class Around(nn.Module):
    """A convolution over two steps before and after, followed by a bidirectional GRU."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.look = nn.Conv1d(1, width, kernel_size=5, padding=2)
        self.read = nn.GRU(width, width, bidirectional=True)
        self.drop = nn.Dropout(0.1)  # replaced by keyed dropout, whose masks do not depend on the number of workers
        self.out = nn.Linear(2 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.look(x.permute(1, 2, 0)).permute(2, 0, 1)
        return self.out(self.drop(self.read(torch.relu(seen))[0]))


def squared(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count over the real targets: NaN marks padding, and the empty lanes of a worker when a batch has too few."""
    real = torch.isfinite(target)
    return torch.where(real, out - target, 0.0).square().sum(), real.sum()


def main(steps: int = 30) -> float:
    """Train to remove noise from a wave; returns the final loss."""
    torch.manual_seed(1)
    trainer = cw.Trainer(Around(), {"optimizer": "adam", "lr": 1e-2, "precision": "fp64", "seed": 1}, loss=squared)
    world = trainer.mesh.world
    clean = torch.sin(torch.arange(24)[:, None, None] / 3 + torch.linspace(0, 6, 16)[None, :, None])
    draw = torch.Generator().manual_seed(1)  # every worker generates (or reads) the same batches
    for step in range(steps):
        loss = trainer.step(cw.Batch.of(clean + 0.3 * torch.randn(clean.shape, generator=draw), clean))
        if world.rank == 0 and step in (0, steps - 1):
            print(f"step {step}: loss {loss:.5f}, {world.size} workers")
    return loss.item()


if __name__ == "__main__":
    main()
