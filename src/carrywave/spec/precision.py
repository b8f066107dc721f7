"""What `train.precision: auto` means on which devices. Torch-free: a laptop plans with the precision that a cluster will use."""

from __future__ import annotations

from typing import Literal

from carrywave.spec.spec import Spec

AUTO = "auto"
BF16_CAPABILITY = (8, 0)  # the compute capability from which GPUs have matrix units for bf16; older ones emulate it, slowly


def suited(*, made_for_bf16: bool) -> Literal["bf16", "fp32"]:
    """The precision that suits devices that are all made for bf16, or not."""
    return "bf16" if made_for_bf16 else "fp32"


def with_precision(spec: Spec, precision: str) -> Spec:
    """The spec with a precision in place of `auto`; one that was asked for stays."""
    if spec.train.precision != AUTO:
        return spec
    return spec.model_copy(update={"train": spec.train.model_copy(update={"precision": precision})})
