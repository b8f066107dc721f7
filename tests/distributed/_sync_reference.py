"""Plain PyTorch for test_sync.py: nn.Embedding, nn.LSTM, nn.Linear and torch.optim, one copy for each replica, in one process.

The batches are those that each replica gets of a run: its own lanes, in the order of the data. Their loss is divided by their own targets,
and clipped by their own norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from _sync_definition import simulate
from carrywave.data.batch import Batch
from carrywave.data.loader import Loader, Share
from carrywave.data.order import Cursor
from carrywave.data.prepare import prepare
from carrywave.prediction.evaluation import order_for
from carrywave.spec.defaults import resolve_for_data
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.tasks.task import Task

CPU = torch.device("cpu")


class Plain(nn.Module):
    """A language model by the names of ours."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, *, tie: bool) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers)
        self.head = nn.Linear(hidden, vocabulary)
        if tie:
            self.head.weight = self.encoder.weight
        self.double()


class Replica:
    """One copy of the model, with its optimizer, carry and share of the data."""

    def __init__(self, spec: Spec, plain: Plain, batches: Iterator[Batch]) -> None:
        self.spec, self.model, self.batches = spec, plain, batches
        self.carry: tuple[Tensor, Tensor] | None = None
        train = spec.train
        self.optimizer: torch.optim.Optimizer
        if train.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(plain.parameters(), train.lr, momentum=train.momentum)
        else:
            self.optimizer = torch.optim.Adam(plain.parameters(), train.lr)

    def step(self) -> int:
        batch = next(self.batches)
        assert batch.targets is not None
        if bool(batch.fresh.all()):
            self.carry = None
        else:
            assert not bool(batch.fresh.any())  # streams start together
        y, carry = self.model.lstm(self.model.encoder(batch.inputs), self.carry)
        self.carry = (carry[0].detach(), carry[1].detach())
        targets = batch.targets.flatten()
        count = int((targets != -100).sum())
        loss = nn.functional.cross_entropy(self.model.head(y).flatten(0, 1), targets, reduction="sum", ignore_index=-100) / count
        self.optimizer.zero_grad()
        loss.backward()
        if self.spec.train.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.train.clip)
        self.optimizer.step()
        return count


def reference(given: dict[str, Any], replicas: int, steps: int) -> dict[str, Tensor]:
    """The weights of a run of this spec, by name, as `simulate` defines them."""
    spec = parse(given, defaults=False)
    prepared = prepare(spec)
    spec = resolve_for_data(spec, prepared.facts)
    task = Task.of(spec, prepared.codec, prepared.facts, prepared.train)
    ours = task.model(prepared.train).double()
    view = task.part("train", prepared.train).view
    order = order_for(spec, view, training=True)
    vocabulary = prepared.facts.vocabulary
    assert vocabulary is not None

    def batches(replica: int) -> Iterator[Batch]:
        epoch = 0
        while True:
            yield from Loader(view, order, device=CPU, share=Share(replica, replicas)).batches(Cursor(epoch, 0))
            epoch += 1

    def copy(replica: int) -> Replica:
        plain = Plain(vocabulary, spec.model.widths[0], spec.model.layers, tie=spec.model.tie)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(dict(ours.named_parameters())[name])
        return Replica(spec, plain, batches(replica))

    copies = [copy(replica) for replica in range(replicas)]
    train, windows = spec.train, order.num_steps(0)
    whole = dict(copies[0].model.named_parameters())

    def inner(weights: list[Tensor], replica: int, step: int) -> int:
        own = [parameter.detach() for parameter in copies[replica].model.parameters()]
        for parameter, weight in zip(own, weights, strict=True):
            parameter.copy_(weight)
        count = copies[replica].step()
        for parameter, weight in zip(own, weights, strict=True):
            weight.copy_(parameter)
        return count

    def due(step: int) -> bool:
        return step % windows == 0 or step == steps or step % train.sync_every == 0  # the end of an epoch, or of the run, or in between

    assert train.sync in ("local", "diloco")
    found = simulate(
        [parameter.detach() for parameter in whole.values()],
        inner,
        due,
        replicas=replicas,
        steps=steps,
        mode=train.sync,
        momentum=train.exchange_momentum,
        lr=train.sync_lr,
    )
    return dict(zip(whole, found, strict=True))


def text(folder: Path) -> Path:
    """A text of 5 streams that do not divide among 2 replicas evenly."""
    path = folder / "text.txt"
    if not path.exists():
        path.write_text("the carry is passed along, and work moves as a wave. " * 12)
    return path
