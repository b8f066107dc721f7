"""Recordings on a GPU give the bits of what is not recorded: accumulated batches of several shapes, averaging, evaluation, replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.data.loader import build
from carrywave.data.order import Cursor, SequenceOrder
from carrywave.data.sequences import View
from carrywave.model.dropout import Dropout
from carrywave.model.encoders import Embedding, Numbers
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.ctc import Ctc
from carrywave.model.heads.forecast import Forecast
from carrywave.model.heads.pooled import PooledSoftmax
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.model.over_time.front import Front
from carrywave.parallel.mesh import Mesh
from carrywave.plan.plan import Plan
from carrywave.prediction.evaluation import Kept, passes
from carrywave.spec.load import parse
from carrywave.step.graphs.capture import Capture
from carrywave.step.optim.optimizer import NTASGD
from carrywave.step.passes.jobs import flatten
from carrywave.step.trainer import Trainer
from carrywave.tasks.kind import Part

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CUDA = torch.device("cuda")


def language(**options: Any) -> Model:
    torch.manual_seed(0)
    lstm = LSTM(32, 32, 2, dropout=0.3, **options)
    return Model(Embedding(50, 32, 0.1), lstm, Softmax(32, 50), dropout_in=Dropout(0.2), dropout_out=Dropout(0.2))


def classes() -> Model:
    torch.manual_seed(0)
    return Model(Numbers(5), LSTM(5, 24, 2, dropout=0.2), PooledSoftmax(24, 4))


def signals() -> Model:
    torch.manual_seed(0)
    front = Front(5, [{"channels": 16, "kernel": 5, "stride": 2}, {"channels": 24, "kernel": 3, "stride": 2}], 0.2)
    head = PooledSoftmax(48, 4, "mean_max", label_smoothing=0.1)
    return Model(front, LSTM(24, 24, bidirectional=True), head)


def windows(shapes: list[int], lanes: int = 7) -> list[Batch]:
    """One stream after the other, of windows of these numbers of steps."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for number, steps in enumerate(shapes):
        inputs, targets = torch.randint(50, (2, steps, lanes), generator=draw)
        made.append(Batch.of(inputs, targets, fresh=number == 0, step=number).to(CUDA))
    return made


def bucket_view() -> View:
    draw = np.random.default_rng(2)
    lengths = draw.integers(3, 40, size=200)
    inputs = draw.normal(size=(int(lengths.sum()), 5)).astype(np.float32)
    return View(inputs, np.cumsum(lengths) - lengths, lengths, labels=draw.integers(4, size=200))


def pair(model: Any, monkeypatch: pytest.MonkeyPatch, *, keep_state: bool, plan: Plan | None = None, **train: Any) -> list[Trainer]:
    """A trainer that does not record, and one that does."""
    both = []
    for wanted in ("0", "1"):
        monkeypatch.setenv("CARRYWAVE_CAPTURE", wanted)
        spec = parse({"train": {"clip": 0.5, "precision": "fp32", **train}}, defaults=False).train
        both.append(Trainer(model(), spec, plan=plan, device="cuda", keep_state=keep_state))
    assert both[0].capture is None
    assert both[1].capture is not None
    return both


def check(plain: Trainer, recorded: Trainer, replays: dict[str, int]) -> None:
    for (name, own), (_, other) in zip(plain.named, recorded.named, strict=True):
        assert torch.equal(own, other), name
    states = [[] if each.state is None else flatten(each.state) for each in (plain, recorded)]
    assert all(torch.equal(own, other) for own, other in zip(*states, strict=True))
    assert recorded.capture is not None
    for kind, least in replays.items():
        assert recorded.capture.replays[kind] >= least, kind


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"optimizer": "sgd", "lr": 0.5, "momentum": 0.9},
        {"optimizer": "adamw", "weight_decay": 0.1, "alpha": 1.0, "beta": 0.5},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "bf16", "on_nan": "skip"},
    ],
)
def test_accumulated_windows_of_several_shapes(monkeypatch: pytest.MonkeyPatch, train: dict[str, Any]) -> None:
    shapes = [16, 9, 16, 16, 12, 9, 16, 9, 9, 12, 16, 16, 16, 9, 12]
    plain, recorded = pair(language, monkeypatch, keep_state=True, **train)
    losses = []
    for trainer in (plain, recorded):
        batches = windows(shapes)
        losses.append([])
        for number in range(0, len(batches), 3):
            trainer.set_lr(1e-2 / (1 + number))
            losses[-1].append(trainer.step(*batches[number : number + 3]).item())
    assert losses[0] == losses[1]
    # The first window comes with a carry of float32, later ones of a shape perhaps with another.
    check(plain, recorded, {"batch": len(shapes) - 4, "update": len(shapes) // 3 - 1})


@pytest.mark.parametrize("options", [{"learned_carry": True}, {"weight_drop": 0.4, "locked": True}, {"layer_norm": True}])
@pytest.mark.parametrize(
    "plan", [Plan(chunk_steps=5, micro_batches=2), Plan(chunk_steps=5, recompute=True), Plan(chunk_steps=2, recompute="twice")]
)
def test_accumulation_over_chunks_and_micro_batches(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], plan: Plan) -> None:
    shapes = [16, 4, 16, 4, 16, 4, 16, 16]
    plain, recorded = pair(lambda: language(**options), monkeypatch, keep_state=True, plan=plan)
    for trainer in (plain, recorded):
        batches = windows(shapes)
        for number in range(0, len(batches), 2):
            trainer.step(*batches[number : number + 2])
    check(plain, recorded, {"batch": len(shapes) - 3, "update": len(shapes) // 2 - 1})


@pytest.mark.parametrize("make", [classes, signals])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_accumulated_buckets(monkeypatch: pytest.MonkeyPatch, precision: str, make: Callable[[], Model]) -> None:
    """Groups of shapes hardly ever come again; nearly all batches are replayed nevertheless."""
    view = bucket_view()
    order = SequenceOrder(view.lengths, tokens=128)
    places = [Cursor(epoch, step) for epoch in range(3) for step in range(order.num_steps(epoch))]
    plain, recorded = pair(make, monkeypatch, keep_state=False, precision=precision)
    for trainer in (plain, recorded):
        batches = [build(view, order.window(place), place).to(CUDA) for place in places]
        for number in range(0, len(batches), 4):
            trainer.step(*batches[number : number + 4])
    shapes = {(tuple(batch.inputs.shape), batch.real == batch.inputs.shape[0] * batch.inputs.shape[1]) for batch in batches}
    assert len(shapes) <= 64
    check(plain, recorded, {"batch": len(batches) - len(shapes) - 1, "update": len(batches) // 4 - 2})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_transcriptions(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Labels and lengths stay on the device, so that the whole step is recorded."""

    def make() -> Model:
        torch.manual_seed(0)
        return Model(Numbers(5), LSTM(5, 24, 2, dropout=0.2, bidirectional=True), Ctc(48, 6, upsample=2))

    draw = torch.Generator().manual_seed(4)
    batches = []
    for number in range(10):
        lengths, count = torch.randint(6, 13, (9,), generator=draw), torch.randint(0, 7, (9, 1), generator=draw)
        labels = torch.randint(6, (9, 6), generator=draw).masked_fill(torch.arange(6) >= count, -1)
        inputs = torch.randn(12, 9, 5, generator=draw)
        batches.append(Batch.of(inputs, labels, lengths, pooled=True, step=number).to(CUDA))
    plain, recorded = pair(make, monkeypatch, keep_state=False, precision=precision)
    for trainer in (plain, recorded):
        for batch in batches:
            assert bool(torch.as_tensor(trainer.step(batch)).isfinite())
    check(plain, recorded, {"step": 7})


def test_an_overflow_is_skipped_from_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, recorded = pair(language, monkeypatch, keep_state=True, precision="fp16", clip=None)
    for trainer in (plain, recorded):
        assert trainer.scaler is not None
        batches = windows([12] * 12)
        for number in range(0, len(batches), 2):
            if number == 6:
                trainer.scaler.scale.fill_(2.0**40)
            trainer.step(*batches[number : number + 2])
    check(plain, recorded, {"batch": 9, "update": 4})
    assert plain.scaler is not None
    assert recorded.scaler is not None
    assert float(plain.scaler.scale) == float(recorded.scaler.scale) < 2.0**40


@pytest.mark.parametrize("several", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_averaging(monkeypatch: pytest.MonkeyPatch, several: int, precision: str, on_nan: str) -> None:
    plain, recorded = pair(
        language, monkeypatch, keep_state=True, precision=precision, on_nan=on_nan, optimizer="ntasgd", lr=1.0, weight_decay=1e-3
    )
    for trainer in (plain, recorded):
        assert isinstance(trainer.optimizer, NTASGD)
        batches = windows([12] * 18 * several)
        for number in range(18):
            trainer.set_lr(1.0 / (1 + number))
            if number in (6, 14):
                trainer.optimizer.trigger()
            if number == 10:
                trainer.optimizer.give_up()
            trainer.step(*batches[number * several : (number + 1) * several])
            with trainer.evaluation_weights(), torch.no_grad():
                trainer.model.eval()
                trainer.model(batches[0].inputs)
    check(plain, recorded, {"step" if several == 1 else "update": 18 - 4 - 1})
    for (name, own), (_, other) in zip(plain.named, recorded.named, strict=True):
        ours, theirs = plain.optimizer.state[own], recorded.optimizer.state[other]
        assert ours["count"].item() == theirs["count"].item() == 5
        assert torch.equal(ours["ax"], theirs["ax"]), name


@pytest.mark.parametrize("several", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_exponential_average(monkeypatch: pytest.MonkeyPatch, several: int, precision: str) -> None:
    plain, recorded = pair(language, monkeypatch, keep_state=True, precision=precision, on_nan="skip", ema=0.9)
    for trainer in (plain, recorded):
        batches = windows([12] * 8 * several)
        for number in range(8):
            if number == 4 and trainer.scaler is not None:
                trainer.scaler.scale.fill_(2.0**40)
            trainer.step(*batches[number * several : (number + 1) * several])
    check(plain, recorded, {"step" if several == 1 else "update": 7})
    for (name, own), (_, other) in zip(plain.named, recorded.named, strict=True):
        ours, theirs = plain.optimizer.state[own], recorded.optimizer.state[other]
        assert ours["count"].item() == theirs["count"].item()
        assert (ours["count"].item() == 8) == (precision == "fp32")  # overflows are skipped
        assert torch.equal(ours["ax"], theirs["ax"]), name


def test_gradients_apart_from_updates_between_recorded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, recorded = pair(language, monkeypatch, keep_state=True, precision="fp32")
    for trainer in (plain, recorded):
        for number, batch in enumerate(windows([12] * 8)):
            if number % 3 == 2:
                trainer.backward(batch)
                trainer.backward(batch, weight=0.5, again=True)
                trainer.apply()
            else:
                trainer.step(batch)
    check(plain, recorded, {"step": 5})
    for (name, own), (_, other) in zip(plain.named, recorded.named, strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert torch.equal(own.grad, other.grad), name  # of the last step, replayed


def evaluated(model: Model, task: str, batch: dict[str, int], view: View, capture: Capture | None, **how: Any) -> list[Tensor]:
    spec = parse({"task": task, "batch": batch, "train": {"precision": how["precision"]}}, defaults=False)
    mesh = Mesh.alone(CUDA, Plan(chunk_steps=how["chunk_steps"]))
    found: list[Tensor] = []

    def observe(out: Tensor, targets: Tensor | None, *_: object) -> None:
        assert targets is not None
        found.append(out.float().sum() + targets.sum())

    part = Part("valid", None, view)  # type: ignore[arg-type]
    for _, outcome in passes(model, spec, part, mesh=mesh, observe=observe if how["observed"] else None, kept=Kept(capture=capture)):
        found += [outcome.loss_sum.clone(), outcome.count.clone(), *(tensor.clone() for tensor in flatten(outcome.state))]
    return found


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("kind", "chunk_steps"), [("streams", None), ("streams", 7), ("buckets", None)])
def test_evaluation(monkeypatch: pytest.MonkeyPatch, kind: str, chunk_steps: int | None, precision: str, observed: bool) -> None:
    tokens = np.random.default_rng(0).integers(50, size=1501)
    stream = View(tokens, np.array([0]), np.array([1500]), targets_at=lambda at: tokens[at + 1])
    given: tuple[Any, ...] = ("language", {"lanes": 7, "steps": 16}, stream)
    if kind == "buckets":
        given = ("classification", {"tokens": 128}, bucket_view())
    model = (language() if kind == "streams" else classes()).to(CUDA)
    how = {"precision": precision, "chunk_steps": chunk_steps, "observed": observed}
    capture = Capture(CUDA)
    for _ in range(3):
        replayed = evaluated(model, *given, capture, **how)
        monkeypatch.setenv("CARRYWAVE_CAPTURE", "0")
        plain = evaluated(model, *given, None, **how)
        monkeypatch.delenv("CARRYWAVE_CAPTURE")
        assert len(plain) == len(replayed)
        assert all(torch.equal(own, other) for own, other in zip(plain, replayed, strict=True))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
    assert capture.replays["evaluation"] > 12
    # Without one that lasts, a pass records for itself.
    found, again = (evaluated(model, *given, each, **how) for each in (None, capture))
    assert all(torch.equal(own, other) for own, other in zip(found, again, strict=True))


def test_training_and_evaluation_in_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(0).integers(50, size=401)
    view = View(tokens, np.array([0]), np.array([400]), targets_at=lambda at: tokens[at + 1])
    spec = parse({"task": "language", "batch": {"lanes": 7, "steps": 16}, "train": {"precision": "bf16"}}, defaults=False)
    plain, recorded = pair(language, monkeypatch, keep_state=True, precision="bf16")
    losses: list[list[Tensor]] = [[], []]
    for trainer, found in zip((plain, recorded), losses, strict=True):
        monkeypatch.setenv("CARRYWAVE_CAPTURE", "0" if trainer is plain else "1")
        batches = windows([16, 9, 12, 16, 16, 9, 9, 12, 16, 12, 9, 16])
        for number in range(6):
            several = batches[number * 2 : number * 2 + (1 if number % 3 == 2 else 2)]
            found.append(trainer.step(*several).clone())
            part = Part("valid", None, view)  # type: ignore[arg-type]
            for _, outcome in passes(trainer.model, spec, part, mesh=trainer.mesh, kept=Kept(trainer.stage, trainer.capture)):
                found.append(outcome.loss_sum.clone())
    assert all(torch.equal(own, other) for own, other in zip(*losses, strict=True))
    check(plain, recorded, {"batch": 4, "update": 2, "evaluation": 15})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_quantile_forecasts_are_recorded(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    def forecast() -> Model:
        torch.manual_seed(0)
        return Model(Numbers(5), LSTM(5, 24, 2, dropout=0.2), Forecast(24, 3, 2, (0.1, 0.5, 0.9)))

    draw = torch.Generator().manual_seed(1)
    batches = [
        Batch.of(torch.randn(12, 7, 5, generator=draw), torch.randn(12, 7, 3, 2, generator=draw), step=number).to(CUDA)
        for number in range(5)
    ]
    plain, recorded = pair(forecast, monkeypatch, keep_state=False, precision=precision)
    losses = [[trainer.step(batch).item() for batch in batches] for trainer in (plain, recorded)]
    assert losses[0] == losses[1]
    assert recorded.capture is not None
    assert recorded.capture.failure("step") == ""
    check(plain, recorded, {"step": 3})
