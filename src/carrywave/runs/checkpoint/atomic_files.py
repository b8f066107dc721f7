"""Writes files atomically, so that they are complete or absent, and tensors as safetensors without the library.

The safetensors library writes metadata in a random order and copies every tensor first. This writer streams tensor by tensor, and equal
content gives equal bytes. Every file carries a checksum of itself, which reading checks; those of other programs have none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from carrywave.errors import RunError, from_system, remedy_for

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
SEAL = "carrywave_sha256"  # in the metadata of a file with a checksum of itself
BLOCK_BYTES = 1 << 21


@contextmanager
def writing(what: str, kept: str = "") -> Iterator[None]:
    """Turn disk errors into one line; `kept` says what is still intact."""
    try:
        yield
    except OSError as error:
        reason, remedy = error.strerror or str(error), remedy_for(error, "make the folder writable")
        raise from_system(error, RunError)(f"{what} could not be written: {reason}; {kept}{remedy}, then try again") from error


def sync_path(path: Path) -> None:
    """Flush a file to disk, or a folder so that renames in it survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that gets its name only once it is complete and on disk."""
    # A fixed name, so that leftovers of killed runs are overwritten and do not accumulate.
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    sync_path(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a small file atomically."""
    with replacing(path) as file:
        file.write(data)


class Sink(Protocol):
    """What bytes can be written to: a file, or a connection."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Write all of these bytes."""


def write_tensors(file: Sink, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors as safetensors into an open file or the like, with a checksum of all of it in the metadata.

    At most one tensor at a time is copied in memory. Equal tensors and metadata give equal bytes.
    """
    names, header = _lay_out(tensors)
    header = {"__metadata__": dict(sorted((metadata or {}).items())), **header}
    header["__metadata__"][SEAL] = _seal(header, _data(tensors, names))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for piece in _data(tensors, names):
        file.write(piece)


def _lay_out(tensors: Mapping[str, Tensor]) -> tuple[list[str], dict[str, Any]]:
    """The order of tensors in a file, and the entries of its header."""
    # Widest elements first keeps every tensor aligned, as in the library's own writer.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    return names, header


def _data(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Iterator[memoryview]:
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        # As bytes, because NumPy has no bfloat16.
        yield flat.view(torch.uint8).numpy().data


def _seal(header: Mapping[str, Any], data: Iterable[bytes | memoryview]) -> str:
    """SHA-256 of a file's header and data, without the seal itself."""
    unsealed = {name: {key: value for key, value in entry.items() if key != SEAL} for name, entry in header.items()}
    digest = hashlib.sha256(json.dumps(unsealed, sort_keys=True).encode())
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file; any other file raises a one-line error."""
    with _reading(path):
        return load_file(path)


def read_metadata(path: Path) -> dict[str, str]:
    """The texts in the metadata of a safetensors file."""
    with _reading(path), safe_open(path, "pt") as file:
        return {name: text for name, text in (file.metadata() or {}).items() if name != SEAL}


def read_sealed(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the texts of a file of ours; one without a checksum is refused."""
    with _reading(path, sealed=True), safe_open(path, "pt") as file:
        return load_file(path), dict(file.metadata())


@contextmanager
def _reading(path: Path, *, sealed: bool = False) -> Iterator[None]:
    """Turn what is wrong with a safetensors file into one line: it is another kind of file, damaged, or does not match its seal."""
    if path.exists() and not path.is_file():
        raise RunError(f"{path} is not a regular file; pass the path of a safetensors file")
    try:
        with path.open("rb") as file:
            refuse_pickle(path, file.read(9))
        with safe_open(path, "pt") as whole:
            seal = (whole.metadata() or {}).get(SEAL, "" if sealed else None)
        if seal is not None:
            _check_seal(path, seal)
        yield
    except SafetensorError as error:
        line = " ".join(str(error).split())
        raise RunError(f"{path} is not a valid safetensors file ({line}); copy it again, or use another file") from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}; pass the path of a safetensors file") from error


def refuse_pickle(path: Path, head: bytes) -> None:
    """Refuse files that torch.save wrote, recognized by their first nine bytes."""
    # A zip archive, or in the old format a bare pickle: protocol 2 and above begin with 0x80.
    bare = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and head[8:9] != b"{"
    if bare or head[:4] == b"PK\x03\x04":
        raise RunError(
            f"{path} is a pickle (torch.save), which can run code when it is loaded; "
            "convert it: safetensors.torch.save_file(torch.load(FILE, weights_only=True), NEW_FILE)"
        )


def _check_seal(path: Path, seal: str) -> None:
    """Verify the checksum of a file that has one; those that other programs write have none."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        if seal != _seal(header, iter(lambda: file.read(BLOCK_BYTES), b"")):
            raise RunError(f"{path} is damaged: its SHA-256 does not match; copy it again, or use another file")
