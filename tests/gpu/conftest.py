"""Workers of these tests share the one GPU that there is."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_gpu_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYWAVE_SHARE_GPU", "1")
