"""The keyed randomness of the order: fixed for ever, unrelated between keys, and spread as promised."""

from __future__ import annotations

import numpy as np
import pytest

from carrywave.data.permute import BATCHES, MEMBERS, draw_uniforms, draw_words, permutation, varied_steps


def test_words_never_change() -> None:
    # Runs are resumed by other versions: these values may not change.
    words = draw_words(1, 2, 3, np.arange(3))
    assert [hex(word) for word in words.tolist()] == ["0x12588d809dce88a7", "0xdd034ea7d44e8739", "0x5b70c9b40c7440b6"]


def test_the_mix_is_that_of_splitmix64() -> None:
    # The first outputs of splitmix64 seeded with 1234567, a published test vector.
    from carrywave.data import permute

    golden = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + golden * (i + 1)) % 2**64 for i in range(3)], dtype=np.uint64)
    assert permute._mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


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
