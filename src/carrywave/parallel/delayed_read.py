"""Reads a device tensor on the host later, when it has long been computed, so that nothing blocks in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Later:
    """A copy of the tensor's current values, transferred in the background."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._copy = tensor.clone()
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def read(self) -> Any:
        """The values as Python numbers."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy.tolist()
