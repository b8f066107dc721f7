"""Several sequences in a lane: every one once an epoch, hardly any padding, and the same losses and gradients as padded ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import carrywave as cw
from carrywave.data.batch import IGNORED
from carrywave.data.codec import Codec
from carrywave.data.files.label_sets import NAMES
from carrywave.data.loader import Share, build
from carrywave.data.order import Cursor, Window
from carrywave.data.packing import PackedOrder
from carrywave.data.sequences import Sequences, View
from carrywave.errors import SpecError
from carrywave.parallel.mesh import Mesh
from carrywave.plan.plan import Plan
from carrywave.runs.evaluation import order_for
from carrywave.spec.data_spec import PACKED_WINDOWS
from carrywave.spec.load import parse
from carrywave.step.trainer import Trainer
from carrywave.tasks.task import Task


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    tokens=st.integers(1, 200),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 3),
)
@settings(max_examples=100)
def test_every_sequence_is_whole_and_seen_once(lengths: list[int], tokens: int, seed: int, epoch: int) -> None:
    order, again = (PackedOrder(np.array(lengths), tokens=tokens, seed=seed) for _ in range(2))
    seen: list[int] = []
    shapes = set()
    for step in range(order.num_steps(epoch)):
        window, same = order.window(Cursor(epoch, step)), again.window(Cursor(epoch, step))
        found, other = window.segments, same.segments
        assert found is not None
        assert other is not None
        assert all(np.array_equal(a, b) for a, b in zip(found, other, strict=True))
        used = np.zeros((window.steps, len(window.length)), np.int64)
        for lane, sequence, first, length in zip(*found[:4], strict=True):
            assert length == lengths[sequence]
            used[first : first + length, lane] += 1
        # No two share a step, and there is no gap between them.
        assert np.array_equal(used, np.arange(window.steps)[:, None] < window.length)
        assert np.bincount(found.lane).max() <= found.most == order.most
        assert np.array_equal(window.fresh, window.length > 0)
        assert max(1, tokens // window.steps) >= len(window.length)
        seen += found.sequence.tolist()
        shapes.add((window.steps, len(window.length)))
    assert sorted(seen) == list(range(len(lengths)))
    assert shapes == set(order.shapes(epoch))
    assert len(shapes) <= PACKED_WINDOWS


def test_the_waste_is_below_a_percent() -> None:
    """Of lengths from 5 to 1,000, spread evenly or as lengths of texts are."""
    draw = np.random.default_rng(0)
    for lengths in (draw.integers(5, 1001, 20_000), np.exp(draw.normal(4.5, 1.0, 20_000)).clip(5, 1000).astype(np.int64)):
        order = PackedOrder(lengths, tokens=16_384)
        assert order.waste(0) < 0.01
        assert sum(steps * lanes for steps, lanes in map(shape_of, windows(order))) * (1 - order.waste(0)) == pytest.approx(lengths.sum())


def windows(order: PackedOrder) -> list[Window]:
    return [order.window(Cursor(0, step)) for step in range(order.num_steps(0))]


def shape_of(window: Window) -> tuple[int, int]:
    return window.steps, len(window.length)


def test_epochs_differ() -> None:
    order = PackedOrder(np.arange(1, 60) % 13 + 1, tokens=64, seed=3)
    drawn = [[tuple(order.window(Cursor(epoch, step)).sequence) for step in range(order.num_steps(epoch))] for epoch in range(2)]
    assert drawn[0] != drawn[1]
    assert drawn[0] != [tuple(window.sequence) for window in windows(PackedOrder(np.arange(1, 60) % 13 + 1, tokens=64, seed=4))]


CASES: dict[str, dict[str, Any]] = {
    "classification": {"codec": {"labels": ("a", "b", "c")}, "model": {"pool": "mean"}},
    "classification both ways": {"codec": {"labels": ("a", "b", "c")}, "model": {"pool": "last", "bidirectional": True}},
    "regression": {"codec": {"target_mean": (0.0, 0.0), "target_std": (1.0, 1.0)}, "model": {"pool": "max"}},
    "tagging": {"codec": {"labels": ("a", "b", "c")}, "model": {}},
    "classification several": {"codec": {"labels": ("a", "b", "c"), "label_sets": NAMES}, "model": {"pool": "mean"}},
    "tagging several": {"codec": {"labels": ("a", "b", "c"), "label_sets": NAMES}, "model": {}},
    "language": {"codec": {}, "model": {}},
}


def task_of(name: str) -> tuple[Task, Sequences]:
    kind, asked, draw = name.split()[0], CASES[name], np.random.default_rng(1)
    lengths = draw.integers(2, 12, 23)
    rows = int(lengths.sum())
    codec = Codec(kind, "tokens", "int", size=7, **asked["codec"])
    labels = {"classification": draw.integers(3, size=23), "regression": draw.normal(size=(23, 2)).astype(np.float32)}.get(kind)
    tags = draw.integers(3, size=rows) if kind == "tagging" else None
    if several := "several" in name:
        sets = draw.integers(2, size=(23 if tags is None else rows, 3)).astype(np.float32)
        sets[::5], sets[1::4, 0] = np.nan, np.nan  # without a target, and a label that is not known
        labels, tags = (sets, None) if tags is None else (None, sets)
    data = Sequences(draw.integers(7, size=rows).astype(np.uint8), np.cumsum(lengths) - lengths, lengths, labels, tags)
    model = {"hidden": 5, "layers": 2, "learned_carry": True, "dropout": 0.0, **asked["model"]}
    train = {"precision": "fp64", "optimizer": "sgd", "lr": 1.0, "clip": None, "alpha": 0.3, "beta": 0.4}
    batch = {"tokens": 40, "pack": True}
    spec = parse({"task": kind, "data": {"multi_label": several}, "model": model, "batch": batch, "train": train})
    return Task.of(spec, codec, codec.facts(data), data), data


def padded(view: View, window: Window) -> Window:
    """The same sequences, each in a lane of its own."""
    assert window.segments is not None
    sequence = window.segments.sequence
    length = view.lengths[sequence]
    return Window(int(length.max()), sequence, np.zeros_like(sequence), length, np.ones(len(sequence), np.bool_))


def trained(task: Task, data: Sequences, batch: cw.Batch, plan: dict[str, Any]) -> dict[str, Tensor]:
    model = task.model(data)
    trainer = Trainer(model, task.spec.train, mesh=Mesh.alone(torch.device("cpu"), Plan(**plan)), keep_state=False)
    loss = float(trainer.step(batch))
    return {"loss": torch.tensor(loss, dtype=torch.float64)} | {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_packed_sequences_train_as_padded_ones(name: str) -> None:
    task, data = task_of(name)
    view = task.part("train", data).view
    order = order_for(task.spec, view, training=True)
    assert isinstance(order, PackedOrder)
    assert not isinstance(order_for(task.spec, view, training=False), PackedOrder)  # what is predicted needs lanes of its own
    for step in (0, order.num_steps(0) - 1):
        window, cursor = order.window(Cursor(0, step)), Cursor(0, step)
        packed, apart = build(view, window, cursor), build(view, padded(view, window), cursor)
        assert packed.changes == apart.changes
        plan = {"chunk_steps": None if "both" in name else 3, "micro_batches": 2}
        # float64, another order of summation
        torch.testing.assert_close(trained(task, data, packed, plan), trained(task, data, apart, {}), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("of", [2, 3, 9])
def test_shares_are_parts_of_the_batch(name: str, of: int) -> None:
    task, data = task_of(name)
    view = task.part("train", data).view
    order = order_for(task.spec, view, training=True)
    for step in range(order.num_steps(0)):
        window, cursor = order.window(Cursor(0, step)), Cursor(0, step)
        whole, parts = build(view, window, cursor), [build(view, window, cursor, share=Share(index, of)) for index in range(of)]
        held = [part for part in parts if not part.idle or part.lengths.any()]
        for field in ("inputs", "targets", "resets"):
            joined = torch.cat([getattr(part, field) for part in held], dim=1)
            assert torch.equal(torch.nan_to_num(joined.double()), torch.nan_to_num(getattr(whole, field)[:, : joined.shape[1]].double()))
        assert {(part.cells, part.changes, part.sequences) for part in parts} == {(whole.cells, whole.changes, whole.sequences)}
        for part in parts:
            if part.idle:
                assert part.targets is not None
                assert not torch.isfinite(part.targets).any() if part.targets.is_floating_point() else (part.targets == IGNORED).all()


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(SpecError, match=r"batch.pack is for separate sequences, not for streams"):
        parse({"task": "language", "batch": {"pack": True}})
    with pytest.raises(SpecError, match=r"model.front reads over the edges of packed sequences"):
        parse(
            {
                "task": "classification",
                "model": {"front": [{"channels": 4, "kernel": 3, "stride": 1}]},
                "batch": {"pack": True, "tokens": 64},
            }
        )
    with pytest.raises(SpecError, match=r"data.augment changes the lengths"):
        parse({"task": "classification", "data": {"augment": {"noise": 0.1}}, "batch": {"pack": True, "tokens": 64}})
