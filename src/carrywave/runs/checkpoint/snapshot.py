"""A snapshot is everything a run needs to go on exactly where it was: one safetensors file with a checksum, never half-written.

`snapshots/step-00001000.safetensors` holds tensors by parameter, layer and global lane, never by rank, and in its metadata what else there
is, as JSON. It is written under another name and renamed, and only then does the file `last` name it: whenever a crash comes, `last` names
a complete one. Rank 0 writes it, and reads it for all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carrywave import __version__
from carrywave.errors import Diverged, RunError, option
from carrywave.runs.checkpoint import atomic_files

FORMAT = 3
LAST = "last"
REMEDY = "resume from another snapshot or start a new run"
PARAMETERS = "weights/"  # with which the names of parameters begin

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Stored:
    """A snapshot that was read: every byte of it was checked."""

    path: Path
    tensors: Tensors
    meta: dict[str, Any]


def write_snapshot(folder: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], keep: int) -> None:
    """Write a snapshot into the folder of snapshots, have `last` name it, and keep at most `keep`."""
    if (bad := not_finite(under(PARAMETERS, tensors))) is not None:
        raise Diverged(f"parameter {bad} is not finite, so no snapshot is written; lower train.lr or set train.clip, and resume")
    path = path_of(folder, f"step-{step:08d}")
    about = {"format": str(FORMAT), "carrywave": __version__, "torch": torch.__version__, "meta": json.dumps(meta)}
    with atomic_files.writing(f"snapshot {path}", "the previous snapshot is kept; "):
        folder.mkdir(exist_ok=True)  # within the run's folder, which is not made again if it was removed
        with atomic_files.replacing(path) as file:
            atomic_files.write_tensors(file, tensors, about)
        atomic_files.write_bytes(folder / LAST, f"{path.stem}\n".encode())
        _prune(folder, step, keep)


def read_snapshot(folder: Path) -> Stored:
    """The last snapshot in the folder of snapshots."""
    path = last(folder)
    try:
        tensors, about = atomic_files.read_sealed(path)
    except RunError as error:
        raise RunError(f"snapshot {str(error).rpartition(';')[0]}; {REMEDY}") from error
    if (version := about.get("format")) != str(FORMAT) or "meta" not in about:
        raise RunError(f"snapshot {path} has format {version}, but this version reads format {FORMAT}; use the version that wrote it")
    if (bad := not_finite(under(PARAMETERS, tensors))) is not None:
        raise RunError(f"snapshot {path}: parameter {bad} is not finite; resume from an older snapshot or start a new run")
    return Stored(path, tensors, json.loads(about["meta"]))


def has_snapshot(folder: Path) -> bool:
    """True if there is a snapshot to go on from, or was one, in this folder of snapshots."""
    return (folder / LAST).exists() or any(folder.glob("step-*.safetensors"))


def last(folder: Path) -> Path:
    """The file of the last snapshot."""
    if not (folder / LAST).is_file():
        newest = max((found.stem for found in folder.glob("step-*.safetensors")), default=None)
        if newest is not None:
            raise RunError(f"{folder / LAST} is missing; write the name of the newest snapshot beside it, {newest}, into it")
        raise RunError(f"{folder} has no snapshot; remove {option('resume')} and start in another {option('run')}")
    name = (folder / LAST).read_text("utf-8", errors="replace").strip()
    if not re.fullmatch(r"[\w.-]+", name) or not path_of(folder, name).is_file():
        fact = f"{folder / LAST} does not name a snapshot in its folder"
        raise RunError(f"{fact}; replace its content with the name of a snapshot beside it")
    return path_of(folder, name)


def path_of(folder: Path, name: str) -> Path:
    """The file of a snapshot by its name."""
    return folder / f"{name}.safetensors"


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a NaN or infinite element; None if all are finite."""
    by_device: dict[torch.device, dict[str, Tensor]] = {}  # a stage's own tensors may be on its GPU, and those of other stages on the host
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            by_device.setdefault(tensor.device, {})[name] = tensor.detach().isfinite().all()
    finite: dict[str, bool] = {}
    for flags in by_device.values():
        finite |= zip(flags, torch.stack(list(flags.values())).tolist(), strict=True)  # one read for all tensors of a device
    return next((name for name in tensors if not finite.get(name, True)), None)


def under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _prune(folder: Path, step: int, keep: int) -> None:
    """Remove the oldest snapshots beyond `keep`. Those of a later step are from before the run went back, and go first."""
    numbers = {int(found[1]): path for path in folder.iterdir() if (found := re.fullmatch(r"step-(\d{8,})\.safetensors", path.name))}
    others = sorted((number for number in numbers if number != step), key=lambda number: (number < step, number), reverse=True)
    for number in others[max(0, keep - 1) :]:
        with suppress(OSError):
            numbers[number].unlink()
