"""What arithmetic a precision stands for: parameters and optimizer are float32 (float64 for fp64), the rest is cast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parameter_dtype(precision: str) -> torch.dtype:
    """The dtype in which parameters and optimizer state are kept."""
    return torch.float64 if precision == "fp64" else torch.float32


def configure(precision: str) -> None:
    """Set the process-wide float32 mode: fp32 is IEEE float32, TF32 only where it was asked for (cuDNN's default uses it)."""
    mode = "tf32" if precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = mode
    torch.backends.cudnn.rnn.fp32_precision = mode
    torch.backends.cudnn.conv.fp32_precision = mode


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a forward pass runs."""
    if precision in HALVES:
        return torch.autocast(device.type, HALVES[precision])
    return nullcontext()
