"""Precisions: what they switch in torch, and that others in the process can still read it."""

from __future__ import annotations

import pytest
import torch

from carrywave.step.precision import autocast, configure, parameter_dtype


@pytest.mark.parametrize(("precision", "tf32"), [("fp32", False), ("tf32", True), ("bf16", False), ("fp64", False)])
def test_tf32_only_where_it_is_asked_for(precision: str, tf32: bool) -> None:
    configure(precision)
    # These raise where cuDNN's parts were set apart from each other.
    assert torch.backends.cudnn.allow_tf32 is tf32
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    with torch.backends.cudnn.flags(enabled=False):
        pass
    configure("fp32")


def test_parameters_are_long() -> None:
    assert [parameter_dtype(name) for name in ("fp32", "bf16", "fp16", "fp64")] == [torch.float32] * 3 + [torch.float64]


def test_only_halves_are_cast() -> None:
    x = torch.ones(2, 2)
    cpu = torch.device("cpu")
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with autocast(precision, cpu):
            assert (x @ x).dtype == dtype
