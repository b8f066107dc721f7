"""Selects the library that torch uses on the CPU: oneDNN or plain BLAS."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from typing import Any

import torch

# Chosen by processor type, not by measuring at run time: the choice changes the last bits, and a run must be reproducible.
# Training one layer in float32, oneDNN took 0.5 to 1.1 times as long as `manual` on x86, and 1.2 to 2.8 times as long on ARM.
ONEDNN_IS_FAST = platform.machine().lower() in ("x86_64", "amd64")


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Inside this context, torch multiplies with plain BLAS and runs its native LSTM."""
    backend: Any = torch.backends.mkldnn
    before = backend.enabled
    backend.enabled = False
    try:
        yield
    finally:
        backend.enabled = before
