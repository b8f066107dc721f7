"""The backends of sLSTM layers: the definition, and the persistent kernels (`Dispatch`)."""

from __future__ import annotations

from carrywave.cells import slstm
from carrywave.kernels.dispatch import Dispatch

BACKENDS = Dispatch(slstm.CELL)
