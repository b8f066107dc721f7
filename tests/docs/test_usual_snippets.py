"""Each row of docs/coming-from.md: the usual snippet gives the number that the page calls wrong, and carrywave gives the right one.

The snippets stand here as programs have them, without processes: what several ranks do is done in turn, and averaged as DDP does.
"""

from __future__ import annotations

import copy
import json
import re
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import DistNetworkError, TCPStore
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import carrywave as cw
from carrywave.data.loader import Share, build
from carrywave.data.order import Cursor, SequenceOrder
from carrywave.data.sequences import View
from carrywave.parallel.startup.launcher_env import WORKER, WorkerFile
from carrywave.parallel.startup.rendezvous import find_store

PAGE = (Path(__file__).parents[2] / "docs/coming-from.md").read_text("utf-8")
IGNORED = -100


def says(heading: str, *numbers: str) -> None:
    """The section of the page has these numbers, each as it is written there."""
    [section] = [each for each in re.split(r"^### ", PAGE, flags=re.MULTILINE) if each.startswith(f"{heading}\n")]
    for number in numbers:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", section), f"{heading}: {number} is not on the page"


class Head(nn.Module):
    """Two classes at each step; the loss is a sum and a count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 2)

    def forward(self, y: Tensor) -> Tensor:
        return self.out(y)

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total = nn.functional.cross_entropy(self(y).flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")
        return total, (target != IGNORED).sum()


def small_model() -> cw.Model:
    torch.manual_seed(1)
    return cw.Model(nn.Linear(3, 8), cw.LSTM(8, 8), Head(8)).double()


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def error(found: Tensor, right: Tensor) -> float:
    return float((found - right).detach().norm() / right.detach().norm())


def test_a_loss_averaged_over_ranks() -> None:
    model = small_model()
    with torch.no_grad():
        model.head.out.bias.copy_(torch.tensor([0.5, -0.5]))  # the long sequence has been learned, the short one has not
    lengths = [20, 2]  # rank 0 has a sequence of 20 steps, rank 1 one of 2
    x = torch.randn(20, 2, 3, dtype=torch.float64)
    target = torch.tensor([0, 1]).expand(20, 2).clone()  # the two sequences pull in different directions
    for lane, length in enumerate(lengths):
        target[length:, lane] = IGNORED

    # Usual: each rank takes the mean over its own targets, and DDP takes the mean over the ranks.
    ranks = [copy.deepcopy(model) for _ in lengths]
    means = []
    for lane, rank in enumerate(ranks):
        logits = rank.output(*rank(x[:, lane : lane + 1]))
        mean = nn.functional.cross_entropy(logits.flatten(0, 1), target[:, lane], ignore_index=IGNORED)
        mean.backward()
        means.append(mean.item())
    usual, usual_gradient = sum(means) / 2, (gradients(ranks[0]) + gradients(ranks[1])) / 2

    # Right: the mean over all 22 targets.
    alone = copy.deepcopy(model)
    nn.functional.cross_entropy(alone.output(*alone(x)).flatten(0, 1), target.flatten(), ignore_index=IGNORED).backward()
    right = (20 * means[0] + 2 * means[1]) / 22

    # Ours, with the two lanes apart from each other, as on two replicas (tests/distributed has those as processes).
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    trainer = cw.Trainer(model, {"optimizer": "sgd", "lr": 1.0, "precision": "fp64"}, plan={"micro_batches": 2})
    ours = trainer.step(cw.Batch.of(x, target, lengths=lengths)).item()
    moved = before - torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert ours == pytest.approx(right, rel=1e-12)
    assert error(moved, gradients(alone)) < 1e-12  # float64
    assert error(usual_gradient, gradients(alone)) > 0.5
    assert abs(usual - right) > 0.05
    says("Averaging a loss over ranks", f"{usual:.3f}", f"{right:.3f}", f"{100 * error(usual_gradient, gradients(alone)):.0f}%")


def test_padding_read_as_the_last_step() -> None:
    torch.manual_seed(1)
    theirs = nn.LSTM(3, 16, batch_first=True).double()
    x = torch.randn(2, 30, 3, dtype=torch.float64)
    lengths = [30, 10]
    x[1, 10:] = 0.0
    alone = theirs(x[1:, :10])[0][:, -1]  # what the short sequence gives by itself

    usual = theirs(x)[0][:, -1][1:]
    ours = cw.LSTM(3, 16, batch_first=True).double()
    ours.load_state_dict(theirs.state_dict())
    _, (h, _) = ours(x, lengths=lengths)

    assert error(h[-1][1:], alone) < 1e-12  # float64
    assert error(usual, alone) > 0.4
    says("Reading padding as the last step", f"{100 * error(usual, alone):.0f}%")


def test_a_dropped_tail_of_an_accumulation(tmp_path: Path) -> None:
    sequences, every = 10, 4
    steps = np.random.default_rng(1).normal(size=(sequences, 5, 2))
    labels = steps.sum(axis=(1, 2)) > 0

    # Usual: an optimizer step after every fourth batch.
    seen, pending, updates = 0, 0, 0
    for number, (batch,) in enumerate(DataLoader(TensorDataset(torch.tensor(steps)), batch_size=1)):
        pending += len(batch)
        if (number + 1) % every == 0:
            seen, pending, updates = seen + pending, 0, updates + 1
    assert (seen, updates, pending) == (8, 2, 2)

    # Ours: the last update has the two batches that are left, divided by their own number of targets.
    told = {"epochs": 1, "accumulate": every, "log_every": 1}
    result = cw.fit(
        {"hidden": 4, "layers": 1},
        (steps, labels),
        task="classification",
        data={"share": 0.0},
        batch={"tokens": 5},
        train=told,
        run=tmp_path / "run",
    )
    rows = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["split"] == "train"]
    assert trained[-1]["step"] == 3
    says("Dropping the tail of an accumulation", "8 of 10", "2 of 10", "takes 3 steps")


def test_a_fixed_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:  # another training on this machine, at the port of every tutorial
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        with pytest.raises(DistNetworkError, match="EADDRINUSE"):
            TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)

        # Ours: workers of one machine meet in a file, whatever port is set.
        monkeypatch.setenv("MASTER_PORT", str(port))
        file = WorkerFile(one_host=True, store=tmp_path / "store")
        monkeypatch.setenv(WORKER, file.write(tmp_path / "worker.json")[WORKER])
        first, second = (find_store(rank, seconds=5.0) for rank in range(2))
        first.set("here", "0")
        assert second.get("here") == b"0"


def test_unsharded_data() -> None:
    sequences, ranks = 10, 4
    data = TensorDataset(torch.arange(sequences))

    def seen(samplers: list[DistributedSampler[Tensor] | None]) -> np.ndarray:
        found = [int(each) for sampler in samplers for (batch,) in DataLoader(data, sampler=sampler) for each in batch]
        return np.bincount(found, minlength=sequences)

    unsharded = seen([None] * ranks)
    padded = seen([DistributedSampler(data, ranks, rank, shuffle=False) for rank in range(ranks)])
    dropped = seen([DistributedSampler(data, ranks, rank, shuffle=False, drop_last=True) for rank in range(ranks)])
    assert (unsharded == 4).all()
    assert (padded.sum(), (padded == 2).sum()) == (12, 2)
    assert (dropped.sum(), (dropped == 0).sum()) == (8, 2)

    view = View(np.zeros((sequences, 1), dtype=np.float32), starts=np.arange(sequences), lengths=np.ones(sequences, dtype=np.int64))
    order = SequenceOrder(view.lengths, tokens=6)
    ours = np.zeros(sequences, dtype=int)
    for step in range(order.num_steps(0)):
        for rank in range(ranks):
            cursor = Cursor(0, step)
            batch = build(view, order.window(cursor), cursor, share=Share(rank, ranks))
            for sequence in batch.sequence[batch.sequence >= 0]:
                ours[int(sequence)] += 1
    assert (ours == 1).all()
    says("Data that is not divided", "40", "12", "8", "All 10")


def test_state_lost_between_windows() -> None:
    torch.manual_seed(1)
    lstm = cw.LSTM(1, 16).double()
    x = torch.randn(64, 1, 1, dtype=torch.float64)
    whole, _ = lstm(x)

    usual = torch.cat([lstm(window)[0] for window in x.split(16)])
    windows, carry = [], None
    for window in x.split(16):
        y, carry = lstm(window, carry)
        windows.append(y)

    assert error(torch.cat(windows), whole) < 1e-12  # float64
    firsts = torch.arange(16, 64, 16)
    assert error(usual[firsts], whole[firsts]) > 0.5
    says("Losing the state between windows", f"{100 * error(usual[firsts], whole[firsts]):.0f}%", f"{100 * error(usual, whole):.0f}%")


def test_no_thread_is_left() -> None:
    """Stores and loaders above have ended what they started."""
    assert not [each for each in threading.enumerate() if each.name.startswith("carrywave-loader")]
