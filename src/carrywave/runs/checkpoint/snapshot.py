"""A snapshot is everything a run needs to resume exactly where it was; without pickle, and never half-written.

On disk it is a folder of safetensors files and a manifest. Workers write files in parallel, each its part; a file is named after its first
tensor, and tensors after parameters, their rows, layers and lanes, never after ranks. Everything is written under a temporary name and
published by one rename, and only then does the file `last` name it (and `best`, if its weights are the best so far). So whenever a crash
happens, both name complete snapshots.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from carrywave.errors import Diverged, RunError, option
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.checkpoint.manifest import MANIFEST, REMEDY, File, Manifest, encode, is_plain, read_manifest

POINTER, BEST = "last", "best"
NONE_YET = ".none-yet"  # exists from the start of a run to its first snapshot: what was written until then can be reproduced
TEMPORARY = ".tmp-"

Tensors = dict[str, Tensor]
Groups = dict[str, Tensors]  # by kind: parameters, optimizer, carry, extra; of replicas that train on their own, outer and replica


@dataclass(frozen=True)
class Stored:
    """A snapshot on disk, of which only the manifest has been read."""

    folder: Path
    manifest: Manifest

    @property
    def meta(self) -> dict[str, Any]:
        """The metadata of the snapshot."""
        return self.manifest.meta

    def to_json(self) -> list[Any]:
        """What is sent to other workers, which read the files themselves."""
        return [str(self.folder), self.manifest.to_json()]

    def verify(self, share: int = 0, of: int = 1) -> None:
        """Verify every byte of the files in share `share` of `of`; together, the shares are all files."""
        for name in sorted(self.manifest.files)[share::of]:
            self.manifest.files[name].read(self.folder / name, ())

    def read(self, group: str, names: Collection[str]) -> Tensors:
        """Read tensors of a group from the files that hold them, verifying every byte of those files."""
        tensors: Tensors = {}
        for name, file in self.manifest.files.items():
            if file.group == group and not file.tensors.keys().isdisjoint(names):
                tensors |= file.read(self.folder / name, names)
        if group == "parameters" and (bad := not_finite(tensors)) is not None:
            raise RunError(f"snapshot {self.folder}: parameter {bad} is not finite; resume from an older snapshot or start a new run")
        return tensors

    def pieces(self, name: str) -> list[tuple[int, int, str]]:
        """The ranges of lanes in which a carry tensor was written, as (start, end, key); they cover all lanes."""
        pieces = sorted(ranges_of(self.manifest.forms("carry")).get(name, []))
        ends = [0, *(end for _, end, _ in pieces)]
        if not pieces or [start for start, _, _ in pieces] != ends[:-1]:
            raise RunError(f"snapshot {self.folder} does not contain every lane of {name}; {REMEDY}")
        return pieces

    def lanes(self, name: str, low: int = 0, high: int | None = None) -> Tensor:
        """Lanes [low, high) of a carry tensor, whichever workers wrote them."""
        pieces = self.pieces(name)
        high = pieces[-1][1] if high is None else high
        needed = [piece for piece in pieces if piece[0] < high and piece[1] > low]
        tensors = self.read("carry", {key for _, _, key in needed})
        return torch.cat([tensors[key][:, max(low - start, 0) : high - start] for start, _, key in needed], dim=1)


def open_stored(path: Path) -> Stored:
    """Open the last snapshot in a folder of snapshots, or the one in this very folder."""
    folder = path if (path / MANIFEST).is_file() else last(path)
    return Stored(folder, read_manifest(folder))


def last(folder: Path) -> Path:
    """The folder of the last snapshot."""
    if not (folder / POINTER).is_file():
        newest = max((found.parent.name for found in folder.glob(f"step-*/{MANIFEST}")), default=None)
        if newest is not None:
            raise RunError(f"{folder / POINTER} is missing; write the name of the newest snapshot beside it, {newest}, into it")
        raise RunError(f"{folder} has no snapshot; remove {option('resume')} and start in another {option('run')}")
    name = pointed(folder, POINTER)
    if name is None or not (folder / name / MANIFEST).is_file():
        raise RunError(
            f"{folder / POINTER} does not name a snapshot in its folder; replace its content with the name of a snapshot folder beside it"
        )
    return folder / name


def write_part(draft: Path, groups: Mapping[str, Tensors]) -> dict[str, File]:
    """Write one worker's part into the draft of a snapshot, one file per group, synced to disk; returns their manifest entries."""
    files: dict[str, File] = {}
    if (bad := not_finite(groups.get("parameters", {}))) is not None:
        raise Diverged(f"parameter {bad} is not finite, so no snapshot is written; lower train.lr or set train.clip, and resume")
    for group, tensors in groups.items():
        if tensors:
            name = f"{group}-{_slug(next(iter(tensors)))}.safetensors"
            with (draft / name).open("xb") as file:
                size, checksum = atomic_files.write_tensors(file, tensors)
                file.flush()
                os.fsync(file.fileno())
            forms = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
            files[name] = File(group, size, checksum, forms)
    return files


def publish(draft: Path, name: str, manifest: Manifest, keep: int, *, best: bool = False) -> Path:
    """Turn a draft whose files are all on disk into a snapshot: complete, named by `last`, one of at most `keep`; returns its folder."""
    folder = draft.parent
    atomic_files.write_bytes(draft / MANIFEST, encode(manifest.to_json()))
    target = _free(folder, name)
    os.replace(draft, target)
    try:
        atomic_files.sync_path(folder)
        _point(folder, POINTER, target.name)
    except BaseException:
        if pointed(folder, POINTER) != target.name:
            atomic_files.remove(target)
        raise
    with suppress(OSError):
        (folder / NONE_YET).unlink()
    if best:
        _point(folder, BEST, target.name)
    _prune(folder, target.name, keep)
    return target


def restore_best(stored: Stored) -> None:
    """Point `best` to the snapshot that a run resumes from, if that is the best one: a crash may have come before it was written."""
    folder = stored.folder.parent
    at = stored.meta["progress"]
    if at["best_step"] == at["step"] and pointed(folder, POINTER) == stored.folder.name and pointed(folder, BEST) != stored.folder.name:
        _point(folder, BEST, stored.folder.name)


def snapshot_of_best(folder: Path, progress: Mapping[str, Any]) -> Stored | None:
    """The snapshot of the best evaluation that `progress` knows of, which `best` names from now on; None if it is gone."""
    step = progress["best_step"] if progress["best"] is not None else progress["evaluated"]
    for entry in sorted(folder.glob(f"step-{step:08d}*")):
        with suppress(RunError):
            stored = open_stored(entry)
            at = stored.meta["progress"]
            # A run that went back may have reached the same step in another way.
            if at["step"] == step and at["evaluated"] == step and at["best"] == progress["best"]:
                if at["best"] is not None:
                    _point(folder, BEST, entry.name)
                return stored
    return None


def weights_are_of(path: Path, step: int) -> bool:
    """True if a file of weights is sound and of this step."""
    try:
        return atomic_files.read_metadata(path).get("step") == str(step)
    except RunError:
        return False


def refuse_not_finite(path: Path, parameters: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not finite: they are never written."""
    if (bad := not_finite(parameters)) is not None:
        raise Diverged(f"parameter {bad} is not finite, so {path} is not written; lower train.lr or set train.clip")


def write_weights(path: Path, parameters: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write weights that are known to be finite, atomically."""
    with atomic_files.replacing(path) as file:
        atomic_files.write_tensors(file, parameters, metadata, sealed=True)


def load_weights(
    path: Path,
    expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    ignored: str | None = None,
    *,
    renamed: Mapping[str, str] | None = None,
    wanted: Collection[str] | None = None,
) -> Tensors:
    """Load weights from a safetensors file that holds exactly the expected names, shapes and dtypes; it may also hold `ignored`.

    `renamed`: for names in the file, those that are expected. `wanted`: those to return; the file is mapped, and no others are read.
    """
    weights = {(renamed or {}).get(name, name): tensor for name, tensor in atomic_files.read_tensors(path).items()}
    remedy = "use the weights of a model with the same spec"
    for name, (shape, dtype) in expected.items():
        if name not in weights:
            raise RunError(f"{path} is from another model: it has no {name}; {remedy}")
        if tuple(weights[name].shape) != tuple(shape):
            raise RunError(f"{path} is from another model: {name} has shape {list(weights[name].shape)}, expected {list(shape)}; {remedy}")
        if weights[name].dtype != dtype:
            raise RunError(
                f"{path}: {name} is {weights[name].dtype}, expected {dtype}; use the train.precision it was trained with, or convert it"
            )
    if extra := sorted(weights.keys() - expected.keys() - {ignored}):
        raise RunError(f"{path} is from another model: it has {extra[0]}, which this model does not; {remedy}")
    weights = weights if wanted is None else {name: weights[name] for name in wanted}
    if (bad := not_finite(weights)) is not None:
        raise RunError(f"{path}: {bad} is not finite; use other weights")
    return {name: weights[name] for name in expected if name in weights}


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


def ranged(name: str, low: int, high: int) -> str:
    """The key of lanes [low, high) of a carry tensor."""
    return f"{name}/{low}-{high}"


def ranges_of(keys: Iterable[str]) -> dict[str, list[tuple[int, int, str]]]:
    """The carry tensors by name, with the ranges of lanes in which they are stored, as (start, end, key)."""
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    for key in keys:
        name, _, lanes = key.rpartition("/")
        low, _, high = lanes.partition("-")
        ranges.setdefault(name, []).append((int(low), int(high), key))
    return ranges


def under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def pointed(folder: Path, pointer: str) -> str | None:
    """What `last` or `best` names; None if that is missing or no plain name."""
    try:
        name = (folder / pointer).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if is_plain(name) else None


def sweep(folder: Path) -> None:
    """Remove what a run that was killed while writing has left. Nobody may be writing a snapshot into this folder."""
    for left in folder.glob(f"{TEMPORARY}*"):
        atomic_files.remove(left)


def _point(folder: Path, pointer: str, name: str) -> None:
    atomic_files.write_bytes(folder / pointer, f"{name}\n".encode())


def _slug(name: str) -> str:
    """A file name; with a hash if the name itself cannot be one."""
    plain = name.replace("/", "-")
    if re.fullmatch(r"[A-Za-z0-9._-]{1,100}", plain):
        return plain
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', plain)[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def _free(folder: Path, name: str) -> Path:
    """A folder name that is not taken. A folder that neither `last` nor `best` names was left by a crash, and is removed."""
    target, number = folder / name, 1
    while target.exists():
        if target.name not in (pointed(folder, POINTER), pointed(folder, BEST)):
            _retire(target)
            break
        number += 1
        target = folder / f"{name}-{number}"
    return target


def _prune(folder: Path, current: str, keep: int) -> None:
    """Remove the oldest snapshots beyond `keep`, never those that `last` and `best` name."""
    spared = {current, pointed(folder, POINTER), pointed(folder, BEST)}
    others = [
        entry.name
        for entry in folder.iterdir()
        if entry.name not in spared and not entry.name.startswith(".") and not entry.is_symlink() and (entry / MANIFEST).is_file()
    ]
    # By the steps in their names, since clocks may jump. Those beyond the current step are from before the run went back, and go first.
    now = _steps(current)
    others.sort(key=lambda name: (_steps(name) <= now, _steps(name)), reverse=True)
    for name in others[max(0, keep - 1) :]:
        _retire(folder / name)


def _retire(path: Path) -> None:
    """Remove a snapshot, renamed to a draft first: what a crash leaves of it is then swept up."""
    gone = path.with_name(f"{TEMPORARY}{path.name}-gone")
    atomic_files.remove(gone)
    with suppress(OSError):
        os.replace(path, gone)
        atomic_files.remove(gone)


def _steps(name: str) -> tuple[list[int], str]:
    return [int(number) for number in re.findall("[0-9]+", name)], name


def weights_metadata(path: Path) -> dict[str, str]:
    """The metadata of a weights file; empty if the file is missing or unreadable."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError):
        return {}
