"""Defines the arithmetic of each precision: parameters and optimizer state are float32 (float64 for fp64), the rest is cast.

Also which precision `auto` is for the devices of a world and a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from carrywave.kernels.torch_kernels import without_onednn
from carrywave.parallel.world import World, all_gather_text
from carrywave.spec.defaults import AUTO, BF16_CAPABILITY, suited
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.graphs.recorded_state import ours

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parameter_dtype(precision: str) -> torch.dtype:
    """The dtype of parameters and optimizer state."""
    return torch.float64 if precision == "fp64" else torch.float32


def made_for_bf16(device: torch.device) -> bool:
    """True for a GPU with matrix units for bf16; others emulate it, and are slower with it than in fp32."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    with torch.cuda.device(device):
        return torch.cuda.get_device_capability() >= BF16_CAPABILITY and torch.cuda.is_bf16_supported(including_emulation=False)


def not_made_for_bf16(world: World) -> dict[int, str]:
    """The ranks whose devices are not made for bf16, and the names of these devices. Collective."""
    device = world.device
    mine = "" if made_for_bf16(device) else torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {rank: name for rank, name in enumerate(all_gather_text(world, mine)) if name}


def settled(unfit: Mapping[int, str], workers: int, model: nn.Module | None) -> tuple[str, str | None]:
    """What `auto` is, the same on every worker, and a line that says why where that is not obvious.

    `unfit` is what `not_made_for_bf16` found. `model` is the user's own, if there is one: its code is not run under autocast unless the
    user asks for that, because it may not be made for it.
    """
    if unfit:
        rank, name = next(iter(unfit.items()))
        reason = f"train.precision is fp32 on all workers, because rank {rank} ({name}) is not made for bf16"
        return suited(made_for_bf16=False), reason if len(unfit) < workers else None
    if model is not None and not ours(model):
        reason = "train.precision is fp32, because modules of your own may not be made for bf16; if yours are, set train.precision=bf16"
        return suited(made_for_bf16=False), reason
    return suited(made_for_bf16=True), None


def with_settled_precision(spec: TrainSpec, world: World, model: nn.Module) -> TrainSpec:
    """The spec with a precision in place of `auto`. Collective if it is `auto`."""
    if spec.precision != AUTO:
        return spec
    precision, _ = settled(not_made_for_bf16(world), world.size, model)
    return spec.model_copy(update={"precision": precision})


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
