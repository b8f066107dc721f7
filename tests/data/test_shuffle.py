"""The keyed randomness of the order: fixed for ever, unrelated between keys, and spread as promised."""

from __future__ import annotations

import numpy as np
import pytest

from carrywave.data.shuffle import BATCHES, MEMBERS, draw_words, permutation, varied_steps


def test_words_never_change() -> None:
    # Runs are resumed by other versions: these values may not change.
    words = draw_words(1, 2, 3, np.arange(3))
    assert [hex(word) for word in words.tolist()] == ["0x12588d809dce88a7", "0xdd034ea7d44e8739", "0x5b70c9b40c7440b6"]


@pytest.mark.parametrize("key", [{"seed": 2}, {"epoch": 1}, {"site": BATCHES}])
def test_every_part_of_the_key_counts(key: dict[str, int]) -> None:
    given = {"seed": 1, "epoch": 0, "site": MEMBERS}
    first, other = permutation(100, **given), permutation(100, **{**given, **key})
    assert sorted(first.tolist()) == sorted(other.tolist()) == list(range(100))
    assert (first == other).sum() < 10  # one is expected to stay in place by chance


def test_draws_need_no_others_before_them() -> None:
    whole = varied_steps(70, seed=3, epoch=1, first=0, count=50)
    assert varied_steps(70, seed=3, epoch=1, first=20, count=30).tolist() == whole[20:].tolist()


def test_window_lengths_are_spread_as_awd_lstm_draws_them() -> None:
    lengths = varied_steps(70, seed=0, epoch=0, first=0, count=20_000)
    long = lengths[lengths > 52]
    assert abs(len(long) / len(lengths) - 0.95) < 0.01  # six deviations
    assert abs(long.mean() - 69.5) < 0.25  # rounding down takes half a step; six deviations
    assert abs(long.std() - 5.0) < 0.2
    assert abs(lengths[lengths <= 52].mean() - 34.5) < 1.0
    assert lengths.min() >= 5
    assert lengths.max() <= 90


@pytest.mark.parametrize("varied", ["seed", "epoch"])
def test_all_orders_of_few_are_equally_likely(varied: str) -> None:
    """Of consecutive seeds and of consecutive epochs: 24 orders of four, 4,800 times."""
    place = {"seed": 0, "epoch": 0, "site": MEMBERS}
    orders = [tuple(permutation(4, **{**place, varied: number}).tolist()) for number in range(4_800)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    chi_square = float(((counts - 200) ** 2 / 200).sum())
    assert abs(chi_square - 23) < 5 * np.sqrt(46)  # 23 degrees of freedom: a deviation of sqrt(46); five of them
