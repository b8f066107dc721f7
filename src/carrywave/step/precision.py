"""Defines the arithmetic of each precision: parameters and optimizer state are float32 (float64 for fp64), the rest is cast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from carrywave.kernels.blas import without_onednn

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parameter_dtype(precision: str) -> torch.dtype:
    """The dtype of parameters and optimizer state."""
    return torch.float64 if precision == "fp64" else torch.float32


def configure(precision: str) -> None:
    """Set the process-wide float32 mode: fp32 is IEEE float32, TF32 is used only if asked for (cuDNN would use it by default)."""
    # torch's older switches: they cover all of cuDNN at once, and other code in this process that reads them keeps working.
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which to run a forward pass."""
    if precision not in HALVES:
        return nullcontext()
    if device.type == "cpu":
        return _half_on_cpu(HALVES[precision])
    return torch.autocast(device.type, HALVES[precision])


@contextmanager
def _half_on_cpu(dtype: torch.dtype) -> Iterator[None]:
    # On processors without bf16 instructions oneDNN prints long warnings and falls back; plain BLAS works on all of them.
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    usable = bool(supported()) if supported is not None else False
    with torch.autocast("cpu", dtype), nullcontext() if usable else without_onednn():
        yield
