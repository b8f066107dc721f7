"""What arithmetic a precision stands for: parameters and optimizer are float32 (float64 for fp64), the rest is cast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from carrywave.kernels.blas import without_onednn

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parameter_dtype(precision: str) -> torch.dtype:
    """The dtype in which parameters and optimizer state are kept."""
    return torch.float64 if precision == "fp64" else torch.float32


def configure(precision: str) -> None:
    """Set the process-wide float32 mode: fp32 is IEEE float32, TF32 only where it was asked for (cuDNN's default uses it)."""
    # torch's older switches: they set all of cuDNN at once, and whoever else reads them in this process still can.
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a forward pass runs."""
    if precision not in HALVES:
        return nullcontext()
    if device.type == "cpu":
        return _half_on_cpu(HALVES[precision])
    return torch.autocast(device.type, HALVES[precision])


@contextmanager
def _half_on_cpu(dtype: torch.dtype) -> Iterator[None]:
    # oneDNN warns at length, and falls back, on processors that have no instructions for bf16; plain BLAS serves them all.
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    usable = bool(supported()) if supported is not None else False
    with torch.autocast("cpu", dtype), nullcontext() if usable else without_onednn():
        yield
