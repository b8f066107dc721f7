"""Recorded steps compute what unrecorded ones compute, for every shape, with carry, keys, learning rate and scaling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from carrywave.data.batch import Batch
from carrywave.data.loader import build
from carrywave.data.order import Cursor, SequenceOrder, StreamOrder
from carrywave.data.sequences import View
from carrywave.model.dropout import Dropout
from carrywave.model.encoders import Embedding, Numbers
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.pooled import PooledSoftmax
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.spec.load import parse
from carrywave.step.trainer import Trainer

pytestmark = pytest.mark.gpu


def trainer_of(model: Model, monkeypatch: pytest.MonkeyPatch, *, recorded: bool, streams: bool, **train: object) -> Trainer:
    monkeypatch.setenv("CARRYWAVE_CAPTURE", "1" if recorded else "0")
    return Trainer(
        model, parse({"train": {"clip": 0.5, "precision": "fp32", **train}}, defaults=False).train, device="cuda", keep_state=streams
    )


def language(**options: object) -> Model:
    torch.manual_seed(0)
    lstm = LSTM(32, 32, 2, dropout=0.3, **options)  # type: ignore[arg-type]
    return Model(Embedding(50, 32, 0.1), lstm, Softmax(32, 50), dropout_in=Dropout(0.2), dropout_out=Dropout(0.2))


def stream_batches() -> list[Batch]:
    tokens = np.random.default_rng(0).integers(50, size=1501)

    def following(rows: np.ndarray) -> np.ndarray:
        return tokens[rows + 1]

    view = View(tokens, np.array([0]), np.array([1500]), targets_at=following)
    order = StreamOrder(view.lengths, lanes=7, steps=16)
    return [build(view, order.window(Cursor(0, step)), Cursor(0, step)) for step in range(order.num_steps(0))]


def run(trainer: Trainer, batches: list[Batch]) -> list[float]:
    losses = []
    for number, batch in enumerate(batches):
        trainer.set_lr(1e-2 / (1 + number))
        losses.append(trainer.step(batch.to(torch.device("cuda"))).item())
    return losses


@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": "sgd", "lr": 0.5}, {"optimizer": "adamw", "weight_decay": 0.1}, {"precision": "fp16"}, {"precision": "bf16"}],
)
def test_streams(monkeypatch: pytest.MonkeyPatch, options: dict[str, object]) -> None:
    batches = stream_batches()
    results = []
    for recorded in (False, True):
        trainer = trainer_of(language(), monkeypatch, recorded=recorded, streams=True, **options)
        losses = run(trainer, batches)
        results.append((losses, trainer))
    (plain, unrecorded), (replayed, recorded_trainer) = results
    assert recorded_trainer.capture is not None
    assert recorded_trainer.capture.held("step") >= 1
    assert replayed == plain
    for (name, a), (_, b) in zip(unrecorded.named, recorded_trainer.named, strict=True):
        assert torch.equal(a, b), name


def test_a_step_that_cannot_be_recorded_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Looking(Softmax):
        def loss(self, y: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss, count = super().loss(y, target)
            assert loss.item() > 0  # reads the device on the host, which no recording allows
            return loss, count

    torch.manual_seed(0)
    model = Model(Embedding(50, 32), LSTM(32, 32), Looking(32, 50))
    trainer = trainer_of(model, monkeypatch, recorded=True, streams=True)
    batches = [batch.to(torch.device("cuda")) for batch in stream_batches()[:4]]
    first = trainer.step(batches[0]).item()
    trainer.step(batches[1])
    with pytest.warns(UserWarning, match="steps could not be captured as CUDA graphs"):
        trainer.step(batches[2])
    trainer.step(batches[3])
    assert trainer.step(batches[0]).item() < first


def test_buckets_of_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(2)
    lengths = draw.integers(3, 40, size=200)
    inputs = draw.normal(size=(int(lengths.sum()), 5)).astype(np.float32)
    view = View(inputs, np.cumsum(lengths) - lengths, lengths, labels=draw.integers(4, size=200))
    order = SequenceOrder(lengths, tokens=128)
    batches = [
        build(view, order.window(Cursor(epoch, step)), Cursor(epoch, step)) for epoch in range(3) for step in range(order.num_steps(epoch))
    ]
    ends = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model = Model(Numbers(5), LSTM(5, 24, 2, dropout=0.2), PooledSoftmax(24, 4))
        trainer = trainer_of(model, monkeypatch, recorded=recorded, streams=False)
        run(trainer, batches)
        ends.append(dict(trainer.named))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_full_batch_and_a_padded_one_of_one_shape_are_two_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = stream_batches()[0]
    short = replace(batch, lengths=batch.lengths - 3, real=batch.real - 21, targets=batch.targets)
    trainer = trainer_of(language(), monkeypatch, recorded=True, streams=True)
    for each in (batch, short, batch, short, batch, short):
        trainer.step(each.to(torch.device("cuda")))
    assert trainer.capture is not None
    assert trainer.capture.held("step") == 2
