"""The keyed randomness of the order: fixed for ever, unrelated between keys, and spread as promised."""

from __future__ import annotations

import numpy as np
import pytest

from carrywave.data.shuffle import BATCHES, MEMBERS, draw_uniforms, draw_words, permutation, varied_steps


def test_words_never_change() -> None:
    # Runs are resumed by other versions: these values may not change.
    words = draw_words(1, 2, 3, np.arange(3))
    assert [hex(word) for word in words.tolist()] == ["0x12588d809dce88a7", "0xdd034ea7d44e8739", "0x5b70c9b40c7440b6"]


def test_the_mix_is_that_of_splitmix64() -> None:
    # The first outputs of splitmix64 seeded with 1234567, a published test vector.
    from carrywave.data import shuffle

    golden = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + golden * (i + 1)) % 2**64 for i in range(3)], dtype=np.uint64)
    assert shuffle._mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("key", [{"seed": 2}, {"epoch": 1}, {"site": BATCHES}])
def test_every_part_of_the_key_counts(key: dict[str, int]) -> None:
    given = {"seed": 1, "epoch": 0, "site": MEMBERS}
    first, other = permutation(100, **given), permutation(100, **{**given, **key})
    assert sorted(first.tolist()) == sorted(other.tolist()) == list(range(100))
    assert (first == other).sum() < 10  # one is expected to stay in place by chance


def test_draws_need_no_others_before_them() -> None:
    whole = varied_steps(70, seed=3, epoch=1, first=0, count=50)
    assert varied_steps(70, seed=3, epoch=1, first=20, count=30).tolist() == whole[20:].tolist()


def test_uniforms_fill_the_unit_interval() -> None:
    uniforms = draw_uniforms(0, 0, MEMBERS, np.arange(10_000))
    assert 0.0 < uniforms.min() < 0.001 < 0.999 < uniforms.max() < 1.0
    assert abs(uniforms.mean() - 0.5) < 0.015  # five deviations of the mean of 10,000


def test_window_lengths_are_spread_as_awd_lstm_draws_them() -> None:
    lengths = varied_steps(70, seed=0, epoch=0, first=0, count=20_000)
    long = lengths[lengths > 52]
    assert abs(len(long) / len(lengths) - 0.95) < 0.01  # six deviations
    assert abs(long.mean() - 69.5) < 0.25  # rounding down takes half a step; six deviations
    assert abs(long.std() - 5.0) < 0.2
    assert abs(lengths[lengths <= 52].mean() - 34.5) < 1.0
    assert lengths.min() >= 5
    assert lengths.max() <= 90


@pytest.mark.parametrize("steps", [1, 2, 5, 12])
def test_short_windows_stay_within_their_bounds(steps: int) -> None:
    lengths = varied_steps(steps, seed=0, epoch=0, first=0, count=2_000)
    assert lengths.min() == min(5, steps)
    assert lengths.max() <= steps + 20


@pytest.mark.parametrize("varied", ["seed", "epoch"])
def test_all_orders_of_few_are_equally_likely(varied: str) -> None:
    """Of consecutive seeds and of consecutive epochs: 24 orders of four, 4,800 times."""
    place = {"seed": 0, "epoch": 0, "site": MEMBERS}
    orders = [tuple(permutation(4, **{**place, varied: number}).tolist()) for number in range(4_800)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    chi_square = float(((counts - 200) ** 2 / 200).sum())
    assert abs(chi_square - 23) < 5 * np.sqrt(46)  # 23 degrees of freedom: a deviation of sqrt(46); five of them


def test_orders_of_many_forget_where_things_stood() -> None:
    """Each epoch against the order of the data and against the epoch before it: ranks, neighbours, and what stays in place."""
    count, epochs = 10_000, 40
    orders = [permutation(count, seed=7, epoch=epoch, site=MEMBERS) for epoch in range(epochs)]
    deviation = (count - 1) * (count + 1) / 12
    centred = [order - (count - 1) / 2 for order in orders]
    staying, following = 0, 0
    for before, after in zip([np.arange(count) - (count - 1) / 2, *centred], centred, strict=False):
        assert abs((before * after).mean() / deviation) < 4.5 / np.sqrt(count)  # 40 epochs: one in 3,500 by chance
        staying += int((before == after).sum())
    for order in orders:
        following += int((np.diff(order) == 1).sum())
    # Both are on average one an epoch: 40 events, whose deviation is their root; five of them.
    assert abs(staying - epochs) < 5 * np.sqrt(epochs)
    assert abs(following - epochs) < 5 * np.sqrt(epochs)
    # Where an item comes is uniform over the epoch: first, second, … tenth part, for 10 parts of the data.
    parts = np.zeros((10, 10))
    for order in orders:
        np.add.at(parts, (np.arange(count) * 10 // count, order * 10 // count), 1)
    expected = count * epochs / 100
    chi_square = float(((parts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 81) < 5 * np.sqrt(162)  # rows and columns are full: 81 degrees of freedom
