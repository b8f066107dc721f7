"""The run as workers that do not write it see it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from carrywave.runs.run import Run, Value


class NullRun(Run):
    """A run that another worker writes: anything written here is discarded."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, new=False)

    def make(self) -> None:
        """Do nothing."""

    def expect_snapshot(self, init: str | None) -> None:
        """Do nothing."""

    def write_metrics(self, row: Mapping[str, Value]) -> None:
        """Do nothing."""

    def write_history(self, row: Mapping[str, Value]) -> None:
        """Do nothing."""

    def write_timeline(self, value: Any) -> None:
        """Do nothing."""

    def write_weights(self, parameters: Mapping[str, Tensor], step: int, share: float | None = None) -> None:
        """Do nothing."""

    def write_linear(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing."""

    def cut_back(self, metrics_bytes: int, timing_bytes: int, sha256: str | None = None, step: int | None = None) -> None:
        """Do nothing."""

    def _write(self, name: str, text: str) -> None:
        """Do nothing."""

    def _append(self, name: str, row: Mapping[str, Value]) -> None:
        """Do nothing."""
