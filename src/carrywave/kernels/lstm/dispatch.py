"""The backends of LSTM layers, and which of them runs a layer (`Dispatch`)."""

from __future__ import annotations

from carrywave.cells import lstm
from carrywave.kernels.dispatch import Dispatch
from carrywave.kernels.lstm import aten, manual

BACKENDS = Dispatch(lstm.CELL, aten, manual)
