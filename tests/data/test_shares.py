"""Replicas share each batch: side by side their shares are the batch that one process reads, nothing dropped and nothing twice."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from carrywave.data.batch import Batch
from carrywave.data.loader import Loader, Share
from carrywave.data.order import Cursor, Order, SequenceOrder, StreamOrder
from carrywave.data.sequences import View

CPU = torch.device("cpu")
lengths_of = st.lists(st.integers(1, 9), min_size=1, max_size=12)
replicas_of = st.integers(1, 5)


def view_of(lengths: list[int]) -> View:
    """Sequences end to end, row r holding token r, whose target is r + 100."""
    starts = np.cumsum(lengths) - np.array(lengths)
    return View(np.arange(sum(lengths)), starts, np.array(lengths), targets_at=lambda rows: rows + 100)


def epoch_of(lengths: list[int], order: Order, share: Share | None = None, epoch: int = 1) -> list[Batch]:
    return list(Loader(view_of(lengths), order, device=CPU, share=share).batches(Cursor(epoch, 0)))


def check(lengths: list[int], order: Order, replicas: int) -> Counter[int]:
    """The shares of each batch, put together, are the batch; returns how often each token was seen as an input."""
    wholes = epoch_of(lengths, order)
    parts = [epoch_of(lengths, order, Share(index, replicas)) for index in range(replicas)]
    seen: Counter[int] = Counter()
    assert {len(part) for part in parts} == {len(wholes)}
    for whole, *shares in zip(wholes, *parts, strict=True):
        total = whole.lanes.shape[0]
        held = [batch for index, batch in enumerate(shares) if len(range(*Share(index, replicas).bounds(total)))]
        idle = [batch for batch in shares if not any(batch is other for other in held)]
        assert len(held) == min(replicas, total)
        for name in ("inputs", "targets"):
            assert torch.equal(torch.cat([getattr(batch, name) for batch in held], dim=1), getattr(whole, name))
        for name in ("lengths", "fresh", "lanes", "sequence", "offset"):
            assert torch.equal(torch.cat([getattr(batch, name) for batch in held]), getattr(whole, name))
        for batch in shares:
            assert (batch.epoch, batch.step, batch.steps, batch.cells) == (whole.epoch, whole.step, whole.steps, whole.cells)
        for batch in idle:
            assert (batch.lengths.tolist(), batch.sequence.tolist(), batch.real) == ([0], [-1], 0)
            assert bool((batch.targets == -100).all())  # type: ignore[union-attr]
        assert sum(batch.real for batch in shares) == whole.real
        for batch in shares:
            real_TB = torch.arange(batch.steps)[:, None] < batch.lengths
            seen.update(batch.inputs[real_TB].tolist())
    return seen


@settings(max_examples=25)
@given(lengths=lengths_of, replicas=replicas_of, lanes=st.integers(1, 7), steps=st.integers(1, 5), vary=st.booleans(), cut=st.booleans())
def test_streams(lengths: list[int], replicas: int, lanes: int, steps: int, vary: bool, cut: bool) -> None:
    lanes = min(lanes, sum(lengths))
    order = StreamOrder(np.array(lengths), lanes=lanes, steps=steps, seed=3, vary=vary, cut=cut)
    assert check(lengths, order, replicas) == Counter(range(sum(lengths)))


@settings(max_examples=25)
@given(lengths=lengths_of, replicas=replicas_of, tokens=st.integers(1, 30), shuffle=st.booleans())
def test_separate_sequences(lengths: list[int], replicas: int, tokens: int, shuffle: bool) -> None:
    order = SequenceOrder(np.array(lengths), tokens=tokens, seed=3, shuffle=shuffle)
    assert check(lengths, order, replicas) == Counter(range(sum(lengths)))


@pytest.mark.parametrize("replicas", [2, 5])
def test_one_lane_among_several_replicas(replicas: int) -> None:
    lengths = [7]
    assert check(lengths, SequenceOrder(np.array(lengths), tokens=4), replicas) == Counter(range(7))


def test_a_lane_that_is_read_twice_is_seen() -> None:
    """Shares that overlap, as where the last replica is filled up with the lanes of another, do not pass."""

    class Overlapping(Share):
        def bounds(self, lanes: int) -> tuple[int, int]:
            return max(0, lanes * self.index // self.of - 1), lanes * (self.index + 1) // self.of

    lengths = [3, 3, 3, 3]
    order = SequenceOrder(np.array(lengths), tokens=12)
    whole = epoch_of(lengths, order)[0]
    parts = [epoch_of(lengths, order, Overlapping(index, 2))[0] for index in range(2)]
    assert sum(part.real for part in parts) != whole.real
