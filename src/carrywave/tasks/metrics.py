"""Metrics as sums on the device: they can be added over ranks, kept in a snapshot, and are read by the host only at the end.

Targets that count for nothing (-100, or NaN among floats) add nothing. Shapes: T time, B lane, K classes or outputs,
H horizon, C columns, Q quantiles, S series of a part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from carrywave.data.batch import IGNORED
from carrywave.errors import RunError
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec


class Metric(Protocol):
    """Sums that batches add to."""

    def fits(self, out: object, target: Tensor) -> bool:
        """Whether this is something it can judge: a head of the user's own may put out anything."""

    def update(self, out: Tensor, target: Tensor, sequence_B: Tensor | None = None) -> None:
        """Add a batch: what the head put out, its targets, and which sequence stands in each lane."""

    def tensors(self) -> dict[str, Tensor]:
        """The sums themselves, not copies: adding those of all ranks in place gives the metric of the whole."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up sums from a snapshot."""

    def values(self) -> dict[str, float]:
        """The metrics by name; waits for the device."""


def for_task(
    spec: Spec, facts: DataFacts, device: torch.device | str = "cpu", change_SC: Tensor | None = None, unit_C: Tensor | None = None
) -> Metric | None:
    """The metric of a spec's task; None for language models, whose loss says it all (see `language`).

    Forecasts are judged as they are trained, standardised, so that columns of different units count alike; regression in the
    units of the data, `unit_C` for each standardised 1.
    """
    match spec.task:
        case "language":
            return None
        case "classification" | "tagging":
            return Confusion(len(facts.labels), device)
        case "forecasting":
            return Errors(spec.data.horizon, facts.outputs, spec.data.quantiles, change_SC, device)
        case "regression":
            return Errors(1, facts.outputs, device=device, unit_C=unit_C)


def language(loss: float) -> dict[str, float]:
    """Perplexity and bits a token, from the mean loss in nats."""
    # Past this the exponential leaves float64.
    return {"perplexity": math.exp(loss) if loss < 709.0 else loss if math.isnan(loss) else math.inf, "bits": loss / math.log(2.0)}


class Confusion:
    """Accuracy and macro F1, from how often each class was taken for each."""

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self.counts_KK = torch.zeros(classes, classes, dtype=torch.int64, device=device)  # target, guess

    def fits(self, out: object, target: Tensor) -> bool:
        """A number for each class."""
        return isinstance(out, Tensor) and out.shape == (*target.shape, self.counts_KK.shape[0])

    @torch.no_grad()
    def update(self, out: Tensor, target: Tensor, sequence_B: Tensor | None = None) -> None:
        """Add logits [B, K] or [T, B, K] and classes [B] or [T, B]."""
        real = (target != IGNORED).reshape(-1)
        place = (target * self.counts_KK.shape[0] + out.argmax(-1)).reshape(-1)
        # Ignored ones add zero to the first cell: picking the others out would make the host wait for their number.
        self.counts_KK.view(-1).scatter_add_(0, torch.where(real, place, 0), real.to(torch.int64))

    def tensors(self) -> dict[str, Tensor]:
        """The sums."""
        return {"confusion": self.counts_KK}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up sums from a snapshot."""
        _take(self.tensors(), tensors)

    def values(self) -> dict[str, float]:
        """Accuracy, and the mean F1 of the classes that occur as a target or as a guess."""
        counts_KK = self.counts_KK.cpu().to(torch.float64)
        hits_K = counts_KK.diagonal()
        occurrences_K = counts_KK.sum(0) + counts_KK.sum(1)
        f1_K = (2.0 * hits_K / occurrences_K)[occurrences_K > 0]
        return {"accuracy": _ratio(hits_K.sum(), counts_KK.sum()), "macro_f1": f1_K.mean().item() if len(f1_K) else math.nan}


class Errors:
    """Errors of numbers, for each step ahead and column: MAE, RMSE; for forecasts MASE, and of quantiles their loss and coverage.

    Among quantiles the median is the point forecast. Where 0.5 is not one of them there is none, and MAE, RMSE and MASE are left out.
    """

    def __init__(
        self,
        horizon: int,
        outputs: int,
        quantiles: Sequence[float] | None = None,
        change_SC: Tensor | None = None,
        device: torch.device | str = "cpu",
        unit_C: Tensor | None = None,
    ) -> None:
        self.unit_C = None if unit_C is None else unit_C.to(device, torch.float64)  # what a standardised difference of 1 is worth
        self.quantiles = tuple(quantiles or ())
        zeros_HC = torch.zeros(horizon, outputs, dtype=torch.float64, device=device)
        self.absolute_HC, self.square_HC, self.count_HC = zeros_HC.clone(), zeros_HC.clone(), zeros_HC.clone()
        # Relative to how much each series changes over a season within train. What never changes there has no MASE, and weight 0.
        self.scaled_HC, self.scaled_count_HC = zeros_HC.clone(), zeros_HC.clone()
        self.weight_SC = None
        if change_SC is not None:
            self.weight_SC = torch.where(change_SC > 0, 1.0 / change_SC.to(torch.float64), 0.0).to(device)
        self.pinball_Q, self.covered_Q = torch.zeros(2, len(self.quantiles), dtype=torch.float64, device=device)
        self._share_Q = torch.tensor(self.quantiles, dtype=torch.float64, device=device)

    def fits(self, out: object, target: Tensor) -> bool:
        """A number for each target, or one for each of its quantiles."""
        return isinstance(out, Tensor) and out.shape == (*target.shape, *([len(self.quantiles)] if self.quantiles else []))

    @torch.no_grad()
    def update(self, out: Tensor, target: Tensor, sequence_B: Tensor | None = None) -> None:
        """Add forecasts [T, B, H, C] or [T, B, H, C, Q] and targets [T, B, H, C], or [B, K] and [B, K].

        `sequence_B` is the series in each lane, -1 in an idle one; it may be left out where there is one.
        """
        tail = tuple(self.count_HC.shape)
        target_NHC = target.reshape(-1, *tail)
        real_NHC = ~target_NHC.isnan()
        self.count_HC += real_NHC.sum(0)
        if self.quantiles:
            out_NHCQ = out.to(target.dtype).reshape(-1, *tail, len(self.quantiles))
            below_NHCQ = (target_NHC.unsqueeze(-1) <= out_NHCQ) & real_NHC.unsqueeze(-1)
            self.covered_Q += below_NHCQ.flatten(0, -2).sum(0)
            gap_NHCQ = torch.where(real_NHC.unsqueeze(-1), target_NHC.unsqueeze(-1) - out_NHCQ, 0.0).to(torch.float64)
            self.pinball_Q += torch.maximum(self._share_Q * gap_NHCQ, (self._share_Q - 1.0) * gap_NHCQ).flatten(0, -2).sum(0)
            if self._median is None:
                return
            out_NHC = out_NHCQ[..., self._median]
        else:
            out_NHC = out.to(target.dtype).reshape(-1, *tail)
        error_NHC = torch.where(real_NHC, out_NHC - target_NHC, 0.0).to(torch.float64)
        error_NHC = error_NHC if self.unit_C is None else error_NHC * self.unit_C
        self.absolute_HC += error_NHC.abs().sum(0)
        self.square_HC += error_NHC.square().sum(0)
        if self.weight_SC is not None:
            weight_BC = self.weight_SC[:1] if sequence_B is None else self.weight_SC[sequence_B.clamp(min=0)]
            weight_NHC = weight_BC[:, None].expand(*target.shape[:-2], 1, -1).reshape(-1, 1, tail[1])
            self.scaled_HC += (error_NHC.abs() * weight_NHC).sum(0)
            self.scaled_count_HC += (real_NHC & (weight_NHC > 0)).sum(0)

    def tensors(self) -> dict[str, Tensor]:
        """The sums."""
        return {
            "absolute": self.absolute_HC,
            "square": self.square_HC,
            "count": self.count_HC,
            "scaled": self.scaled_HC,
            "scaled_count": self.scaled_count_HC,
            "pinball": self.pinball_Q,
            "covered": self.covered_Q,
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up sums from a snapshot."""
        _take(self.tensors(), tensors)

    def values(self) -> dict[str, float]:
        """MAE and RMSE of the point forecast; MASE where the change of a series is known; the loss and the coverage of quantiles."""
        count = self.count_HC.sum()
        found: dict[str, float] = {}
        if not self.quantiles or self._median is not None:
            found = {"mae": _ratio(self.absolute_HC.sum(), count), "rmse": math.sqrt(_ratio(self.square_HC.sum(), count))}
            if (scaled_count := self.scaled_count_HC.sum()) > 0:
                found["mase"] = _ratio(self.scaled_HC.sum(), scaled_count)
        if self.quantiles:
            found["pinball"] = _ratio(self.pinball_Q.mean(), count)
        for quantile, covered in zip(self.quantiles, self.covered_Q, strict=True):
            found[f"coverage_{quantile:g}"] = _ratio(covered, count)
        return found

    @property
    def _median(self) -> int | None:
        """The quantile that serves as the point forecast."""
        return self.quantiles.index(0.5) if 0.5 in self.quantiles else None


def _ratio(part: Tensor, whole: Tensor) -> float:
    total = whole.item()
    return part.item() / total if total else math.nan


def _take(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    for name, place in own.items():
        tensor = given.get(name)
        if tensor is None or tensor.shape != place.shape or tensor.dtype != place.dtype:
            raise RunError(f"the snapshot's metric {name} does not fit this task; resume with the spec it was made with")
        place.copy_(tensor)
