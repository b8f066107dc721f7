"""The manifest of a snapshot: its files, the tensors in each of them, and their checksums.

It carries a checksum of itself and is read first: names must stay within the folder, and the files must have the sizes it gives.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from carrywave import __version__
from carrywave.errors import RunError
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.checkpoint.atomic_files import Form, HashedLog

FORMAT = 2
MANIFEST = "manifest.json"
GROUPS = ("parameters", "optimizer", "carry", "extra", "outer", "replica")
REMEDY = "resume from another snapshot or start a new run"


@dataclass(frozen=True)
class File:
    """One file of a snapshot."""

    group: str
    num_bytes: int
    sha256: str
    tensors: dict[str, Form]

    def to_json(self) -> dict[str, Any]:
        """The entry of this file in the manifest."""
        tensors = {name: [atomic_files.DTYPES[dtype], list(shape)] for name, (dtype, shape) in self.tensors.items()}
        return {"group": self.group, "bytes": self.num_bytes, "sha256": self.sha256, "tensors": tensors}

    @staticmethod
    def of(content: Any) -> File:
        """Parse an entry; KeyError, TypeError or ValueError if it does not describe a file."""
        group, num_bytes, sha256, tensors = (content[key] for key in ("group", "bytes", "sha256", "tensors"))
        if group not in GROUPS or type(num_bytes) is not int or not isinstance(sha256, str) or not isinstance(tensors, dict):
            raise ValueError("not a description of a file")
        forms = {name: (atomic_files.BY_NAME[dtype], tuple(shape)) for name, (dtype, shape) in tensors.items()}
        return File(group, num_bytes, sha256, forms)

    def check(self, path: Path) -> None:
        """Check that the file is there, and whole."""
        if not path.is_file():
            raise RunError(f"{path} is missing; {REMEDY}")
        size = path.stat().st_size
        if size != self.num_bytes:
            raise RunError(f"{path} is truncated or from another snapshot: expected {self.num_bytes} bytes, got {size}; {REMEDY}")

    def read(self, path: Path, wanted: Collection[str]) -> dict[str, Tensor]:
        """Read the wanted tensors; every byte of the file is verified, including the other tensors."""
        self.check(path)
        try:
            if HashedLog.of(path).digest.hexdigest() != self.sha256:
                raise RunError(f"{path} is damaged: its SHA-256 does not match the manifest; {REMEDY}")
            with safe_open(path, "pt") as file:
                return {name: file.get_tensor(name).clone() for name in self.tensors if name in wanted}
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path} cannot be read: {' '.join(str(error).split())}; {REMEDY}") from error


@dataclass(frozen=True)
class Manifest:
    """All files of a snapshot by name, and its metadata."""

    files: dict[str, File]
    meta: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The manifest as it is written, with its own checksum."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "written_by": {"carrywave": __version__, "torch": torch.__version__},
            "files": {name: self.files[name].to_json() for name in sorted(self.files)},
            "meta": self.meta,
        }
        return content | {"sha256": digest(content)}

    @staticmethod
    def of(content: Any, folder: Path) -> Manifest:
        """Parse and check JSON; errors name the folder."""
        path = folder / MANIFEST
        version = content.get("format") if isinstance(content, dict) else None
        if type(version) is int and version != FORMAT:
            raise RunError(f"snapshot {folder} has format {version}, but this version reads format {FORMAT}; use the version that wrote it")
        if version != FORMAT or not isinstance(content.get("files"), dict) or not isinstance(content.get("meta"), dict):
            raise RunError(f"{path} is not a snapshot manifest; {REMEDY}")
        if content.get("sha256") != digest(content):
            raise RunError(f"{path} is damaged: its SHA-256 does not match; {REMEDY}")
        for name in content["files"]:
            if not is_plain(name):
                raise RunError(f"{path} lists the file {name!r}, which is outside its folder; do not use this snapshot")
        try:
            files = {name: File.of(file) for name, file in content["files"].items()}
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{path} is not a snapshot manifest ({type(error).__name__} in files); {REMEDY}") from error
        return Manifest(files, content["meta"])

    def forms(self, group: str) -> dict[str, Form]:
        """The dtypes and shapes of the tensors of a group, from all its files."""
        return {name: form for file in self.files.values() if file.group == group for name, form in file.tensors.items()}


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a snapshot, and check that all its files are there with the right sizes."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: it is not JSON; {REMEDY}") from error
    manifest = Manifest.of(content, folder)
    if text != encode(content):  # one flipped bit turns 1e-5 into 1E-5, which parses to the same
        raise RunError(f"{path} is damaged: it differs from what was written; {REMEDY}")
    for name, file in manifest.files.items():
        file.check(folder / name)
    return manifest


def encode(content: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest file."""
    return json.dumps(content, indent=1).encode()


def digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest's content, so that flipped bits in it are detected too."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_plain(name: object) -> bool:
    """True if a name denotes an entry of a folder, and cannot lead elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and not any(c in name for c in "/\\\0")
