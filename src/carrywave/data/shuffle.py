"""Randomness of the data's order: a counter-based hash in NumPy's 64-bit integers, so that it is the same everywhere.

A draw is a pure function of (seed, epoch, site, index). Nothing is kept between draws, so any of them can be had without
the ones before it; NumPy's own generators promise no equal streams across versions, integer arithmetic does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Ints

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]

# Sites: draws for different purposes must not be related.
MEMBERS, BATCHES, WINDOW_BASE, WINDOW_RADIUS, WINDOW_ANGLE, HELD_OUT = range(1, 7)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORD = 2**64 - 1


def draw_words(seed: int, epoch: int, site: int, index: Ints) -> Words:
    """64 random bits for each index."""
    state = np.zeros(1, dtype=np.uint64)  # an array of one: NumPy warns when scalars wrap around, which is wanted here
    for part in (seed, epoch, site):
        state = _mix((state ^ np.uint64(part & _WORD)) + _GOLDEN)
    return _mix(state + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def draw_uniforms(seed: int, epoch: int, site: int, index: Ints) -> Floats:
    """A number strictly between 0 and 1 for each index."""
    uniforms: Floats = ((draw_words(seed, epoch, site, index) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return uniforms


def permutation(count: int, *, seed: int, epoch: int, site: int) -> Ints:
    """A random order of 0 … count-1."""
    words = draw_words(seed, epoch, site, np.arange(count, dtype=np.int64))
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def varied_steps(steps: int, *, seed: int, epoch: int, first: int, count: int) -> Ints:
    """Lengths of windows `first … first+count-1` as AWD-LSTM draws them: around `steps`, one in twenty around half of it.

    Normal with a deviation of 5, at least 5 (or `steps`, where that is less) and at most `steps` + 20, so that memory has a bound.
    """
    index = np.arange(first, first + count, dtype=np.int64)
    base = np.where(draw_uniforms(seed, epoch, WINDOW_BASE, index) < 0.95, float(steps), steps / 2)
    radius = np.sqrt(-2.0 * np.log(draw_uniforms(seed, epoch, WINDOW_RADIUS, index)))
    normal = radius * np.cos(2.0 * np.pi * draw_uniforms(seed, epoch, WINDOW_ANGLE, index))
    return np.clip(np.floor(base + 5.0 * normal), min(5, steps), steps + 20).astype(np.int64)


def _mix(words: Words) -> Words:
    """The finaliser of splitmix64: every bit of the input flips half of the output's."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
