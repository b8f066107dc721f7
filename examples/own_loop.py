"""Your own loop, optimizer and learning rate schedule: trainer.step(batch) does one optimizer step.

A stream is cut into lanes and read in windows of a few steps; the carry is kept, so each window continues where the last one ended.
The task is to name the last letter seen, at every step. It often came before the window, so only the carry holds it.

    python examples/own_loop.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import carrywave as cw

LETTERS = 4  # 1 … 4; 0 is silence


class LastLetter(nn.Module):
    """A head with one logit per letter at each step; steps with the target -100 (none) do not count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, LETTERS + 1)

    def forward(self, y: Tensor) -> Tensor:
        return self.out(y)

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total = nn.functional.cross_entropy(self(y).flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        return total, (target != -100).sum()


def stream(steps: int, lanes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both [steps, lanes]: a letter about every ten steps; the target is the last letter, or -100 before the first."""
    draw = torch.Generator().manual_seed(seed)
    spoken = torch.rand(steps, lanes, generator=draw) < 0.1
    inputs = torch.where(spoken, torch.randint(1, LETTERS + 1, (steps, lanes), generator=draw), 0)
    latest = torch.where(spoken, torch.arange(steps)[:, None], -1).cummax(0).values
    return inputs, torch.where(latest >= 0, inputs.gather(0, latest.clamp(min=0)), -100)


def main(passes: int = 5, steps: int = 320, lanes: int = 32, hidden: int = 32, window: int = 8) -> tuple[float, float]:
    """Returns the accuracy on a new stream with the carry kept and without it."""
    torch.manual_seed(1)
    model = cw.Model(nn.Embedding(LETTERS + 1, 8), cw.LSTM(8, hidden), LastLetter(hidden))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, passes * (steps // window))
    trainer = cw.Trainer(model, {"clip": 1.0, "seed": 1}, optimizer=optimizer)
    for epoch in range(passes):
        inputs, targets = stream(steps, lanes, seed=epoch)
        losses = []
        for step, (x, target) in enumerate(zip(inputs.split(window), targets.split(window), strict=True)):
            # Fresh lanes start from a zero carry; the others from the detached carry of the last window.
            losses.append(trainer.step(cw.Batch.of(x, target, fresh=step == 0, epoch=epoch, step=step)))
            schedule.step()
        print(f"pass {epoch + 1}: loss {torch.stack(losses).mean():.3f}, learning rate {schedule.get_last_lr()[0]:.4f}")
    unseen = stream(steps, lanes, seed=passes)
    kept, dropped = (judge(model, *unseen, window, keep=keep) for keep in (True, False))
    print(f"accuracy on a new stream: {kept:.3f} with the carry kept, {dropped:.3f} without")
    return kept, dropped


@torch.no_grad()
def judge(model: cw.Model, inputs: Tensor, targets: Tensor, window: int, *, keep: bool) -> float:
    """The fraction of steps at which the last letter is named. State is passed in and out explicitly."""
    model.eval()
    state, right, count = None, 0, 0
    for x, target in zip(inputs.split(window), targets.split(window), strict=True):
        y, state = model(x, state if keep else None)
        real = target != -100
        right += int((model.output(y, state).argmax(-1) == target)[real].sum())
        count += int(real.sum())
    return right / count


if __name__ == "__main__":
    main()
