"""The manifest of a snapshot: which files there are, what each of them holds, and their checksums.

It is read before anything else and believed in nothing: names stay within the folder, and sizes, shapes and dtypes must fit each
other, the files on the disk and the headers within them. So a file is known to the byte before memory is taken for it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carrywave import __version__
from carrywave.errors import RunError
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.checkpoint.atomic_files import Form

FORMAT = 2
MANIFEST = "manifest.json"
GROUPS = ("parameters", "optimizer", "carry", "extra")
REMEDY = "resume from another snapshot or start a new run"


@dataclass(frozen=True)
class File:
    """One file of a snapshot."""

    group: str
    num_bytes: int
    sha256: str
    tensors: dict[str, Form]

    def to_json(self) -> dict[str, Any]:
        """As it stands in the manifest."""
        tensors = {name: [atomic_files.DTYPES[dtype], list(shape)] for name, (dtype, shape) in self.tensors.items()}
        return {"group": self.group, "bytes": self.num_bytes, "sha256": self.sha256, "tensors": tensors}

    @staticmethod
    def of(said: Any) -> File:
        """From a manifest; ValueError where it is no description of a file."""
        group, num_bytes, sha256, tensors = (said[key] for key in ("group", "bytes", "sha256", "tensors"))
        if group not in GROUPS or type(num_bytes) is not int or not isinstance(sha256, str) or not isinstance(tensors, dict):
            raise ValueError("it does not say what a file holds")
        return File(group, num_bytes, sha256, {name: _form(*form) for name, form in tensors.items()})

    def header(self) -> tuple[list[str], bytes]:
        """The order of its tensors, and its first bytes: what is written is a function of what it holds."""
        names, header = atomic_files.lay_out(self.tensors)
        return names, atomic_files.header_text(header)

    def check(self, path: Path) -> None:
        """Whether such a file is there, as far as can be told without reading its tensors."""
        if path.is_symlink():
            raise RunError(f"{path} is a symbolic link, and a snapshot's files stand in its own folder; do not use this snapshot")
        if not path.is_file():
            raise RunError(f"{path} is missing; {REMEDY}")
        size = path.stat().st_size
        if size != self.num_bytes:
            raise RunError(f"{path} is truncated or from another snapshot: {size} bytes instead of {self.num_bytes}; {REMEDY}")
        expected = self.header()[1]
        held = sum(_num_bytes(form) for form in self.tensors.values())
        with _reading(path), path.open("rb") as file:
            given = file.read(len(expected))
        if given != expected or len(expected) + held != size:
            atomic_files.refuse_pickle(path, given[:9])
            raise RunError(f"{path} is damaged: it does not hold the tensors that the manifest names; {REMEDY}")

    def read(self, path: Path, wanted: Collection[str]) -> dict[str, Tensor]:
        """The wanted of its tensors; every byte of it is checked, also of those that are not."""
        self.check(path)
        names, header = self.header()
        found: dict[str, Tensor] = {}
        with _reading(path), path.open("rb", buffering=0) as file:
            digest = hashlib.sha256(file.read(len(header)))
            spare = bytearray(atomic_files.BLOCK_BYTES)
            for name in names:
                dtype, shape = self.tensors[name]
                left = _num_bytes((dtype, shape))
                place: memoryview | None = None
                if name in wanted:
                    found[name] = torch.empty(shape, dtype=dtype)
                    place = found[name].reshape(-1).view(torch.uint8).numpy().data if left else None
                while left:
                    start = 0 if place is None else len(place) - left
                    room = memoryview(spare) if place is None else place[start:]
                    count = file.readinto(room[: min(left, atomic_files.BLOCK_BYTES)])
                    if not count:
                        break
                    digest.update(room[:count])
                    left -= count
        if digest.hexdigest() != self.sha256:
            raise RunError(f"{path} is damaged: its SHA-256 is not the manifest's; {REMEDY}")
        return found


@dataclass(frozen=True)
class Manifest:
    """All files of a snapshot, by name, and what is said beside them."""

    files: dict[str, File]
    meta: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As it is written, with its own checksum."""
        said: dict[str, Any] = {
            "format": FORMAT,
            "written_by": {"carrywave": __version__, "torch": torch.__version__},
            "files": {name: self.files[name].to_json() for name in sorted(self.files)},
            "meta": self.meta,
        }
        return said | {"sha256": digest(said)}

    @staticmethod
    def of(said: Any, folder: Path) -> Manifest:
        """From JSON, checked; the folder is named where something is wrong."""
        path = folder / MANIFEST
        version = said.get("format") if isinstance(said, dict) else None
        if type(version) is int and version > FORMAT:
            raise RunError(f"snapshot {folder} has format {version}, this version reads format {FORMAT}; update carrywave")
        if type(version) is int and 0 < version < FORMAT:
            raise RunError(f"snapshot {folder} has format {version}, this version reads format {FORMAT}; use the version that wrote it")
        if version != FORMAT or not isinstance(said.get("files"), dict) or not isinstance(said.get("meta"), dict):
            raise RunError(f"{path} is not the manifest of a snapshot; {REMEDY}")
        if said.get("sha256") != digest(said):
            raise RunError(f"{path} is damaged: its SHA-256 does not fit; {REMEDY}")
        for name in said["files"]:
            if not is_plain(name):
                raise RunError(f"{path} names the file {name!r}, which is not in its folder; do not use this snapshot")
        try:
            files = {name: File.of(file) for name, file in said["files"].items()}
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{path} is not the manifest of a snapshot ({type(error).__name__} in files); {REMEDY}") from error
        seen: set[tuple[str, str]] = set()
        for file in files.values():
            for name in file.tensors:
                if (file.group, name) in seen:
                    raise RunError(f"{path} names {name} of {file.group} twice; {REMEDY}")
                seen.add((file.group, name))
        return Manifest(files, said["meta"])

    def forms(self, group: str) -> dict[str, Form]:
        """What a group holds, over all its files."""
        return {name: form for file in self.files.values() if file.group == group for name, form in file.tensors.items()}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a snapshot; its files are all there, with their sizes."""
    path = folder / MANIFEST
    if path.is_symlink():
        raise RunError(f"{path} is a symbolic link, and a snapshot's files stand in its own folder; do not use this snapshot")
    try:
        text = path.read_bytes()
        said = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: it is not JSON; {REMEDY}") from error
    manifest = Manifest.of(said, folder)
    if text != encode(said):  # 1e-5 and 1E-5 are one bit apart, and mean the same
        raise RunError(f"{path} is damaged: it is not as it was written; {REMEDY}")
    for name, file in manifest.files.items():
        file.check(folder / name)
    return manifest


def encode(said: Mapping[str, Any]) -> bytes:
    """A manifest as it stands in its file."""
    return json.dumps(said, indent=1).encode()


def digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of what a manifest says, so that a flipped bit in it shows too."""
    said = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def is_plain(name: object) -> bool:
    """Whether a name is that of something in a folder, and leads nowhere else."""
    return isinstance(name, str) and name not in ("", ".", "..") and not any(c in name for c in "/\\\0")


def _form(dtype: Any, shape: Any) -> Form:
    if not isinstance(shape, list) or len(shape) > 16 or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise ValueError("a shape is a list of whole numbers")
    return atomic_files.BY_NAME[dtype], tuple(shape)


def _num_bytes(form: Form) -> int:
    dtype, shape = form
    return math.prod(shape) * dtype.itemsize


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what the system refuses into one line."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}; {REMEDY}") from error
