"""The linear part of texts: its features against plain Python, and its fit against the slopes of its loss."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from carrywave.data.examples import code_points_of
from carrywave.data.sequences import Sequences
from carrywave.data.text.tokenizers import UNKNOWN
from carrywave.tasks.linear import texts
from carrywave.tasks.linear.ngrams import NGrams
from carrywave.tasks.linear.part import LinearPart, LinearRows

WORDS = (UNKNOWN, "a", "film", "films", "bad", "good", "very")


def sequences(lines: list[list[int]], labels: Any) -> Sequences:
    lengths = np.array([len(line) for line in lines], np.int64)
    return Sequences(np.concatenate([np.array(line, np.int32) for line in lines]), np.cumsum(lengths) - lengths, lengths, labels=labels)


def plain(line: list[int]) -> tuple[Counter[str], Counter[str]]:
    """How often words and pairs stand in a line, and how often pieces do."""
    words = [WORDS[token] for token in line]
    whole = Counter(words) + Counter(f"{one} {other}" for one, other in pairwise(words))
    pieces = Counter(
        f" {word} "[place : place + length]
        for word in words
        if word != UNKNOWN
        for length in (3, 4, 5)
        for place in range(len(word) + 3 - length)
    )
    return whole, pieces


@given(st.lists(st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=7), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_features_are_those_of_plain_counts(lines: list[list[int]]) -> None:
    data = sequences(lines, np.zeros(len(lines), np.int64))
    rows = np.arange(len(lines))
    found = NGrams.fit(data, rows, WORDS, 1000)
    counted = [plain(line) for line in lines]
    assert found.count == sum(len(set().union(*(each[kind] for each in counted))) for kind in (0, 1))
    entries = found.entries(data, rows)
    ends = [*entries.starts_N.tolist()[1:], len(entries.values_E)]
    for place, (first, end) in enumerate(zip(entries.starts_N.tolist(), ends, strict=True)):
        expected = []
        for kind in (0, 1):
            holding = Counter(name for each in counted for name in each[kind])
            values = [
                (1 + math.log(many)) * (math.log((1 + len(lines)) / (1 + holding[name])) + 1) for name, many in counted[place][kind].items()
            ]
            expected += [value / math.hypot(*values) for value in values]
        np.testing.assert_allclose(sorted(entries.values_E[first:end].tolist()), sorted(expected), rtol=1e-5)


def test_pieces_of_words_that_the_vocabulary_does_not_have_are_read() -> None:
    train, unread = sequences([[2, 4], [5, 3]], np.zeros(2, np.int64)), code_points_of(["filming", UNKNOWN])
    features = NGrams.fit(train, np.arange(2), WORDS, 1000)
    asked = sequences([[5], [0, 5], [5, 0]], np.zeros(3, np.int64))
    entries = [features.entries(data, np.arange(3)) for data in (asked, replace(asked, unread=unread))]
    bare, spelled = (torch.diff(each.starts_N, append=torch.tensor([len(each.places_E)])).tolist() for each in entries)
    assert spelled == [bare[0], bare[1] + 6, bare[2]]  # those that " film " has, too, but for its end


@pytest.mark.parametrize("kind", ["classes", "labels", "numbers"])
def test_the_fit_has_no_slope_left(kind: str) -> None:
    generator = np.random.default_rng(1)
    lines = [generator.integers(1, len(WORDS), size=5).tolist() for _ in range(40)]
    labels: Any = generator.integers(0, 3, 40)
    if kind != "classes":
        labels = generator.normal(size=(40, 3)).astype(np.float32) if kind == "numbers" else np.eye(3, dtype=np.float32)[labels]
    data = replace(sequences(lines, labels), weights=generator.uniform(0.5, 2.0, 40).astype(np.float32))
    rows = LinearRows.of(kind, data, None, None)
    features = NGrams.fit(data, rows.rows, WORDS, 1000)
    targets_NV = rows.targets(kind, 3).float()
    weights_FV, bias_V = (each.clone().double().requires_grad_() for each in texts.solved(features, rows, kind, targets_NV))
    scores_NV = features.entries(data, rows.rows).times(weights_FV) + bias_V
    shares_NV, scale_N = (targets_NV.double() + 1) / 2, torch.from_numpy(rows.importance_N)
    if kind == "classes":
        losses_N = torch.nn.functional.cross_entropy(scores_NV, shares_NV, reduction="none")
    elif kind == "labels":
        losses_N = torch.nn.functional.binary_cross_entropy_with_logits(scores_NV, shares_NV, reduction="none").sum(1)
    else:
        losses_N = (scores_NV - targets_NV).square().sum(1) / 2
    loss = (losses_N * scale_N).sum() + texts.PENALTY / 2 * weights_FV.square().sum()
    slopes = torch.autograd.grad(loss, [weights_FV, bias_V])
    assert max(float(slope.abs().max()) for slope in slopes) < 0.02  # of sums over 40 texts, in float32


def test_held_out_texts_are_answered_by_a_fit_to_the_others_and_a_file_gives_all_back() -> None:
    lines = [[1, 2 + step % 2, 4 + step % 2] for step in range(24)]  # bad or good
    both = sequences(lines, np.arange(24) % 2)
    assert both.labels is not None
    train = replace(both, starts=both.starts[:20], lengths=both.lengths[:20], labels=both.labels[:20])
    wrong = replace(both, starts=both.starts[20:], lengths=both.lengths[20:], labels=1 - both.labels[20:])
    part = texts.fit("classes", 2, train, wrong, 1000, WORDS)
    assert part is not None
    assert "right for 0.0% of 4 held-out texts" in part.seen
    assert (part(train).argmax(1) == train.labels).all()
    np.testing.assert_array_equal(part(wrong, held=True).argmax(1), 1 - wrong.labels)  # type: ignore[operator]
    again = LinearPart.of(part.tensors(), "classes", WORDS, torch.device("cpu"))
    np.testing.assert_array_equal(again(train), part(train))
    np.testing.assert_array_equal(again(wrong, held=True), part(wrong, held=True))
