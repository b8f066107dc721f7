"""A worker of test_own_loop.py: a user's own loops, one after the other, on the plan that the job file names."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from _train import main

import carrywave as cw
from carrywave.errors import UserError

T, B, WIDTH, CLASSES = 6, 4, 5, 3
STEPS = 5
LANES, STARTS = (4, 1, 1, 1, 3), (True, True, False, False, True)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, CLASSES)
        self.spare = nn.Linear(WIDTH, CLASSES)  # used where `spares` says so
        self.spares = False
        self.counts_all = False  # a loss that knows of no target without worth, as there are none in these batches
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.scale * (self.out(y) + self.spare(y) if self.spares else self.out(y))
        if self.counts_all:
            return (logits.square().sum(-1) - target).square().sum(), torch.tensor(target.numel())
        total = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        return total, (target != -100).sum()


class Labels(nn.Module):
    """One label for each lane, from a layer that reads no sequence without steps."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(2, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        _, h = self.rnn(nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False))
        out: Tensor = self.out(h[0])
        return out

    def loss(self, out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(out, target, reduction="sum"), torch.tensor(target.numel())


class Features(nn.Module):
    """What an encoder may hold that is drawn or put together in each process."""

    def __init__(self, names: Sequence[str] = ("a", "b"), passing: float = 1.0) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(2, 3) for name in names})
        self.rank = int(os.environ["RANK"])
        self.made_at = time.time() + self.rank  # which nothing reads
        self.register_buffer("passing", torch.tensor(passing), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.passing * torch.stack([self.parts[name](x) for name in ("a", "b")]).sum(0)


MADE: dict[str, dict[str, Any]] = {
    "made alike": {},
    "made in another order": {"names": ("b", "a")},
    "made with another buffer": {"passing": 1.5},
    "made with another seed": {},
}


def made(case: str, plan: dict[str, Any], rank: int, device: str) -> dict[str, Any]:
    """A model whose encoder rank 1 has made in another way."""
    net = model()
    net.encoder = Features(**MADE[case if rank == 1 else "made alike"]).double()
    seed = 1 + rank if case == "made with another seed" else 1
    trainer = cw.Trainer(net, {"lr": 0.02, "seed": seed}, plan=plan, device=device)
    return {"losses": [float(trainer.step(batch(0)))]}


def module() -> Labels:
    torch.manual_seed(3)
    return Labels().double()


def model() -> cw.Model:
    torch.manual_seed(3)
    return cw.Model(nn.Linear(2, 3), cw.LSTM(3, WIDTH, num_layers=2, dropout=0.2), Head()).double()


def batch(seed: int, lanes: int = B) -> cw.Batch:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(T, lanes, 2, generator=draw, dtype=torch.float64)
    return cw.Batch.of(x, torch.randint(0, CLASSES, (T, lanes), generator=draw), fresh=seed == 0)


def labelled(seed: int, lanes: int) -> cw.Batch:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(T, lanes, 2, generator=draw, dtype=torch.float64)
    return cw.Batch.of(x, torch.randint(0, CLASSES, (lanes,), generator=draw), [T, 2, 5, 3][:lanes], pooled=True)


def few(seed: int) -> cw.Batch:
    """Batches of fewer lanes than there are workers, which start anew or go on."""
    given = batch(seed, LANES[seed])
    return replace(given, fresh=torch.full((LANES[seed],), STARTS[seed]), goes_on=not STARTS[seed])


def adamw(net: cw.Model) -> torch.optim.Optimizer:
    weights = [p for p in net.parameters() if p.dim() > 1]
    biases = [p for p in net.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": weights}], lr=0.02, weight_decay=0.1)


def optimizer_for(case: str, net: cw.Model) -> torch.optim.Optimizer | None:
    if case.startswith("Adagrad"):  # has its state from the start
        return torch.optim.Adagrad(net.parameters(), lr=0.02)
    return adamw(net) if case.startswith("own") else None


def train(case: str, plan: dict[str, Any], rank: int, folder: Path, device: str = "cpu") -> dict[str, Any]:
    """The losses and norms of the weights of a loop, as the same on every plan."""
    if case in MADE:
        return made(case, plan, rank, device)
    if case == "any module":
        return train_module({} if "stages" in plan else plan, device)
    net = model()
    encoder = list(net.encoder.parameters())  # as they are before a trainer gives some up
    own = optimizer_for(case, net)
    keys = {"clip": 0.3} if own else {"clip": 0.3, "optimizer": "adamw", "lr": 0.02, "weight_decay": 0.1}
    trainer = cw.Trainer(net, keys, plan=plan, optimizer=own, device=device, keep_state=False if case.startswith("one lane") else None)
    net.head.counts_all = case == "one lane, all counted"
    losses: list[float] = []
    for number in range(STEPS):
        if "freezes" in case:
            net.lstm.requires_grad_(number not in (2, 3))
            net.head.out.weight.requires_grad_(number > 0)
        if case == "freezes what it has kept":
            for parameter in encoder:
                parameter.requires_grad_(number not in (1, 2))
        if case == "spares":
            net.head.spares = number == 2
        if case.startswith("there and back") and number == 2:
            net.float().double()  # which moves weights and gradients, as to save them in half precision would
        batches = [batch(number)]
        if case.startswith("one lane"):
            batches = [replace(batch(number, 1), fresh=torch.ones(1, dtype=torch.bool), goes_on=False)]
        if case.startswith("few lanes"):
            batches = [few(number)]
        if case == "state set by all" and number == 2:
            trainer.state = None
            trainer.position = replace(trainer.position, counted=7)
        if case == "notes of one" and rank == 0:
            net.head.best = losses
        if rank == 1 and number == 2:
            alter(case, trainer, net, batches)
        elif case.endswith("evaluation") and number == 2:
            trainer.evaluate([batch(0), batch(8)])
        losses.append(float(trainer.step(*batches)))
        if case.endswith("goes on") and number == 2:
            state = trainer.state_dict()
            assert bool(state) == (rank == 0)
            path = folder / "state.pt"
            if rank == 0:
                torch.save(state, path)
            net = model()
            trainer = cw.Trainer(net, keys, plan=plan, device=device, optimizer=optimizer_for(case, net))
            trainer.load_state_dict(torch.load(path, weights_only=True) if rank == 0 else {})
    if case == "one lane, all counted":
        losses.append(trainer.evaluate(batches))
    if case == "evaluates":
        losses.append(trainer.evaluate([batch(0), batch(8)]))
    if plan.get("stages", 1) > 1 and case == "plain":
        with pytest.raises(UserError, match=r"trainer\.state_dict"):
            net.state_dict()
        with pytest.raises(UserError, match=r"has no values here: another trainer has split the model into stages"):
            cw.Trainer(net, keys, plan=plan, device=device)
    weights = trainer.gathered()
    return {"losses": losses, "weights": {name: tensor.tolist() for name, tensor in weights.items()}}


def train_module(plan: dict[str, Any], device: str) -> dict[str, Any]:
    """A module that is no `cw.Model`, and batches of which some workers have no lane."""
    trainer = cw.Trainer(module(), {"optimizer": "adamw", "lr": 0.02}, plan=plan, device=device)
    losses = [float(trainer.step(labelled(number, LANES[number]))) for number in range(STEPS)]
    losses.append(trainer.evaluate([labelled(8, 1), labelled(9, 4)]))
    return {"losses": losses, "weights": {name: tensor.tolist() for name, tensor in trainer.gathered().items()}}


def alter(case: str, trainer: cw.Trainer, net: cw.Model, batches: list[cw.Batch]) -> None:
    """What rank 1 does otherwise in the third step."""
    match case:
        case "another batch":
            batches[0] = batch(77)
        case "another label":
            assert batches[0].targets is not None
            batches[0].targets[3, 1] = (batches[0].targets[3, 1] + 1) % CLASSES
        case "another number":
            batches.append(batch(3))
        case "another rate":
            trainer.set_lr(0.5)
        case "another buffer":
            net.head.scale.fill_(3.0)
        case "another count":
            trainer.position = replace(trainer.position, counted=7)
        case "another evaluation":
            trainer.evaluate([batch(0), batch(9)])
        case "a longer evaluation":
            trainer.evaluate([batch(0), batch(8), batch(8)])
        case "other weights":
            with torch.no_grad():
                for parameter in trainer.held.parameters.values():
                    parameter += 1e-9


def carry_out(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return train(job["case"], job["plan"], int(os.environ["RANK"]), folder, job["device"])
    except UserError as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(carry_out)
