"""Reproducible randomness for the order of data: a counter-based hash in NumPy's 64-bit integers, identical on every platform.

A draw is a pure function of (seed, epoch, site, index). There is no state, so any draw can be computed without the ones before
it. NumPy's own generators do not guarantee equal streams across versions; integer arithmetic does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Ints

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]

# Sites: draws for different purposes must be independent.
MEMBERS, BATCHES, WINDOW_BASE, WINDOW_RADIUS, WINDOW_ANGLE, HELD_OUT, PHASES = range(1, 8)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORD = 2**64 - 1


def draw_words(seed: int, epoch: int, site: int, index: Ints) -> Words:
    """Return 64 random bits per index."""
    state = np.zeros(1, dtype=np.uint64)  # a one-element array: NumPy warns when scalars overflow, and wrapping is intended here
    for part in (seed, epoch, site):
        state = _mix((state ^ np.uint64(part & _WORD)) + _GOLDEN)
    return _mix(state + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def draw_uniforms(seed: int, epoch: int, site: int, index: Ints) -> Floats:
    """Return a uniform number strictly between 0 and 1 per index."""
    uniforms: Floats = ((draw_words(seed, epoch, site, index) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return uniforms


def permutation(count: int, *, seed: int, epoch: int, site: int) -> Ints:
    """Return a random permutation of 0 … count-1."""
    words = draw_words(seed, epoch, site, np.arange(count, dtype=np.int64))
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def varied_steps(steps: int, *, seed: int, epoch: int, first: int, count: int) -> Ints:
    """Return the lengths of windows `first … first+count-1` as in AWD-LSTM: around `steps`, but around half of it one time in twenty.

    Normally distributed with a standard deviation of 5; at least 5 (or `steps`, if smaller) and at most `steps` + 20, which bounds memory.
    """
    index = np.arange(first, first + count, dtype=np.int64)
    base = np.where(draw_uniforms(seed, epoch, WINDOW_BASE, index) < 0.95, float(steps), steps / 2)
    radius = np.sqrt(-2.0 * np.log(draw_uniforms(seed, epoch, WINDOW_RADIUS, index)))
    normal = radius * np.cos(2.0 * np.pi * draw_uniforms(seed, epoch, WINDOW_ANGLE, index))
    return np.clip(np.floor(base + 5.0 * normal), min(5, steps), steps + 20).astype(np.int64)


def _mix(words: Words) -> Words:
    """The finaliser of splitmix64: flipping any input bit flips about half of the output bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
