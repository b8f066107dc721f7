"""Bands from errors that are known: their widths, what they say of themselves, and how often values lie within them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from carrywave.spec.data_spec import DataSpec
from carrywave.tasks.metrics.bands import POOLED, WIDEST, BandErrors, Bands, fitting, within_own
from carrywave.tasks.metrics.errors import Columns


def test_a_radius_is_the_error_of_the_corrected_rank() -> None:
    """Of 99 errors 1, 2, …, 99 and 100 times as many: ceil(100 · share), for each step and column by itself."""
    error_N = np.random.default_rng(0).permutation(99) + 1.0
    bands = Bands.of((0.5, 0.8, 0.95), [np.stack([error_N, 2 * error_N], axis=1), np.stack([100 * error_N, error_N], axis=1)])
    assert bands.radius_LHC.tolist() == [[[50, 5000], [100, 50]], [[80, 8000], [160, 80]], [[95, 9500], [190, 95]]]
    assert bands.origins == 99
    assert bands.levels == (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975)


def test_few_errors_are_pooled_over_steps_and_too_few_give_the_widest() -> None:
    error_NH = np.arange(1.0, 25.0).reshape(8, 3)
    bands = Bands.of((0.5, 0.95), [error_NH])
    assert bands.taken == POOLED
    assert bands.radius_LHC.tolist() == [[[13.0]] * 3, [[24.0]] * 3]  # ranks ceil(25 · 0.5) and ceil(25 · 0.95)
    assert "too few" in bands.said()
    bands = Bands.of((0.5, 0.99), [error_NH])
    assert bands.taken == WIDEST
    assert bands.radius_LHC.tolist() == [[[13.0]] * 3, [[24.0]] * 3]
    assert "widest" in bands.said()


def test_forecasts_lie_between_the_ends_of_their_bands() -> None:
    bands = Bands((0.5, 0.8), np.array([[[1.0, 10.0]], [[2.0, 20.0]]]), 9)
    made_HOC1, same = np.array([[[[5.0], [50.0]], [[6.0], [60.0]]]]), np.ones((2, 2))
    assert bands.around(made_HOC1, same)[0, 0].tolist() == [[3, 4, 5, 6, 7], [30, 40, 50, 60, 70]]
    sizes_OC = np.array([[2.0, 0.1], [1.0, 0.5]])
    assert bands.around(made_HOC1, sizes_OC)[0, 0].tolist() == [[1, 3, 5, 7, 9], [48, 49, 50, 51, 52]]
    assert bands.around(made_HOC1, sizes_OC)[0, 1].tolist() == [[4, 5, 6, 7, 8], [50, 55, 60, 65, 70]]


def test_bands_are_read_as_they_were_written() -> None:
    bands = Bands.of((0.8,), [np.random.default_rng(1).gamma(1.0, size=(50, 3))])
    again = Bands.from_json(bands.to_json(), 3, 1)
    assert again.to_json() == bands.to_json()
    with pytest.raises(ValueError, match="radius has sizes"):
        Bands.from_json(bands.to_json(), 4, 1)


@pytest.mark.parametrize("apart", [False, True])
def test_the_share_within_is_counted_column_by_column(apart: bool) -> None:
    """Two columns with other widths, together or as sequences of their own; of sums of changes, the errors add up."""
    bands = Bands((0.5,), np.array([[[1.0, 10.0], [1.0, 10.0]]]), 9)
    columns = Columns(("a", "b"), torch.ones(1 + apart, 2 - apart, dtype=torch.float64), apart=apart)
    target_TBHC = torch.tensor([[0.5, 1.5], [-0.9, -1.1]], dtype=torch.float64)[None, :, :, None]  # two lanes, two steps ahead
    if not apart:
        target_TBHC = torch.stack([target_TBHC[:, :1, :, 0], target_TBHC[:, 1:, :, 0]], dim=-1)
    out, sequence_B = torch.zeros_like(target_TBHC), torch.arange(target_TBHC.shape[1])
    meter = BandErrors(DataSpec(horizon=2), 2 - apart, None, torch.device("cpu"), columns, bands)
    meter.update(out, target_TBHC, sequence_B)
    assert meter.values()["within_50"] == 0.75  # all but the 1.5 of column a
    target_TBHC[0, 0, 0, 0] = torch.nan
    meter.update(out, target_TBHC, sequence_B)
    assert meter.values()["within_50"] == pytest.approx(5 / 7)
    summed = BandErrors(DataSpec(horizon=2, transform="diff"), 2 - apart, None, torch.device("cpu"), columns, bands)
    target_TBHC[0, 0, 0, 0] = -0.6
    summed.update(out, target_TBHC, sequence_B)
    assert summed.values()["within_50"] == 1.0  # −0.6 and then 0.9


def test_bands_move_with_the_deviation_unless_it_tells_nothing() -> None:
    draw = np.random.default_rng(3)
    error_NH, deviation_N = np.abs(draw.normal(size=(500, 2))), draw.uniform(1.0, 4.0, size=500)
    for error, steps in ((error_NH * deviation_N[:, None], 24), (error_NH, 0)):
        bands = fitting((0.8,), [error], [deviation_N], 24)
        assert bands.steps == steps
        assert bands.radius_LHC == pytest.approx(1.28, rel=0.1)  # of a normal distribution
        assert within_own(bands, [error], [deviation_N])["within_80"] == pytest.approx(0.8, abs=0.005)
    assert fitting((0.8,), [error_NH * deviation_N[:, None]], [deviation_N], 0).steps == 0  # not asked
