"""Augmentation: what becomes of a sequence depends on the seed, the epoch and the sequence, and on nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from carrywave.data.augmentation import Augmentation
from carrywave.data.batch import Batch
from carrywave.data.loader import Share, build
from carrywave.data.order import Cursor, Window
from carrywave.data.sequences import View
from carrywave.errors import SpecError
from carrywave.spec.load import load
from carrywave.spec.signal_spec import AugmentSpec

LENGTHS = np.array([5, 12, 7, 30, 30, 1])
STARTS = np.cumsum(LENGTHS) - LENGTHS


def _view(**others: Any) -> View:
    rows = np.arange(LENGTHS.sum(), dtype=np.float32)
    return View(np.stack([rows, -rows], axis=1), STARTS, LENGTHS, **others)


def _window(*sequences: int, steps: int = 32) -> Window:
    sequence = np.array(sequences)
    length = np.where(sequence < 0, 0, LENGTHS[np.maximum(sequence, 0)])
    return Window(steps, sequence, np.zeros_like(sequence), length, np.ones(len(sequence), dtype=np.bool_))


def _augmentation(**asked: Any) -> Augmentation:
    return Augmentation(AugmentSpec(**asked), seed=7)


def _lane(batch: Batch, lane: int) -> torch.Tensor:
    """The real steps of a lane."""
    return batch.inputs[: int(batch.lengths[lane]), lane]


ALL = {"noise": 0.05, "scale": 0.1, "shift": True}


def test_no_change_is_none() -> None:
    plain, changed = (build(_view(), _window(3, 0), Cursor(1, 0), augmentation=each) for each in (None, _augmentation()))
    assert torch.equal(plain.inputs, changed.inputs)
    assert torch.equal(plain.lengths, changed.lengths)


@given(st.permutations(range(6)), st.integers(1, 7), st.integers(0, 3))
@settings(max_examples=25)
def test_a_sequence_is_the_same_in_any_lane_batch_and_share(order: list[int], shares: int, epoch: int) -> None:
    given, augmentation = Cursor(epoch, 3), _augmentation(**ALL)
    alone = {n: build(_view(), _window(n), Cursor(epoch, 0), augmentation=augmentation) for n in order}
    whole = build(_view(), _window(*order), given, augmentation=augmentation)
    parts = [build(_view(), _window(*order), given, share=Share(n, shares), augmentation=augmentation) for n in range(shares)]
    found = [(int(part.sequence[lane]), _lane(part, lane)) for part in parts for lane in range(len(part.lanes)) if part.sequence[lane] >= 0]
    assert [number for number, _ in found] == order
    for lane, (number, steps) in enumerate(found):
        assert torch.equal(steps, _lane(whole, lane))
        assert torch.equal(steps, _lane(alone[number], 0))
    assert {part.part_of for part in parts} == {(int(whole.lengths.sum()), 6)}
    no_inputs = build(_view(), _window(*order), given, share=Share(inputs=False), augmentation=augmentation)
    assert torch.equal(no_inputs.lengths, whole.lengths)  # a later stage knows them too


def test_epochs_and_seeds_differ() -> None:
    found = [
        build(_view(), _window(3), Cursor(epoch, 0), augmentation=Augmentation(AugmentSpec(**ALL), seed)).inputs
        for epoch, seed in ((0, 1), (1, 1), (0, 2))
    ]
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_shift_goes_round_and_tags_with_it() -> None:
    view = _view(targets_at=lambda rows: rows + 100)
    begins = set()
    for epoch in range(60):
        batch = build(view, _window(0, -1), Cursor(epoch, 0), augmentation=_augmentation(shift=True))
        rows = _lane(batch, 0)[:, 0].int().tolist()
        assert rows == [(rows[0] + step) % 5 for step in range(5)]
        assert batch.targets is not None
        assert batch.targets[:5, 0].tolist() == [row + 100 for row in rows]
        begins.add(rows[0])
    assert begins == set(range(5))


def test_factors_and_noise_are_normal() -> None:
    ones = View(np.ones((40_000, 2), dtype=np.float32), np.arange(0, 40_000, 40), np.full(1000, 40))
    window = Window(41, np.arange(1000), np.zeros(1000, dtype=np.int64), np.full(1000, 40), np.ones(1000, dtype=np.bool_))
    scaled = build(ones, window, Cursor(0, 0), augmentation=_augmentation(scale=0.1)).inputs
    assert scaled.dtype == torch.float32
    assert (scaled[:40] == scaled[:1]).all()  # one factor for all steps
    noisy = build(ones, window, Cursor(0, 0), augmentation=_augmentation(noise=0.5)).inputs
    for sample, deviation in ((scaled[0].double(), 0.1), (noisy[:40].double(), 0.5)):
        size = sample.numel() ** 0.5
        assert abs(sample.mean() - 1.0) < 4 * deviation / size  # four deviations of the mean
        assert abs(sample.std() / deviation - 1.0) < 4 / size
    assert not scaled[40].any()
    assert not noisy[40].any()
    assert abs(np.corrcoef(noisy[0, :, 0], noisy[1, :, 0])[0, 1]) < 0.13  # four deviations
    assert abs(np.corrcoef(noisy[0, :-1, 0], noisy[0, 1:, 0])[0, 1]) < 0.13


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["task=classification", "data.augment.scale=1.5"], "data.augment.scale is 1.5"),
        (["task=classification", "data.augment.noises=0.5"], "did you mean data.augment.noise"),
    ],
)
def test_what_cannot_be_is_refused(given: list[str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load(None, ["data.augment.noise=0.1", *given])
