"""Workers of these tests share the one GPU that there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.shares.mps import shares


@pytest.fixture(scope="session", autouse=True)
def _kernel_cache() -> None:
    """torch warns if several processes make this folder at once."""
    Path("~/.cache/torch/kernels").expanduser().mkdir(parents=True, exist_ok=True)


@pytest.fixture(autouse=True)
def one_gpu_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYWAVE_SHARE_GPU", "1")


@pytest.fixture
def two_shares(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every process that is started has half of the GPU."""
    with shares(2) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield
