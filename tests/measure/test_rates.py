"""The rate of a link follows from two messages, and noise does not make it infinite."""

from __future__ import annotations

import pytest

from carrywave.measure.timing import LARGE_BYTES, SMALL_BYTES, rate_between


def test_latency_does_not_count() -> None:
    assert rate_between(1e-3, 3e-3) == pytest.approx((LARGE_BYTES - SMALL_BYTES) / 2e-3)


@pytest.mark.parametrize("small", [1.9e-3, 2.5e-3])
def test_a_large_message_that_takes_no_longer_shows_noise_not_a_link_without_limit(small: float) -> None:
    assert rate_between(small, 1.9e-3) == pytest.approx((LARGE_BYTES - SMALL_BYTES) / (1.9e-3 / 20))
