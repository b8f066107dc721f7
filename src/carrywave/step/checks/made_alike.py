"""Checks, when a trainer is made, that all workers have made the same model, and that stages can hold parts of it."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor, nn

from carrywave.errors import PlanError, UserError
from carrywave.parallel.world import World, check_agreement


def check_made_alike(model: nn.Module, world: World) -> None:
    """Refuse modules of other classes, with other options, or with other numbers in tensors and arrays that are neither parameters nor
    saved buffers: of these, all workers get rank 0's. Collective: every rank must call it.
    """
    modules = {name or "module": module for name, module in model.named_modules()}
    options = {f"as the model's {name}": _described(module) for name, module in modules.items()}
    check_agreement(world, options, "make the model with the same modules and options on all workers")
    numbers = {f"other numbers in {name}.{key}:": f"{found:08x}" for name, module in modules.items() for key, found in _checksums(module)}
    check_agreement(world, numbers, "seed what draws them alike on all workers, or keep them in a saved buffer (register_buffer)")


def _described(module: nn.Module) -> str:
    """Class and options; an option of a user's own may well be a rank or a path."""
    name = type(module).__name__
    return f"{name}({module.extra_repr()})" if type(module).__module__.startswith(("torch.", "carrywave.")) else name


def _checksums(module: nn.Module) -> list[tuple[str, int]]:
    passing = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
    found: list[tuple[str, int]] = []
    for name, value in {**vars(module), **passing}.items():
        if isinstance(value, Tensor) and not value.is_meta and value.layout == torch.strided:
            value = value.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy()
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            found.append((name, zlib.crc32(np.ascontiguousarray(value).tobytes())))
    return found


def check_tied(model: nn.Module) -> None:
    """Refuse two parameters in the same memory: on one device each learns what the other does, on two stages it would not."""
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        other = owners.setdefault(parameter.data_ptr(), name) if parameter.numel() and not parameter.is_meta else name
        stays = name.partition(".")[0] == other.partition(".")[0] != "lstm"  # within an encoder or a head, which no stage divides
        if other != name and not stays:
            raise PlanError(
                f"{other} and {name} are two tensors in the same memory; make them one parameter (head.weight = encoder.weight)"
            )


def check_dense(model: nn.Module) -> None:
    """Refuse embeddings with sparse gradients: gradients are summed as dense tensors."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserError(f"{name} is an {type(module).__name__} with sparse=True, but gradients are summed as dense tensors; remove it")
