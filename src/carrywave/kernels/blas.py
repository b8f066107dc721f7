"""Which library multiplies on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """torch's native LSTM and plain BLAS: at every shape tried, oneDNN took 1.3 to 3 times as long, trained or not. CUDA does not care."""
    backend: Any = torch.backends.mkldnn
    before = backend.enabled
    backend.enabled = False
    try:
        yield
    finally:
        backend.enabled = before
