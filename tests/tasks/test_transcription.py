"""Transcriptions: which labels fit, what batches hold of them, how outputs become labels, and how wrong those are."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from carrywave.data.batch import IGNORED
from carrywave.data.codec import Codec
from carrywave.data.holdout import pick
from carrywave.data.loader import build
from carrywave.data.order import Cursor, SequenceOrder
from carrywave.data.sequences import Sequences, View
from carrywave.errors import DataError
from carrywave.model.heads.alignments import negative_log_likelihood
from carrywave.spec.facts import DataFacts
from carrywave.spec.model_spec import ModelSpec
from carrywave.spec.signal_spec import FrontLayer
from carrywave.spec.spec import Spec
from carrywave.tasks.metrics.labels import LabelErrors, edit_distances
from carrywave.tasks.task import Task
from carrywave.tasks.transcription import beam_search, collapse, steps_needed

CODEC = Codec("transcription", "tokens", "int", size=5, labels=("a", "b", "c"))
LABELS = st.lists(st.integers(0, 2), max_size=6)


def view_of(name: str, data: Sequences, codec: Codec, model: ModelSpec) -> View:
    return Task(Spec(task="transcription", model=model), codec, DataFacts()).part(name, data).view


def data_of(rows: list[tuple[int, list[int]]]) -> Sequences:
    lengths = np.array([length for length, _ in rows], np.int64)
    ends = np.cumsum([len(labels) for _, labels in rows])
    spans = np.stack([ends - [len(labels) for _, labels in rows], ends], axis=1).astype(np.int64)
    labels = np.array([label for _, each in rows for label in each], np.int64)
    return Sequences(np.zeros(int(lengths.sum()), np.uint8), np.cumsum(lengths) - lengths, lengths, labels, spans=spans)


@given(rows=st.lists(LABELS, min_size=1, max_size=5))
def test_each_label_needs_a_step_and_equal_neighbours_a_blank(rows: list[list[int]]) -> None:
    data = data_of([(1, labels) for labels in rows])
    assert data.labels is not None
    assert data.spans is not None
    wanted = [len(labels) + sum(one == other for one, other in pairwise(labels)) for labels in rows]
    assert steps_needed(data.labels, data.spans).tolist() == wanted


def test_labels_that_cannot_fit_are_refused_with_what_would_fit_them() -> None:
    data = data_of([(4, [0, 1]), (2, [0, 0]), (1, [2])])
    with pytest.raises(DataError) as no:
        view_of("train", data, CODEC, ModelSpec())
    assert str(no.value) == (
        "train: a sequence has more labels than the model has answers: sequence 1 (a a) needs 3, with a blank between equal labels, but "
        "gets 2 for its 2 steps; set model.upsample=2 or remove such sequences"
    )
    view_of("train", data, CODEC, ModelSpec(upsample=2))
    strided = ModelSpec(upsample=2, front=(FrontLayer(channels=2, kernel=3, stride=4),))
    with pytest.raises(DataError, match=r"gets 2 for its 2 steps; set model.upsample=3, use smaller strides in model.front, or"):
        view_of("train", data, CODEC, strided)
    many = data_of([(1, [0, 1, 2, 0, 1, 2, 0, 1, 2])] * 3)
    with pytest.raises(
        DataError, match=r"3 of 3 sequences have .*: sequence 0 \(a b c a b c a b …\) needs 9, .* 1 for its 1 step; .*upsample=9"
    ):
        view_of("valid", many, CODEC, ModelSpec())


def test_batches_hold_the_labels_of_their_lanes() -> None:
    rows = [(4, [0, 1, 2]), (3, []), (2, [1]), (1, [2])]
    data = pick(data_of(rows), np.array([True, True, True, True]))
    view = view_of("train", data, CODEC, ModelSpec())
    order = SequenceOrder(view.lengths, tokens=8, seed=1, shuffle=False)
    seen: dict[int, list[int]] = {}
    for step in range(order.num_steps(0)):
        batch = build(view, order.window(Cursor(0, step)), Cursor(0, step))
        assert batch.targets is not None
        assert batch.targets.shape[1] == min(3, batch.steps)
        for number, labels in zip(batch.sequence.tolist(), batch.targets.tolist(), strict=True):
            seen[number] = [label for label in labels if label >= 0]
            assert labels[len(seen[number]) :] == [-1] * (len(labels) - len(seen[number]))
    assert seen == {number: labels for number, (_, labels) in enumerate(rows)}
    half = pick(data, np.array([False, True, True, False]))
    found = view_of("valid", half, CODEC, ModelSpec()).labels_at
    assert found is not None
    assert found(np.array([1, 0]), 9).tolist() == [[1], [-1]]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), steps=st.integers(1, 4))
def test_a_wide_beam_finds_the_likeliest_transcription(seed: int, steps: int) -> None:
    logs = torch.from_numpy(np.random.default_rng(seed).normal(size=(steps, 3)) * 2.0).log_softmax(-1)
    scores = {}
    for path in product(range(3), repeat=steps):
        labels = collapse(list(path), 2)
        scores[tuple(labels)] = -float(negative_log_likelihood(logs[:, None], torch.tensor([[*labels, -1]]), 2))
    found = beam_search(logs.numpy(), 2, width=100)
    assert [tuple(labels) for labels, _ in found[:1]] == [max(scores, key=lambda labels: scores[labels])]
    for labels, score in found:
        assert score == pytest.approx(scores[tuple(labels)], rel=1e-9)
    assert len(beam_search(logs.numpy(), 2, width=2)) <= 2


def plain_distance(one: list[int], other: list[int]) -> int:
    if not one or not other:
        return len(one) + len(other)
    return min(
        plain_distance(one[1:], other[1:]) + (one[0] != other[0]), plain_distance(one[1:], other) + 1, plain_distance(one, other[1:]) + 1
    )


@settings(max_examples=40, deadline=None)
@given(lanes=st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=5, max_size=5), st.lists(st.integers(0, 2), max_size=4)), min_size=1))
def test_edit_distances_are_those_of_the_definition(lanes: list[tuple[list[int], list[int]]]) -> None:
    best = torch.tensor([path for path, _ in lanes]).T
    wanted = torch.tensor([[*labels, *[-1] * (4 - len(labels))] for _, labels in lanes])
    found = edit_distances(best, wanted, 3).tolist()
    assert found == [plain_distance(collapse(path, 3), labels) for path, labels in lanes]


def test_errors_are_counted_for_each_label_and_each_sequence() -> None:
    meter = LabelErrors(3)
    best = torch.tensor([[0, 0, 3, 1], [1, 3, 3, 3], [3, 3, 3, 3], [2, 2, 2, 2]]).T
    out = torch.nn.functional.one_hot(best, 4).float().log()
    target = torch.tensor([[0, 1, 2], [1, -1, -1], [-1, -1, -1], [IGNORED, IGNORED, IGNORED]])
    assert meter.fits(out, target)
    assert not meter.fits(out[..., :3], target)
    meter.update(out, target)
    assert meter.values() == {"label_error": 1 / 4, "sequence_error": 1 / 3}
    assert math.isnan(LabelErrors(3).values()["label_error"])
