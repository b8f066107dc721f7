"""A stateful stream in your own loop, on any number of workers and hosts: the trainer keeps each lane's carry between windows.

Lanes belong to replicas and layers to stages; the carry stays on the worker that uses it. Every worker runs this program and passes the
same whole batches, so the loop is that of a single device, and so are the losses. The task is to name the last letter seen, at every step;
it often came before the window, so only the carry holds it.

One device:

    python examples/stateful_stream.py

One host, as 2 replicas or as 2 stages (arguments of the program are plan settings):

    torchrun --nproc-per-node 2 examples/stateful_stream.py
    torchrun --nproc-per-node 2 examples/stateful_stream.py stages=2 chunk_steps=4

Several hosts, here 2 with 2 workers each; the same command on each host except for --node-rank:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr hostA --master-port 29500 examples/stateful_stream.py stages=2
    torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr hostA --master-port 29500 examples/stateful_stream.py stages=2
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import carrywave as cw

LETTERS = 4  # 1 … 4; 0 is silence


class LastLetter(nn.Module):
    """A head with one logit per letter at each step; steps before the first letter have the target -100 and do not count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, LETTERS + 1)

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total = nn.functional.cross_entropy(self.out(y).flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        return total, (target != -100).sum()


def stream(steps: int, lanes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both [steps, lanes]: a letter about every ten steps; the target is the last letter, or -100 before the first."""
    draw = torch.Generator().manual_seed(seed)  # the same on every worker
    spoken = torch.rand(steps, lanes, generator=draw) < 0.1
    inputs = torch.where(spoken, torch.randint(1, LETTERS + 1, (steps, lanes), generator=draw), 0)
    latest = torch.where(spoken, torch.arange(steps)[:, None], -1).cummax(0).values
    return inputs, torch.where(latest >= 0, inputs.gather(0, latest.clamp(min=0)), -100)


def build() -> cw.Model:
    """An encoder, two layers and a head: at most four stages."""
    return cw.Model(nn.Embedding(LETTERS + 1, 8), cw.LSTM(8, 24, num_layers=2, dropout=0.1), LastLetter(24))


def main(*plan: str, passes: int = 3, steps: int = 160, lanes: int = 16, window: int = 8) -> None:
    """Train, then gather the weights into one model."""
    torch.manual_seed(1)
    trainer = cw.Trainer(
        build(),
        {"optimizer": "adam", "lr": 2e-2, "clip": 1.0, "precision": "fp64", "seed": 1},
        plan={key: int(value) for key, value in (word.split("=") for word in plan)},
    )
    first = trainer.mesh.world.rank == 0
    for epoch in range(passes):
        inputs, targets = stream(steps, lanes, seed=epoch)
        losses = []
        for step, (x, target) in enumerate(zip(inputs.split(window), targets.split(window), strict=True)):
            # Fresh lanes start from a zero carry; the others from the detached carry of the last window.
            losses.append(trainer.step(cw.Batch.of(x, target, fresh=step == 0, epoch=epoch, step=step)))
        if first:
            print(f"pass {epoch + 1}: loss {torch.stack(losses).mean():.5f}")
    weights = trainer.gathered()  # collective: every rank must call it; rank 0 gets the weights
    if first:
        whole = build()
        whole.load_state_dict(weights)
        print(f"{trainer.plan.replicas} x {trainer.plan.stages} workers; {sum(p.numel() for p in whole.parameters())} weights put together")


if __name__ == "__main__":
    main(*sys.argv[1:])
