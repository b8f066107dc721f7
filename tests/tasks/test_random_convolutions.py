"""The linear part of a classifier: its features, its ridge against one fitted without each row, and the heads that mix it in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from carrywave.data.sequences import Sequences
from carrywave.model.heads.pooled import PooledNumbers, PooledSigmoid, PooledSoftmax
from carrywave.tasks.linear import leave_one_out, signals
from carrywave.tasks.linear.part import LinearPart, joined
from carrywave.tasks.linear.random_convolutions import KERNELS_KP, RandomConvolutions, dilations

CPU = torch.device("cpu")


def sequences(lengths: list[int], channels: int = 1, labels: Any = None, seed: int = 0) -> Sequences:
    generator = np.random.default_rng(seed)
    ends = np.cumsum(lengths)
    values = generator.normal(size=(int(ends[-1]), channels)).astype(np.float32)
    found = np.arange(len(lengths)) % 2 if labels is None else np.asarray(labels)
    return Sequences(values, ends - lengths, np.array(lengths, np.int64), labels=found)


def told(lengths: list[int], seed: int = 0, apart: float = 1.0) -> Sequences:
    """Two classes, of which one swings twice as fast."""
    plain = sequences(lengths, seed=seed)
    values = np.concatenate(
        [np.sin(np.arange(each) * (0.3 + 0.3 * apart * label)) for each, label in zip(lengths, plain.labels, strict=True)]  # type: ignore[arg-type]
    )
    return replace(plain, inputs=(values[:, None] + 0.3 * plain.inputs).astype(np.float32))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_features_of_a_sequence_are_those_of_torchs_convolution_whatever_lies_beside_it(lengths: list[int], channels: int) -> None:
    data = sequences(lengths, channels)
    data = replace(data, inputs=np.round(4 * data.inputs))  # sums of whole numbers are the same in any order
    found = RandomConvolutions.fit(data, 400, 1, CPU)
    rows = torch.cat([features for _, features in found(data)])
    places = torch.cat([places for places, _ in found(data)])
    for row, place in zip(rows, places.tolist(), strict=True):
        x_CT = torch.from_numpy(data.inputs[data.starts[place] :][: lengths[place]]).T
        changes = x_CT - torch.cat([x_CT[:, :1], x_CT[:, :-1]], 1)
        expected = [_summaries(x_CT, scale) for scale in found.values] + [_summaries(changes, scale) for scale in found.changes]
        torch.testing.assert_close(row, torch.cat(expected), rtol=1e-5, atol=1e-6)  # means of float32


def _summaries(x_CT: Tensor, scale: Any) -> Tensor:
    weight = KERNELS_KP[:, None] * scale.mix_KC[:, :, None]
    given = torch.nn.functional.conv1d(x_CT[None], weight, padding=4 * scale.dilation, dilation=scale.dilation)[0]
    found = []
    for bias_K in scale.biases_KJ.T.tolist():
        for over in (given - torch.tensor(bias_K)[:, None]).tolist():
            above = [(step, each) for step, each in enumerate(over, 1) if each > 0]
            many, steps = max(1, len(above)), len(over)
            longest = max(len(run) for run in "".join("x" if each > 0 else " " for each in over).split(" "))
            found += [
                len(above) / steps,
                sum(each for _, each in above) / many,
                sum(step for step, _ in above) / many / steps,
                longest / steps,
            ]
    return torch.tensor(found)


@pytest.mark.parametrize(("longest", "count"), [(1, 10_000), (9, 10_000), (500, 84), (3000, 10_000)])
def test_there_are_about_as_many_features_as_asked_and_no_kernel_is_longer_than_a_sequence(longest: int, count: int) -> None:
    found = dilations(longest, count)
    assert 0.7 * count <= 84 * sum(found.values()) <= count
    assert all(8 * dilation < longest or dilation == 1 for dilation in found)


@given(st.integers(4, 12), st.integers(1, 30), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_scores_by_the_others_are_those_of_a_ridge_that_was_fitted_without_a_row(rows: int, features: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    f = torch.randn(rows, features, generator=generator, dtype=torch.float64)
    y = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    weights = 0.5 + torch.rand(rows, generator=generator, dtype=torch.float64)
    best = None
    share = weights / weights.sum()
    # The scale of features and their mean are those of all rows, as in any ridge whose features were standardised first.
    mean = (f * share[:, None]).sum(0)
    spread = ((f - mean).square() * share[:, None]).sum(0).sqrt()
    x = torch.cat([(f - mean) / spread, torch.ones(rows, 1, dtype=torch.float64)], 1)
    for penalty in leave_one_out.PENALTIES.tolist():
        scores = []
        for row in range(rows):
            rest = torch.arange(rows) != row
            w = share[rest] * rows
            matrix = torch.diag(torch.tensor([penalty] * features + [0.0], dtype=torch.float64))
            solved = torch.linalg.solve((x[rest] * w[:, None]).T @ x[rest] + matrix, (x[rest] * w[:, None]).T @ y[rest])
            scores.append(x[row] @ solved)
        missed = (torch.stack(scores) - y) * (share * rows).sqrt()[:, None]
        error = float(missed.square().mean())
        if best is None or error < best[0]:
            best = error, torch.stack(scores)
    assert best is not None
    torch.testing.assert_close(leave_one_out.fit(f, y, weights).others_NV, best[1], rtol=1e-6, atol=1e-8)


def test_two_classes_of_signals_are_told_apart_and_a_file_gives_it_back() -> None:
    train, test = told([60] * 20), told([50, 60, 70] * 8, seed=1)
    part = signals.fit("classes", 2, train, None, 2000, 1, CPU)
    assert part is not None
    assert "right for 100.0% of 20 sequences" in part.seen
    answers = part(test)
    assert (answers.argmax(1) == test.labels).mean() > 0.9
    np.testing.assert_allclose(np.exp(answers).sum(1), 1.0, rtol=1e-5)
    again = LinearPart.of(part.tensors(), "classes", (), CPU)
    np.testing.assert_array_equal(again(test), answers)
    assert again.share == part.share


def test_what_was_held_out_is_answered_by_the_others() -> None:
    labels = np.array([0, 1] * 12)
    train, held = (sequences([30] * 24, labels=labels, seed=seed) for seed in (0, 1))  # noise: nothing can be known
    both = joined(train, replace(held, starts=held.starts + len(train.inputs)))
    inputs = np.concatenate([train.inputs, held.inputs])
    train = replace(train, inputs=inputs)
    held = replace(train, starts=both.starts[24:], lengths=both.lengths[24:], labels=both.labels[24:])  # type: ignore[index]
    part = signals.fit("classes", 2, train, held, 2000, 1, CPU)
    assert part is not None
    fitted, by_others = ((part(held, held=asked).argmax(1) == held.labels).mean() for asked in (False, True))
    assert by_others <= 0.6 < fitted


def test_a_class_with_one_sequence_each_leaves_the_network_out() -> None:
    part = signals.fit("classes", 3, sequences([20] * 3, labels=[0, 1, 2]), None, 500, 1, CPU)
    assert part is not None
    assert part.share == 0.0


@pytest.mark.parametrize("kind", [PooledSoftmax, PooledSigmoid, PooledNumbers])
def test_a_head_gives_the_linear_part_at_a_share_of_0_and_itself_at_1(kind: Any) -> None:
    torch.manual_seed(1)
    head = kind(4, 3, "mean").double()
    acc = head.pool(torch.randn(5, 2, 4, dtype=torch.float64), torch.tensor([5, 3]), head.start(2))
    beside = torch.randn(2, 3, dtype=torch.float64).log_softmax(1)
    for share, expected in ((0.0, beside), (1.0, head(acc))):
        mixed = head(acc, torch.cat([beside, torch.full((2, 1), share, dtype=torch.float64)], 1))
        if kind is PooledSoftmax:
            mixed, expected = mixed.softmax(1), expected.softmax(1)
        torch.testing.assert_close(mixed, expected)
