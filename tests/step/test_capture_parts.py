"""What is recorded, when it is replayed, and that it gives the bits of what is not recorded; graphs are emulated on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "one_answer"))
from _emulated_graphs import emulate

from carrywave.data.batch import Batch
from carrywave.data.sequences import View
from carrywave.model.dropout import Dropout
from carrywave.model.encoders import Embedding, Numbers
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.pooled import PooledSoftmax
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.model.state import State
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.sums.group_sums import GroupSum
from carrywave.plan.plan import Plan
from carrywave.prediction.evaluation import Kept, passes
from carrywave.spec.load import parse
from carrywave.step.gradients import Gradients, Summed
from carrywave.step.graphs.capture import Capture
from carrywave.step.passes.jobs import flatten
from carrywave.step.trainer import Trainer
from carrywave.tasks.kind import Part

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)


def language(**options: Any) -> Model:
    torch.manual_seed(0)
    lstm = LSTM(4, 4, 2, dropout=0.3, **options)
    return Model(Embedding(9, 4, 0.1), lstm, Softmax(4, 9), dropout_in=Dropout(0.2), dropout_out=Dropout(0.2))


def classes() -> Model:
    torch.manual_seed(0)
    return Model(Numbers(3), LSTM(3, 4, 1), PooledSoftmax(4, 2))


def words(steps: int, lanes: int, number: int, *, fresh: bool = False) -> Batch:
    draw = torch.Generator().manual_seed(number)
    inputs, targets = torch.randint(9, (2, steps, lanes), generator=draw)
    return Batch.of(inputs, targets, fresh=fresh, step=number)


def sequences(lengths: Sequence[int], number: int) -> Batch:
    draw = torch.Generator().manual_seed(number)
    inputs = torch.randn(max(lengths), len(lengths), 3, generator=draw)
    return Batch.of(inputs, torch.randint(2, (len(lengths),), generator=draw), list(lengths), step=number, pooled=True)


def pair(model: Any, *, keep_state: bool, plan: Plan | None = None, **train: Any) -> tuple[Trainer, Trainer]:
    """A trainer that records, and one that does not."""
    spec = parse({"train": {"clip": 0.5, "precision": "fp32", **train}}, defaults=False).train
    both = tuple(Trainer(model(), spec, plan=plan, device="cpu", keep_state=keep_state) for _ in range(2))
    both[0].capture = Capture(CPU)
    return both  # type: ignore[return-value]


def same(recorded: Trainer, plain: Trainer) -> None:
    for (name, own), (_, other) in zip(recorded.named, plain.named, strict=True):
        assert torch.equal(own, other), name
        assert (own.grad is None) == (other.grad is None), name
    states = [[] if each.state is None else flatten(each.state) for each in (recorded, plain)]
    assert all(torch.equal(own, other) for own, other in zip(*states, strict=True))


def counted(trainer: Trainer, kind: str) -> int:
    assert trainer.capture is not None
    return trainer.capture.replays[kind]


def looking(looks: Callable[[], bool]) -> Callable[[], Model]:
    """A model whose loss is read on the host while `looks` says so, which no recording allows."""

    class Looking(Softmax):
        def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            loss, count = super().loss(y, target)
            assert not looks() or loss.item() > 0
            return loss, count

    def model() -> Model:
        torch.manual_seed(0)
        return Model(Embedding(9, 4), LSTM(4, 4), Looking(4, 9))

    return model


def test_a_batch_that_cannot_be_recorded_says_so_once_and_steps_go_on() -> None:
    recorded, plain = pair(looking(lambda: True), keep_state=True)
    for number in range(4):
        batches = [words(4, 2, 2 * number), words(4, 2, 2 * number + 1)]
        plain.step(*batches)
        if number == 1:
            with pytest.warns(UserWarning, match="steps could not be captured as CUDA graphs"):
                recorded.step(*batches)
        else:
            recorded.step(*batches)
    same(recorded, plain)
    assert counted(recorded, "batch") == 0
    assert counted(recorded, "update") == 3  # which reads nothing on the host


def test_a_recording_that_fails_once_is_tried_again() -> None:
    now = 0

    recorded, plain = pair(looking(lambda: now == 1), keep_state=True)
    for now in range(5):
        for trainer in (recorded, plain):
            trainer.step(words(4, 2, now))
    same(recorded, plain)
    assert recorded.capture is not None
    assert recorded.capture.failure("step").startswith("operation not permitted when stream is capturing (stage.py, line ")
    assert counted(recorded, "step") == 3  # all but the first, and the one whose recording failed


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group of one worker: its sums are what went in."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "meeting"), 1), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield dist.group.WORLD  # type: ignore[misc]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("several", [1, 2])
def test_replicas_sum_between_the_recordings(several: int, alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, plain = pair(language, keep_state=True)
    log: list[str] = []
    plain_begin, plain_reduce = Gradients.begin, dist.all_reduce

    def begin(self: Gradients) -> None:
        log.append("begin")
        plain_begin(self)

    def reduce(tensor: Tensor, **options: Any) -> Any:
        log.append("sum")
        tensor.mul_(2.0)  # as if another worker had the same
        return plain_reduce(tensor, **options)

    monkeypatch.setattr(Gradients, "begin", begin)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    for trainer in (recorded, plain):
        own = [p for _, p in trainer.named]
        trainer.engine.gradients = Gradients(own, own, [Summed(GroupSum(alone), own)])
        log.clear()
        for number in range(4):
            before = counted(recorded, "batch")
            trainer.step(*(words(4, 2, number * several + at) for at in range(several)))
            if trainer is recorded:
                assert counted(recorded, "batch") - before == (several if number else several - 1)
        assert log == ["begin", "sum"] * 4
    same(recorded, plain)
    assert counted(recorded, "update") == counted(recorded, "step") == 0


class Doubled:
    """A sum on the stream of the device: as if another worker had the same."""

    on_device = True
    overlaps = False

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.mul_(2.0)


def test_steps_whose_gradients_are_looked_up_on_the_host_are_not_recorded_and_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that has no lanes in the last batch of every epoch lacks all gradients there; its other steps are one recording."""
    recorded, plain = pair(classes, keep_state=False)
    part = "carrywave.step.trainer.local_part"
    monkeypatch.setattr(part, lambda mesh, stage, batch, **_: batch.take(0, 0, pooled=True) if batch.lanes.shape[0] == 1 else batch)
    for trainer in (recorded, plain):
        own = [p for _, p in trainer.named]
        trainer.engine.gradients = Gradients(own, own, [Summed(Doubled(), own)])
        for number, lengths in enumerate([(4, 2), (3,), (4, 2), (4, 2), (3,), (4, 2), (3,), (4, 2)]):
            trainer.update(sequences(lengths, number))
    same(recorded, plain)
    assert recorded.capture is not None
    assert counted(recorded, "step") == 4
    assert recorded.capture.held("step") == 1
    assert counted(recorded, "batch") == 1  # without lanes, from the third time on


def stream_part(rows: int) -> Part:
    tokens = np.random.default_rng(0).integers(9, size=rows + 1)
    view = View(tokens, np.array([0]), np.array([rows]), targets_at=lambda at: tokens[at + 1])
    return Part("valid", None, view)  # type: ignore[arg-type]


def bucket_part() -> Part:
    draw = np.random.default_rng(2)
    lengths = draw.integers(2, 9, size=40)
    inputs = draw.normal(size=(int(lengths.sum()), 3)).astype(np.float32)
    return Part("valid", None, View(inputs, np.cumsum(lengths) - lengths, lengths, labels=draw.integers(2, size=40)))  # type: ignore[arg-type]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("kind", ["streams", "buckets"])
@pytest.mark.parametrize("chunk_steps", [None, 3])
def test_evaluation_from_recordings(kind: str, observed: bool, chunk_steps: int | None) -> None:
    streams = kind == "streams"
    model, part = (language(), stream_part(200)) if streams else (classes(), bucket_part())
    batch = {"lanes": 4, "steps": 8} if streams else {"tokens": 24}
    spec = parse({"task": "language" if streams else "classification", "batch": batch, "train": {"precision": "fp32"}}, defaults=False)
    mesh = Mesh.alone(CPU, Plan(chunk_steps=chunk_steps))
    seen: list[Tensor] = []

    def observe(out: Tensor, targets: Tensor | None, *_: object) -> None:
        assert targets is not None
        assert not out.requires_grad
        seen.append(out.sum() + targets.sum())

    def judge(capture: Capture | None) -> tuple[list[Tensor], int]:
        seen.clear()
        sums, shapes = [], set()
        for given, outcome in passes(model, spec, part, mesh=mesh, observe=observe if observed else None, kept=Kept(capture=capture)):
            shapes.add((tuple(given.inputs.shape), given.real == given.inputs.shape[0] * given.inputs.shape[1]))
            sums += [outcome.loss_sum.clone(), outcome.count.clone(), *(tensor.clone() for tensor in flatten(outcome.state))]
        assert bool(seen) == observed
        return [*sums, *seen], len(shapes)

    capture = Capture(CPU)
    expected, shapes = judge(None)
    batches = sum(1 for _ in passes(model, spec, part, mesh=mesh))
    for turn in (1, 2):
        found, _ = judge(capture)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert capture.replays["evaluation"] == turn * batches - shapes
        with torch.no_grad():  # the next evaluation is of other weights, from the same recordings
            for parameter in model.parameters():
                parameter.mul_(0.5)
        expected, _ = judge(None)
        assert not torch.equal(found[0], expected[0])


def test_where_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.delenv("CARRYWAVE_CAPTURE", raising=False)
    model = language()
    assert Capture.of(cuda, Plan.serial(), model) is not None
    assert Capture.of(cuda, replace(Plan.serial(), replicas=2), model) is not None
    assert Capture.of(cuda, Plan(stages=2, cuts=(1,), chunk_steps=2), model) is None
    assert Capture.of(CPU, Plan.serial(), model) is None
    monkeypatch.setenv("CARRYWAVE_CAPTURE", "0")
    assert Capture.of(cuda, Plan.serial(), model) is None


@pytest.mark.parametrize("parts", [{"c"}, {"h"}, {"h", "c"}], ids=["c", "h", "both, exchanged"])
def test_any_part_of_a_carry_that_was_set_enters_a_replay(parts: set[str]) -> None:
    """Only the first part had been looked at, so that a replay went on from the old c."""
    recorded, plain = pair(language, keep_state=True)
    for trainer in (recorded, plain):
        for number in range(5):
            trainer.step(words(4, 2, number, fresh=number == 0))
            if number == 3:
                assert trainer.state is not None
                swap = len(parts) == 2
                trainer.state = State(
                    tuple(
                        type(each)(each.c if swap else each.h + ("h" in parts), each.h if swap else each.c + ("c" in parts))
                        for each in trainer.state.carries
                    )
                )
    same(recorded, plain)
    assert counted(recorded, "step") >= 3
