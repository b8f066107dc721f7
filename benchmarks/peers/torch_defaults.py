"""The peer of `quality`: an LSTM as anybody writes it in plain PyTorch, with every default of torch.

`nn.Embedding`, `nn.LSTM` and `nn.Linear` as torch initialises them, cross entropy or the mean squared error, Adam with its learning rate
of 1e-3, float32, no clipping, no schedule. Sizes, batches and the number of steps are those of carrywave's run, and so is the rule for the
weights that count: those of the epoch with the lowest loss on valid. It is scored by the metric of the task, on the same targets.

Shapes: T time, B lane, K outputs of the linear layer; H horizon, C columns.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.harness.timing import settle
from carrywave.data.batch import IGNORED, Batch
from carrywave.data.loader import Loader
from carrywave.data.order import Cursor
from carrywave.prediction.evaluation import order_for
from carrywave.tasks.task import Part, Task

Carry = tuple[Tensor, Tensor]


class PlainNetwork(nn.Module):
    """Embedding for tokens, nn.LSTM, linear: after every step, or after the last real one of each sequence."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        spec, facts = task.spec.model, task.facts
        tokens = facts.vocabulary > 0
        width = (spec.embedding or spec.widths[0]) if tokens else facts.features
        self.embedding = nn.Embedding(facts.vocabulary, width) if tokens else None
        self.lstm = nn.LSTM(width, spec.widths[0], spec.layers)
        self.pooled = task.spec.pooled
        self.tail: tuple[int, ...] = (len(facts.labels),)
        match task.spec.task:
            case "language":
                self.tail = (facts.vocabulary,)
            case "regression":
                self.tail = (facts.outputs,)
            case "forecasting":
                self.tail = (task.spec.data.horizon, facts.outputs)
        self.linear = nn.Linear(spec.widths[0], math.prod(self.tail))

    def forward(self, batch: Batch, carry: Carry | None) -> tuple[Tensor, Carry]:
        """The outputs [B, K], [T, B, K] or [T, B, H, C], and the carry for the next window."""
        x_TBF = batch.inputs if self.embedding is None else self.embedding(batch.inputs)
        y_TBH, carry = self.lstm(x_TBF, carry)
        if self.pooled:
            y_TBH = y_TBH[batch.lengths - 1, torch.arange(y_TBH.shape[1], device=y_TBH.device)]
        return self.linear(y_TBH).unflatten(-1, self.tail), carry


def loss_of(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses over real targets, and how many there are."""
    if target.is_floating_point():
        real = ~target.isnan()
        return (out - target)[real].square().sum(), real.sum()
    loss = nn.functional.cross_entropy(out.flatten(0, -2), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (target != IGNORED).sum()


@dataclass(frozen=True)
class Reached:
    """What the peer reached: the metrics of the part that is scored, the steps taken, and the seconds they took, without evaluations."""

    values: dict[str, float]
    steps: int
    seconds: float


def train(task: Task, parts: Mapping[str, Part], scored: str, *, steps: int | None, device: torch.device) -> Reached:
    """Train for this many steps, or for the epochs of the spec, and score the weights that are best on valid."""
    spec = task.spec
    torch.manual_seed(spec.train.seed)
    network = PlainNetwork(task).to(device)
    optimizer = torch.optim.Adam(network.parameters())
    best, lowest, seconds, done = network.state_dict(), math.inf, 0.0, 0
    for epoch in itertools.count() if steps is not None else range(spec.train.epochs):
        begin = time.perf_counter()
        for out, batch in _outputs(network, task, parts["train"], device, epoch=epoch):
            assert batch.targets is not None
            loss, count = loss_of(out, batch.targets)
            optimizer.zero_grad()
            (loss / count).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
            if done == (steps or spec.train.max_steps):
                break
        settle(device)
        seconds += time.perf_counter() - begin
        reached = evaluate(network, task, parts["valid"], device)["loss"] if "valid" in parts else -done
        if reached < lowest:
            best, lowest = copy.deepcopy(network.state_dict()), reached
        if done == (steps or spec.train.max_steps):
            break
    network.load_state_dict(best)
    return Reached(evaluate(network, task, parts[scored], device), done, seconds)


@torch.no_grad()
def evaluate(network: PlainNetwork, task: Task, part: Part, device: torch.device) -> dict[str, float]:
    """The mean loss over a part, and the metrics of the task."""
    meter = task.meter(device, part)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for out, batch in _outputs(network, task, part, device, epoch=None):
        assert batch.targets is not None
        sums += torch.stack(loss_of(out, batch.targets))
        if meter is not None:
            meter.update(out, batch.targets, batch.sequence)
    loss = float(sums[0] / sums[1])
    return {"loss": loss} | task.derived(loss) | ({} if meter is None else meter.values())


def _outputs(network: PlainNetwork, task: Task, part: Part, device: torch.device, *, epoch: int | None) -> Iterator[tuple[Tensor, Batch]]:
    """What the network says of each batch of a part: in the order of an epoch of training, or, without one, in that of an evaluation.

    The carry of streams is kept from window to window, without its gradient, and reset where a sequence begins.
    """
    order = order_for(task.spec, part.view, training=epoch is not None)
    carry: Carry | None = None
    with closing(Loader(part.view, order, device=device).batches(Cursor(epoch or 0, 0))) as batches:
        for batch in batches:
            if carry is not None:
                kept = (~batch.fresh)[None, :, None]
                carry = (carry[0].detach() * kept, carry[1].detach() * kept)
            out, after = network(batch, carry)
            carry = after if task.spec.streams else None
            yield out, batch
