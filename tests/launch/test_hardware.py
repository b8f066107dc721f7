"""What nvidia-smi says of the GPUs that a process may use, without torch."""

from __future__ import annotations

import pytest

from carrywave.launch import hardware
from carrywave.launch.hardware import made_for_bf16


@pytest.mark.parametrize(
    ("capabilities", "visible", "made"),
    [
        ((), None, False),
        (("9.0",), None, True),
        (("8.0", "12.0"), None, True),
        (("7.5",), None, False),
        (("9.0", "7.0"), None, False),  # workers on all of them share one precision
        (("9.0", "7.0"), "0", True),
        (("9.0", "7.0"), "1", False),
        (("9.0", "9.0"), "", False),
        (("9.0", "9.0"), "GPU-5a", True),
        (("9.0", "7.0"), "GPU-5a", False),  # it may be either
        (("[N/A]",), None, False),
    ],
)
def test_gpus_made_for_bf16(capabilities: tuple[str, ...], visible: str | None, made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"compute_cap": capabilities, "name": tuple("NVIDIA" for _ in capabilities)}
    monkeypatch.setattr(hardware, "nvidia_smi", told.__getitem__)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert made_for_bf16("cuda") is made
    assert made_for_bf16("auto") is made
    assert made_for_bf16("cpu") is False
