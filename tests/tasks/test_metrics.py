"""Metrics against plain counting, and their sums as sums."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from carrywave.data.batch import IGNORED
from carrywave.data.sequences import UNSEEN
from carrywave.tasks.metrics.errors import Columns, Errors, Metric
from carrywave.tasks.metrics.labels import Confusion

NAN = math.nan


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logits_for(guesses: list[int], classes: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(guesses), classes).float()


def counted(targets: list[int], guesses: list[int]) -> dict[str, float]:
    pairs = [(t, g) for t, g in zip(targets, guesses, strict=True) if t != -100]
    scores = []
    for label in {t for t, _ in pairs} | {g for _, g in pairs}:
        hits = sum(t == g == label for t, g in pairs)
        wrong = sum(g == label != t for t, g in pairs)
        missed = sum(t == label != g for t, g in pairs)
        scores.append(2 * hits / (2 * hits + wrong + missed))
    return {"accuracy": sum(t == g for t, g in pairs) / len(pairs), "macro_f1": sum(scores) / len(scores)}


TARGETS, GUESSES = [0, 1, 2, 2, -100, 1, 0, 2, -100, 2], [0, 2, 2, 2, 0, 1, 3, 0, 1, 2]


def test_accuracy_and_macro_f1_by_counting() -> None:
    confusion = Confusion(6)  # classes 4 and 5 never occur, 3 only as a guess
    confusion.update(logits_for(GUESSES, 6), torch.tensor(TARGETS))
    found = confusion.values()
    assert found.pop("top_5_accuracy") == 1.0
    assert found == pytest.approx(counted(TARGETS, GUESSES), rel=1e-15)


def test_no_targets_no_numbers() -> None:
    confusion = Confusion(3)
    confusion.update(torch.zeros(2, 3), torch.tensor([-100, -100]))
    assert confusion.counts_KK.sum().item() == 0
    assert all(math.isnan(value) for value in confusion.values().values())
    assert all(math.isnan(value) for value in Errors(2, 1).values().values())


def test_the_loss_without_class_weights_stands_beside_the_weighted_one() -> None:
    logits, target = random(7, 2, 3), torch.arange(14).reshape(7, 2) % 3
    target[2, 1] = IGNORED
    meter = Confusion(3, weighted=True)
    meter.update(logits[:3], target[:3])
    meter.update(logits[3:], target[3:])
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    assert meter.values()["unweighted_loss"] == pytest.approx(wanted.item(), rel=1e-14)
    assert "unweighted_loss" not in Confusion(3).values()


def forecasts() -> tuple[Tensor, Tensor]:
    out_TBHC, target_TBHC = random(4, 3, 2, 2), random(4, 3, 2, 2, seed=2)
    target_TBHC[1, 2] = NAN
    target_TBHC[0, 0, 1, 0] = NAN
    return out_TBHC, target_TBHC


def test_forecasting_by_hand() -> None:
    out_TBHC, target_TBHC = forecasts()
    change_SC = torch.tensor([[0.5, 2.0], [0.25, 0.0], [3.0, 1.0]])  # the second column of series 1 never changes
    errors = Errors(2, 2, change_SC=change_SC)
    series = [2, 0, 1]  # of each lane
    for lane in range(3):  # lane by lane: the sums must not care
        errors.update(out_TBHC[:, lane : lane + 1], target_TBHC[:, lane : lane + 1], torch.tensor(series[lane : lane + 1]))
    at_once = Errors(2, 2, change_SC=change_SC)
    at_once.update(out_TBHC, target_TBHC, torch.tensor(series))
    assert at_once.values() == pytest.approx(errors.values(), rel=1e-13)
    absolute, square, scaled = [], [], []
    lanes = torch.arange(3).reshape(1, 3, 1, 1).expand(4, 3, 2, 2).flatten()
    for o, t, c, b in zip(out_TBHC.flatten(), target_TBHC.flatten(), [0, 1] * 24, lanes, strict=True):
        if not t.isnan():
            gap = (o - t).abs().item()
            absolute.append(gap)
            square.append(gap * gap)
            if change := change_SC[series[b], c].item():
                scaled.append(gap / change)
    assert len(absolute) == 48 - 4 - 1
    wanted = {
        "mae": sum(absolute) / len(absolute),
        "rmse": math.sqrt(sum(square) / len(square)),
        "mase": sum(scaled) / len(scaled),
    }
    assert errors.values() == pytest.approx(wanted, rel=1e-13)  # float64, summed in another order


@pytest.mark.parametrize("middle", [0.4, 0.5])
def test_quantiles(middle: float) -> None:
    errors = Errors(1, 1, quantiles=(0.1, middle, 0.9))
    out_TBHCQ = torch.tensor([[-1.0, 0.0, 1.0]] * 4).reshape(4, 1, 1, 1, 3)
    target_TBHC = torch.tensor([-2.0, -0.5, 0.0, NAN]).reshape(4, 1, 1, 1)
    errors.update(out_TBHCQ, target_TBHC)
    below = (0.9 * 1 + 0.1 * 0.5 + 0.1 * 1) + (1 - middle) * 2.5 + 0.1 * (3 + 1.5 + 1)
    wanted = {"pinball": below / 9, "coverage_0.1": 1 / 3, f"coverage_{middle:g}": 1.0, "coverage_0.9": 1.0}
    # Only the median is a point forecast; an outer quantile is wrong by design.
    point = {"mae": 2.5 / 3, "rmse": math.sqrt(4.25 / 3)} if middle == 0.5 else {}
    assert errors.values() == pytest.approx(wanted | point, rel=1e-13)  # quantiles are rounded to binary


def filled(metric: Metric, seed: int) -> Metric:
    if isinstance(metric, Confusion):
        metric.update(random(7, 3, seed=seed), torch.arange(7) % 3)
    else:
        metric.update(random(5, 2, 2, 3, seed=seed), random(5, 2, 2, seed=seed + 9))
    return metric


@pytest.mark.parametrize("make", [lambda: Confusion(3), lambda: Confusion(3, weighted=True), lambda: Errors(2, 2, (0.2, 0.5, 0.8))])
def test_sums_add_over_ranks(make: Callable[[], Metric]) -> None:
    whole = filled(filled(make(), 1), 2)
    first, second = filled(make(), 1), filled(make(), 2)
    for name, tensor in first.tensors().items():
        tensor += second.tensors()[name]  # as an all-reduce does, in place
    assert first.values() == pytest.approx(whole.values(), rel=1e-14)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("quantiles", [None, (0.2, 0.5, 0.8)])
def test_updates_do_not_wait_for_the_device(quantiles: tuple[float, ...] | None) -> None:
    out = random(5, 2, 2, 2, *([3] if quantiles else []))
    target = random(5, 2, 2, 2, seed=2)
    target[1, 1] = NAN
    logits, tags = random(5, 2, 3), torch.arange(10).reshape(5, 2) % 3
    moved = [tensor.cuda() for tensor in (out, target, logits, tags)]
    errors, confusion = Errors(2, 2, quantiles, device="cuda"), Confusion(3, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        errors.update(*moved[:2])
        confusion.update(moved[2], moved[3])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    there, here = Errors(2, 2, quantiles), Confusion(3)
    there.update(out, target)
    here.update(logits, tags)
    assert errors.values() == pytest.approx(there.values(), rel=1e-13)  # float64, summed in another order
    assert confusion.values() == here.values()


def test_the_target_is_among_the_likeliest() -> None:
    meter = Confusion(4, tops=(1, 2, 3))
    out = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.5, 0.5, 0.5, 0.1], [9.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0], [math.nan] * 4])
    target = torch.tensor([1, 2, 1, -100, 0])  # first; third among equals; last; ignored; nothing can be said of NaN
    meter.update(out[:3], target[:3])
    other = Confusion(4, tops=(1, 2, 3))
    other.update(out[3:], target[3:])
    for name, tensor in meter.tensors().items():
        tensor += other.tensors()[name]
    values = meter.values()
    assert [values[f"top_{top}_accuracy"] for top in (1, 2, 3)] == [1 / 4, 1 / 4, 2 / 4]
    assert "top_hits" not in Confusion(4).tensors()  # a snapshot holds what it held before


def test_errors_in_the_units_of_the_data_by_column_step_and_series() -> None:
    draw = np.random.default_rng(2)
    out, target = draw.normal(size=(2, 2, 4, 3, 2))  # [T, B, H, C]
    target[1, 2, 0, 1] = np.nan
    sequence = torch.tensor([1, 0, 1, -1])
    target[:, 3] = np.nan  # an idle lane
    unit = np.array([[10.0, 1.0], [100.0, 5.0]])
    columns = Columns(("load", "temperature"), torch.from_numpy(unit), ("a", "b"))
    meter = Errors(3, 2, columns=columns)
    meter.update(torch.from_numpy(out), torch.from_numpy(target), sequence)
    error = (out - target) * unit[sequence.clamp(min=0).numpy()][None, :, None]
    values = meter.values()
    for place, name in enumerate(columns.names):
        own = error[..., place]
        assert values[f"mae[{name}]"] == pytest.approx(np.nanmean(np.abs(own)), rel=1e-12)
        assert values[f"rmse[{name}]"] == pytest.approx(np.sqrt(np.nanmean(own**2)), rel=1e-12)
    for row in meter.rows("step"):
        own = error[:, :, int(row["step"]) - 1, columns.names.index(str(row["column"]))]
        assert (row["mae"], row["targets"]) == (pytest.approx(np.nanmean(np.abs(own)), rel=1e-12), np.isfinite(own).sum())
    for row in meter.rows("series"):
        lanes = [lane for lane in range(4) if sequence[lane] == "ab".index(str(row["series"]))]
        own = error[:, lanes][..., columns.names.index(str(row["column"]))]
        assert (row["rmse"], row["targets"]) == (pytest.approx(np.sqrt(np.nanmean(own**2)), rel=1e-12), np.isfinite(own).sum())
    assert len(meter.rows("series")) == 4


def test_labels_that_train_does_not_have_are_answered_wrongly() -> None:
    """Some slots and intents of ATIS occur only in its test set: scikit-learn counts them as errors, too."""
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [5.0, 1.0, 0.0], [0.0, 1.0, 4.0]])
    metric = Confusion(3, labels=("a", "b", "c"), tops=(2,), weighted=True)
    metric.update(logits, torch.tensor([0, 1, UNSEEN, -100]))
    found = metric.values()
    assert (found["accuracy"], found["top_2_accuracy"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert found["macro_f1"] == pytest.approx((2 / 3 + 1 + 0) / 3)  # of a, which was also answered wrongly, b, and what is not in train
    expected = torch.nn.functional.cross_entropy(logits[:2].double(), torch.tensor([0, 1]))
    assert found["unweighted_loss"] == pytest.approx(float(expected))
    assert [row["predicted"] for row in metric.rows("label")] == [2, 1, 0]
