"""Any nn.Module on replicas, with a loss of your own: it need not be an LSTM, and needs no change.

The module maps [time, lane, …] to whatever the loss reads. The loss gives a sum and how many targets are in it; the trainer adds both up
over the workers and divides once. All workers start from the weights of rank 0. What one piece cannot do is stages: those need
cw.Model(encoder, lstm, head).

    python examples/any_module.py
    torchrun --nproc-per-node 2 examples/any_module.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import carrywave as cw


class Around(nn.Module):
    """Looks at two steps before and two after with a convolution, then through a GRU, both ways."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.look = nn.Conv1d(1, width, kernel_size=5, padding=2)
        self.read = nn.GRU(width, width, bidirectional=True)
        self.drop = nn.Dropout(0.1)  # becomes a keyed one: its masks do not depend on how many workers there are
        self.out = nn.Linear(2 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.look(x.permute(1, 2, 0)).permute(2, 0, 1)
        return self.out(self.drop(self.read(torch.relu(seen))[0]))


def squared(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count over the targets that are there: NaN marks padding, and lanes of a worker for which a batch had none."""
    real = torch.isfinite(target)
    return torch.where(real, out - target, 0.0).square().sum(), real.sum()


def main(steps: int = 30) -> float:
    """The last loss: a wave is to be freed of its noise."""
    torch.manual_seed(1)
    trainer = cw.Trainer(Around(), {"optimizer": "adam", "lr": 1e-2, "precision": "fp64", "seed": 1}, loss=squared)
    world = trainer.mesh.world
    clean = torch.sin(torch.arange(24)[:, None, None] / 3 + torch.linspace(0, 6, 16)[None, :, None])
    draw = torch.Generator().manual_seed(1)  # every worker makes, or reads, the same batches
    for step in range(steps):
        loss = trainer.step(cw.Batch.of(clean + 0.3 * torch.randn(clean.shape, generator=draw), clean))
        if world.rank == 0 and step in (0, steps - 1):
            print(f"step {step}: loss {loss:.5f}, {world.size} workers")
    return loss.item()


if __name__ == "__main__":
    main()
