"""What `fit`, `evaluate` and `predict` leave of the process that calls them: everything as it was."""

from __future__ import annotations

import os
import random
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import carrywave as cw
from carrywave.errors import Diverged

STEPS = np.random.default_rng(0).normal(size=(24, 5, 2))
LABELS = np.where(STEPS.sum(axis=(1, 2)) > 0, "up", "down")
HOW: dict[str, Any] = {"task": "classification", "batch": {"tokens": 64}, "device": "cpu", "progress": False}


def state() -> dict[str, Any]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return {
        "Python's random state": random.getstate(),
        "NumPy's": [str(part) for part in np.random.get_state(legacy=True)],
        "torch's": torch.get_rng_state().tolist(),
        "warning filters": list(warnings.filters),
        "excepthook of threads": threading.excepthook,
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "environment": dict(os.environ),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "TF32": (matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision(), matmul.fp32_precision),
        "cuDNN": (cudnn.deterministic, cudnn.benchmark, cudnn.enabled),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.fixture
def unusual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that training would change."""
    for name in ("MIMALLOC_PURGE_DELAY", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    before, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(threads + 1)
    yield
    torch.set_float32_matmul_precision(before)
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("unusual")
def test_the_process_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = (STEPS, LABELS)
    # The first to be trained loads libraries, and what they set stays away too.
    for name, train in {"plain": {}, "tf32": {"precision": "tf32"}}.items():
        before = state()
        cw.fit({"hidden": 4, "layers": 1, "dropout": 0.2}, data, **HOW, train={"epochs": 1, **train}, run=name)
        assert state() == before
        cw.evaluate(name, data, device="cpu")
        assert state() == before
        cw.predict(name, STEPS, device="cpu")
        assert state() == before
    with pytest.raises(Diverged):
        cw.fit({"hidden": 4, "layers": 1}, data, **HOW, train={"epochs": 2, "precision": "fp64", "lr": 1e300}, run="bad")
    assert state() == before
