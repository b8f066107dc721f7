"""A reproducible trainer on one worker: near the plain one, the same bits from recordings, and its cost measured without a trace."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from _emulated_graphs import emulate

from carrywave.data.batch import Batch
from carrywave.data.loader import Loader
from carrywave.data.order import StreamOrder
from carrywave.data.sequences import View
from carrywave.errors import PlanError, UserError
from carrywave.model.dropout import Dropout
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.parallel.mesh import Mesh
from carrywave.plan.plan import Plan
from carrywave.runs.evaluation import evaluate
from carrywave.runs.watcher import Silent
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse
from carrywave.step.graphs.capture import Capture
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.passes.micro_batches import flatten
from carrywave.step.reproducible.shard_cost import cost, cost_line
from carrywave.step.trainer import Trainer
from carrywave.tasks.task import Part, Task
from carrywave.train.fit import train

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def language() -> Model:
    torch.manual_seed(0)
    encoder = Embedding(9, 4, 0.1)
    lstm = LSTM(4, 4, 2, dropout=0.3, weight_drop=0.2, learned_carry=True)
    return Model(encoder, lstm, Softmax(4, 9, tied=encoder.weight), dropout_in=Dropout(0.2), dropout_out=Dropout(0.2))


def words(steps: int, lanes: int, number: int, *, fresh: bool = False) -> Batch:
    draw = torch.Generator().manual_seed(number)
    inputs, targets = torch.randint(9, (2, steps, lanes), generator=draw)
    lengths = torch.randint(0, steps + 1, (lanes,), generator=draw) if number % 2 else None
    return Batch.of(inputs, targets, lengths, fresh=fresh, step=number)


def trainer_of(**train: Any) -> Trainer:
    asked = {"clip": 0.5, "precision": "fp32", "alpha": 0.3, "beta": 0.2, "reproducible": True, **train}
    return Trainer(language(), asked, device="cpu", keep_state=True)


def numbers(trainer: Trainer) -> dict[str, Tensor]:
    """All that a step leaves behind."""
    assert trainer.state is not None
    carries = {f"carry {place}": tensor for place, tensor in enumerate(flatten(trainer.state))}
    return dict(trainer.parameters()) | optimizers.state_tensors(trainer.optimizer, trainer.named) | carries


def same(one: Trainer, other: Trainer) -> None:
    ours, theirs = numbers(one), numbers(other)
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []


# Full batches and padded ones, more and fewer lanes than shards, and a step whose lanes change in number.
STEPS = [
    [words(4, 13, 0, fresh=True)],
    [words(3, 13, 1), words(4, 13, 2)],
    [words(4, 5, 4, fresh=True)],
    [words(4, 5, 6), words(3, 3, 3, fresh=True), words(4, 12, 8, fresh=True)],
    [words(4, 12, 10)],
]


def test_shards_give_the_answer_of_the_whole() -> None:
    shards, whole = trainer_of(precision="fp64"), trainer_of(precision="fp64", reproducible=False)
    for batches in STEPS:
        ours, theirs = shards.update(*batches), whole.update(*batches)
        for name in ("loss_sum", "count", "norm"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-12, atol=0)
    for name, tensor in numbers(whole).items():
        torch.testing.assert_close(numbers(shards)[name], tensor, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_parameter_that_no_shard_reaches_is_left_alone(batches: int, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight decay would move it, as it would not without shards, or with several workers."""
    emulate(monkeypatch)
    model = language()
    model.head.unused = nn.Parameter(torch.ones(3))
    trainer = Trainer(model, {"reproducible": True, "weight_decay": 0.1, "optimizer": "sgd"}, device="cpu", keep_state=True)
    trainer.capture = Capture(CPU) if recorded else None
    before = model.head.bias.detach().clone()
    for number in range(3):
        trainer.step(*(words(4, 13, batches * number + at, fresh=True) for at in range(batches)))
    assert model.head.unused.tolist() == [1.0] * 3
    assert model.head.unused.grad is None
    assert not torch.equal(model.head.bias, before)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_recordings_give_the_same_bits(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    recorded, plain = trainer_of(precision=precision), trainer_of(precision=precision)
    recorded.capture = capture = Capture(CPU)
    for number, batches in enumerate(STEPS * 2):
        if number == len(STEPS):
            cost(recorded, batches[0])  # which records, too
            capture.replays.clear()
        ours, theirs = recorded.update(*batches), plain.update(*batches)
        assert (float(ours.loss_sum), float(ours.norm)) == (float(theirs.loss_sum), float(theirs.norm))
    same(recorded, plain)
    # Shards of a shape share a recording, from the second on.
    assert capture.replays["batch"] > 4 * len(STEPS)
    assert capture.replays["step"] == capture.replays["update"] == 0


@pytest.mark.parametrize("lanes", [13, 3])
def test_evaluation_from_recordings_has_the_same_bits(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of one shape are computed in the same place, and each goes on from its own carry."""
    emulate(monkeypatch)
    tokens = np.random.default_rng(0).integers(9, size=301)
    part = Part("valid", None, View(tokens, np.array([0]), np.array([300]), targets_at=lambda at: tokens[at + 1]))  # type: ignore[arg-type]
    found = []
    for reproducible, capture in ((True, None), (True, Capture(CPU)), (False, None)):
        spec = parse({"batch": {"lanes": lanes, "steps": 5}, "train": {"reproducible": reproducible}})
        task = Task(spec, None, DataFacts(vocabulary=9))  # type: ignore[arg-type]
        found.append(evaluate(language(), task, part, mesh=Mesh.alone(CPU), capture=capture)["loss"])
        assert capture is None or capture.replays["evaluation"] > 8
    assert found[0] == found[1]
    assert found[0] == pytest.approx(found[2], rel=1e-6)


class Choosing(nn.Module):
    """Uses one of its parameters only where a lane asks for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.always, self.sometimes, self.never = (nn.Parameter(torch.randn(3)) for _ in range(3))

    def forward(self, x_TBF: Tensor) -> Tensor:
        y_TB = x_TBF @ self.always
        return y_TB + (x_TBF @ self.sometimes if bool((x_TBF > 2).any()) else 0.0)

    def loss(self, out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (out - target).square().sum(), torch.tensor(target.numel())


def test_a_parameter_that_only_some_shards_use() -> None:
    found = []
    for reproducible in (True, False):
        spec = {"optimizer": "sgd", "lr": 0.1, "precision": "fp64", "reproducible": reproducible}
        trainer = Trainer(Choosing(), spec, device="cpu")
        draw = torch.Generator().manual_seed(2)
        for _ in range(3):
            inputs = torch.rand(2, 9, 3, generator=draw, dtype=torch.float64)
            inputs[:, 4] += 2.0
            inputs[:, :4] *= 0.0  # what is not chosen there would have added nothing
            inputs[:, 5:] *= 0.0
            trainer.step(Batch.of(inputs, torch.ones(2, 9, dtype=torch.float64)))
        found.append(trainer.parameters())
    start = dict(Choosing().double().named_parameters())
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-12, atol=0)
        assert torch.equal(tensor, start[name]) == (name == "never")


def test_the_cost_leaves_no_trace() -> None:
    timed, plain = trainer_of(precision="fp16"), trainer_of(precision="fp16")
    for number, batches in enumerate(STEPS):
        if number in (0, 2):
            assert all(seconds > 0 for seconds in cost(timed, batches[0]))
        ours, theirs = timed.update(*batches), plain.update(*batches)
        assert float(ours.norm) == float(theirs.norm)
    same(timed, plain)


def test_the_cost_is_said_in_one_line() -> None:
    tokens = np.arange(200) % 9
    view = View(tokens, np.array([0]), np.array([199]), targets_at=lambda at: tokens[at + 1])
    loader = Loader(view, StreamOrder(view.lengths, lanes=12, steps=5), device=CPU)
    said = cost_line(trainer_of(), loader)
    number = r"[\d.e+-]+"
    assert re.fullmatch(
        rf"reproducible: 12 lanes in 8 shards; forward and backward of a batch take {number} ms instead of {number} ms "
        rf"\({number} times as long\)",
        said,
    )


def test_only_shards_have_a_cost() -> None:
    with pytest.raises(UserError, match=r"train\.reproducible"):
        cost(trainer_of(reproducible=False), words(3, 4, 0))


def test_a_plan_that_cannot_be_the_same_is_refused() -> None:
    with pytest.raises(PlanError, match=r"train\.reproducible"):
        Trainer(language(), {"reproducible": True}, mesh=Mesh.alone(CPU, Plan(micro_batches=2)))


class Listening(Silent):
    def __init__(self) -> None:
        self.summary, self.lines = "", list[str]()

    def begin(self, summary: str) -> None:
        self.summary = summary

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_a_run_says_what_it_does_and_what_it_costs(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 8)
    spec = {
        "data": {"train": str(tmp_path / "text.txt")},
        "model": {"hidden": 4, "layers": 1},
        "batch": {"lanes": 9, "steps": 6},
        "train": {"epochs": 1, "max_steps": 2, "reproducible": True},
    }
    watch = Listening()
    train(parse(spec), run=tmp_path / "run", device="cpu", watch=watch)
    assert any(line.startswith("shards    8 groups of lanes") for line in watch.summary.splitlines())
    assert [line for line in watch.lines if line.startswith("reproducible: 9 lanes in 8 shards; ")] != []


class _Reads(torch.autograd.Function):
    """The identity, whose backward reads a number on the host, which a capture does not allow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad.abs().max().item()
        return grad


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Reads.apply(self.table(x))
        return y


def test_a_pass_whose_capture_fails_halfway_is_run_as_if_it_had_not_been_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    trainers = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model = Model(_Encoder(), LSTM(4, 4, 1), Softmax(4, 9))
        trainers.append(Trainer(model, {"reproducible": True, "optimizer": "sgd", "lr": 0.5}, device="cpu", keep_state=True))
        trainers[-1].capture = Capture(CPU) if recorded else None
    for number in range(4):
        trainers[0].step(words(4, 13, 2 * number))
        with pytest.warns(UserWarning, match="CUDA graph") if number == 0 else nullcontext():  # its shards are of two shapes
            trainers[1].step(words(4, 13, 2 * number))
    same(*trainers)
