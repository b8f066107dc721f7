"""The backends of GRU layers, and which of them runs a layer (`Dispatch`)."""

from __future__ import annotations

from carrywave.cells import gru
from carrywave.kernels.dispatch import Dispatch
from carrywave.kernels.gru import aten, manual

BACKENDS = Dispatch(gru.CELL, aten, manual)
