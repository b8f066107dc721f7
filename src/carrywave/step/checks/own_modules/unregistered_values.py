"""Checksums of the numbers that a user's modules hold beside parameters and saved buffers, such as a table that each worker has drawn for
itself: a trainer gives all workers rank 0's weights and saved buffers, but not these.

Single whole numbers are left out, since a module may well know the rank of its worker, and so is text.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from carrywave.step.checks.own_modules.module_reads import attributes_read_by, modules_of, reached_by
from carrywave.step.checks.own_modules.object_walk import Met, is_users
from carrywave.step.checks.own_modules.stepwise import stepwise


def unregistered_values(roots: Mapping[str, object]) -> dict[str, str]:
    """A checksum for each attribute and variable that these modules and functions reach, by names. Known modules have none."""
    found: dict[str, int] = {}
    names = attributes_read_by([*roots.values()])
    held = {name for module in modules_of([*roots.values()]) if is_users(module) for name in vars(module)}
    unread = held - names if names is not None else set()  # such as the time at which a module was made
    for path, root in roots.items():
        if isinstance(root, nn.Module) and stepwise(root):
            continue
        passing = [Met((name,), module._buffers[name]) for module in modules_of([root]) for name in module._non_persistent_buffers_set]
        for met in [*passing, *reached_by([root])]:
            data = None if met.path[0] in unread else bytes_of(met)
            if data is not None:
                name = f"{path}'s {met.path[0]}"
                found[name] = zlib.crc32(data, found.get(name, 0))
    return {name: f"{checksum:08x}" for name, checksum in found.items()}


def bytes_of(met: Met) -> bytes | None:
    """The bytes of a tensor, an array, a fraction, or a whole number in a sequence; None of everything else."""
    value: Any = met.value
    if isinstance(value, Tensor):
        if value.is_meta or value.layout != torch.strided or (value.is_leaf and value.requires_grad):
            return None  # what is trained is another's business
        value = value.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else np.ascontiguousarray(value).tobytes()
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool) and isinstance(met.path[-1], int)
    return repr(value).encode() if whole or isinstance(value, float | np.floating) else None
