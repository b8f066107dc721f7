"""A `Snapshot` is everything a run needs to go on exactly where it was; without pickle, and never half-written.

On the disk it is a folder of safetensors files and a `manifest.json` with their sizes and SHA-256. It is written under
a temporary name, published by one rename, and only then does the file `last` name it. So whatever the moment of a crash,
`last` names a whole snapshot. Keys are names of parameters and layers, never ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carrywave.errors import Diverged, RunError
from carrywave.train import durable

FORMAT = 1
MANIFEST = "manifest.json"
POINTER = "last"
GROUPS = ("parameters", "optimizer", "carry", "extra")
TEMPORARY = ".tmp-"

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """The state of a run between two optimizer steps."""

    parameters: Tensors  # each once: a tied one under its first name
    optimizer: Tensors = field(default_factory=dict)
    carry: Tensors = field(default_factory=dict)  # by layer name; lanes are a dimension
    extra: Tensors = field(default_factory=dict)  # loss scale, sums of metrics
    meta: dict[str, Any] = field(
        default_factory=dict
    )  # JSON: cursor, seed, rate, spec, fingerprint, history, sizes of logs; tuples come back as lists


def save(folder: Path, name: str, snapshot: Snapshot, keep: int) -> Path:
    """Write a snapshot into the folder of snapshots, point `last` to it, and keep at most `keep` of them; returns its folder."""
    meta = json.dumps(snapshot.meta)
    if (bad := not_finite(snapshot.parameters)) is not None:
        raise Diverged(f"parameter {bad} is not finite, so no snapshot is written; lower train.lr or set train.clip, and resume")
    with durable.writing(f"snapshot {folder / name}", "the snapshot before it is kept; "):
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        draft = folder / f"{TEMPORARY}{name}"
        published: Path | None = None
        try:
            draft.mkdir()
            _write(draft, snapshot, json.loads(meta))
            target = _free(folder, name)
            os.replace(draft, target)
            published = target
            durable.sync_folder(folder)
            durable.write_bytes(folder / POINTER, f"{target.name}\n".encode())
        except BaseException:
            durable.remove(draft)
            if published is not None and _pointed(folder) != published.name:
                durable.remove(published)
            raise
    _prune(folder, target.name, keep)
    return target


def load(path: Path) -> Snapshot:
    """The last snapshot of a folder of snapshots, or the one in this very folder; every byte is checked."""
    folder = path if (path / MANIFEST).is_file() else last(path)
    manifest = _manifest(folder)
    groups = {group: _group(folder, group, manifest["files"]) for group in GROUPS}
    if (bad := not_finite(groups["parameters"])) is not None:
        raise RunError(f"snapshot {folder}: parameter {bad} is not finite; resume from an older snapshot or start a new run")
    return Snapshot(**groups, meta=manifest["meta"])


def last(folder: Path) -> Path:
    """The folder of the last snapshot."""
    if not (folder / POINTER).is_file():
        raise RunError(f"{folder} holds no snapshot; leave out --resume and start anew in another --run")
    name = _pointed(folder)
    if name is None or not (folder / name / MANIFEST).is_file() or (folder / name).is_symlink():
        raise RunError(f"{folder / POINTER} names no snapshot of this folder; write the name of one of the folders beside it into it")
    return folder / name


def save_weights(path: Path, parameters: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write weights alone, as one safetensors file, atomically."""
    if (bad := not_finite(parameters)) is not None:
        raise Diverged(f"parameter {bad} is not finite, so {path} is not written; lower train.lr or set train.clip")
    with durable.writing(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with durable.replacing(path) as file:
            durable.write_tensors(file, parameters, metadata, sealed=True)


def load_weights(path: Path, expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]], ignored: str | None = None) -> Tensors:
    """Weights from a safetensors file that holds exactly the expected names, shapes and dtypes; one name may be ignored."""
    given = durable.read_tensors(path)
    remedy = "use the weights of a model with the same spec"
    for name, (shape, dtype) in expected.items():
        if name not in given:
            raise RunError(f"{path} is from another model: it has no {name}; {remedy}")
        if tuple(given[name].shape) != tuple(shape):
            raise RunError(f"{path} is from another model: {name} is {list(given[name].shape)} there and {list(shape)} here; {remedy}")
        if given[name].dtype != dtype:
            raise RunError(
                f"{path}: {name} is {given[name].dtype} there and {dtype} here; use the train.precision it was made with, or convert it"
            )
    if extra := sorted(given.keys() - expected.keys() - {ignored}):
        raise RunError(f"{path} is from another model: it holds {extra[0]}, which is not here; {remedy}")
    if (bad := not_finite(given)) is not None:
        raise RunError(f"{path}: {bad} is not finite; use other weights")
    return {name: given[name] for name in expected}


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with an element that is NaN or infinite."""
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    if not floats:
        return None
    # One read from the device for all of them.
    finite = torch.stack([tensor.detach().isfinite().all() for tensor in floats.values()]).tolist()
    return next((name for name, good in zip(floats, finite, strict=True) if not good), None)


def digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of what a manifest says, so that a flipped bit in it shows too."""
    said = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _write(draft: Path, snapshot: Snapshot, meta: Any) -> None:
    files: dict[str, dict[str, Any]] = {}
    for group in GROUPS:
        name = f"{group}.safetensors"
        with (draft / name).open("xb") as file:
            size, checksum = durable.write_tensors(file, getattr(snapshot, group))
            file.flush()
            os.fsync(file.fileno())
        files[name] = {"bytes": size, "sha256": checksum}
    manifest = {"format": FORMAT, "files": files, "meta": meta}
    manifest["sha256"] = digest(manifest)
    durable.write_bytes(draft / MANIFEST, json.dumps(manifest, indent=1).encode())


def _free(folder: Path, name: str) -> Path:
    """A folder name that is not taken. What stands there without being pointed to was left by a crash, and gives way."""
    target, number = folder / name, 1
    while target.exists():
        if target.name != _pointed(folder):
            durable.remove(target)
            break
        number += 1
        target = folder / f"{name}-{number}"
    return target


def _pointed(folder: Path) -> str | None:
    """What `last` names, where it is a plain name."""
    try:
        name = (folder / POINTER).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if _plain(name) else None


def _plain(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not any(c in name for c in "/\\\0")


def _sweep(folder: Path) -> None:
    """Remove what a run that was killed while it wrote has left."""
    for left in folder.glob(f"{TEMPORARY}*"):
        durable.remove(left)


def _prune(folder: Path, current: str, keep: int) -> None:
    """Remove the oldest snapshots beyond `keep`; the one that `last` names is never among them."""
    others = [
        entry
        for entry in folder.iterdir()
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith(".") and entry.name != current
    ]
    others.sort(key=lambda entry: (entry.stat().st_mtime_ns, entry.name), reverse=True)
    for entry in others[max(0, keep - 1) :]:
        durable.remove(entry)


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(f"{folder / MANIFEST} is damaged: it is not JSON; resume from another snapshot or start a new run") from error
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise RunError(f"snapshot {folder} has format {version}, this version reads up to {FORMAT}; update carrywave")
    if version != FORMAT or not isinstance(manifest.get("files"), dict) or not isinstance(manifest.get("meta"), dict):
        raise RunError(f"{folder / MANIFEST} is not the manifest of a snapshot; resume from another snapshot or start a new run")
    if manifest.get("sha256") != digest(manifest):
        raise RunError(f"{folder / MANIFEST} is damaged: its SHA-256 does not fit; resume from another snapshot or start a new run")
    for name in manifest["files"]:
        if not _plain(name):
            raise RunError(f"{folder / MANIFEST} names the file {name!r}, which is not in its folder; do not use this snapshot")
    return dict(manifest)


def _group(folder: Path, group: str, files: Mapping[str, Any]) -> Tensors:
    name = f"{group}.safetensors"
    path = folder / name
    remedy = "resume from another snapshot or start a new run"
    entry = files.get(name)
    if not isinstance(entry, dict):
        raise RunError(f"{folder / MANIFEST} does not name {name}; {remedy}")
    if path.is_symlink():
        raise RunError(f"{path} is a symbolic link, and a snapshot's files stand in its own folder; do not use this snapshot")
    if not path.is_file():
        raise RunError(f"{path} is missing; {remedy}")
    size = path.stat().st_size
    if size != entry.get("bytes"):
        raise RunError(f"{path} is truncated or from another snapshot: {size} bytes instead of {entry.get('bytes')}; {remedy}")
    try:
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}; {remedy}") from error
    if checksum != entry.get("sha256"):
        raise RunError(f"{path} is damaged: its SHA-256 is not the manifest's; {remedy}")
    return durable.read_tensors(path)
