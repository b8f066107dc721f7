"""A metric that keeps the forecasts of a part beside what came, those of each origin in their own place, whoever computes them.

Shapes: T time, B lane, H horizon, C columns, S sequences, N origins of all sequences, one after another.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.data.sequences import View
from carrywave.tasks.metrics.bands import absolute_errors
from carrywave.tasks.metrics.errors import Row, Slope

Reals = NDArray[np.float64]
MOST_NUMBERS = 1 << 23  # forecasts that are kept; of more, those of evenly spaced origins are


class KeptForecasts:
    """Forecasts and targets in standardised units, less the naive forecast.

    `apart`: columns that are sequences of their own, one after another; 0: each sequence has all of them. `deviation`: of the last values
    of each column at each row, beside which errors are large or small; None: 1.
    """

    def __init__(self, view: View, horizon: int, outputs: int, apart: int, device: torch.device, deviation: Slope | None = None) -> None:
        self.apart, self._deviation = apart, deviation
        warm_S = np.zeros(len(view.lengths), np.int64) if view.warm is None else np.clip(view.warm, 0, np.maximum(view.lengths, 0))
        count_S = np.maximum(view.lengths, 0) - warm_S
        total, ends_S = int(count_S.sum()), np.cumsum(count_S)
        self.every = max(1, -(-total * horizon * outputs // MOST_NUMBERS))
        self.sequence_N = np.searchsorted(ends_S, np.arange(0, total, self.every), side="right")
        self._first_S, self._warm_S, self._count_S = (torch.from_numpy(each).to(device) for each in (ends_S - count_S, warm_S, count_S))
        zeros = torch.zeros(2, len(self.sequence_N), horizon, outputs, dtype=torch.float64, device=device)
        self.out_NHC, self.target_NHC = zeros.unbind()
        self.seen_N = torch.zeros(len(self.sequence_N), dtype=torch.float64, device=device)
        self.deviation_NC = torch.zeros(len(self.sequence_N), outputs, dtype=torch.float64, device=device)

    def fits(self, out: object, target: Tensor) -> bool:
        """True if there is one number for each target."""
        return isinstance(out, Tensor) and out.shape == target.shape

    @torch.no_grad()
    def update(self, out: Tensor, target: Tensor, sequence_B: Tensor | None = None, first_B: Tensor | None = None) -> None:
        """Keep a batch: forecasts [T, B, H, C] and targets [T, B, H, C]."""
        assert sequence_B is not None
        assert first_B is not None
        at_B, steps = sequence_B.clamp(min=0), torch.arange(len(target), device=target.device)
        row_TB = first_B + steps[:, None] - self._warm_S[at_B]
        place_TB = self._first_S[at_B] + row_TB
        kept_TB = (sequence_B >= 0) & (row_TB >= 0) & (row_TB < self._count_S[at_B]) & (place_TB % self.every == 0)
        slot_K = place_TB[kept_TB] // self.every
        self.out_NHC[slot_K], self.target_NHC[slot_K] = out[kept_TB].double(), target[kept_TB].double()
        self.seen_N[slot_K] = 1.0
        self.deviation_NC[slot_K] = 1.0 if self._deviation is None else self._deviation(at_B, first_B, len(target))[kept_TB][:, 0]

    def tensors(self) -> dict[str, Tensor]:
        """Return what is kept: added over workers, each has it from where it was computed and zeros from everywhere else."""
        return {"out": self.out_NHC, "target": self.target_NHC, "seen": self.seen_N, "deviation": self.deviation_NC}

    def values(self) -> dict[str, float]:
        """Return nothing: these are no figures yet."""
        return {}

    def rows(self, by: str) -> list[Row]:
        """Return nothing."""
        return []

    def groups(self) -> NDArray[np.int64]:
        """Return for each origin [N] the number of a group, of neighbours in a sequence whose horizons overlap."""
        horizon = self.out_NHC.shape[1]
        within_N = np.arange(len(self.sequence_N)) - np.searchsorted(self.sequence_N, self.sequence_N)
        group_N: NDArray[np.int64] = self.sequence_N * (len(self.sequence_N) + 1) + within_N * self.every // horizon
        return group_N

    def errors(self, *, summed: bool) -> list[Reals]:
        """Return the absolute errors [N, H] of each column, NaN where there is no target; `summed`: those of the sums of changes."""
        absolute_NHC = absolute_errors(self.out_NHC, self.target_NHC, summed=summed)
        error_NHC: Reals = torch.where(self.seen_N[:, None, None] > 0, absolute_NHC, torch.nan).cpu().numpy()
        return self._by_column(error_NHC)

    def deviations(self) -> list[Reals]:
        """Return the deviations [N] that go with them."""
        return self._by_column(torch.where(self.seen_N[:, None] > 0, self.deviation_NC, 1.0).cpu().numpy())

    def _by_column(self, each_NxC: Reals) -> list[Reals]:
        if not self.apart:
            return list(np.moveaxis(each_NxC, -1, 0))
        return [each_NxC[self.sequence_N % self.apart == column, ..., 0] for column in range(self.apart)]
