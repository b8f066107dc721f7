"""Files that are either whole or not there, and tensors in them: atomic writes, and safetensors written by hand.

The safetensors library writes metadata in a random order and copies every tensor first. Ours writes tensor after tensor,
and equal content gives equal bytes. Reading is the library's, behind checks that name what is wrong with a file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from carrywave.errors import RunError

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
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
SEAL = "carrywave_sha256"  # in the metadata of a file that holds a checksum of itself
BLOCK_BYTES = 1 << 21
MOST_HEADER_BYTES = 100_000_000  # of a safetensors file, as its library has it

Form = tuple[torch.dtype, tuple[int, ...]]  # of a tensor: what is known of it before any of its bytes is read


@contextmanager
def writing(what: str, kept: str = "") -> Iterator[None]:
    """Turns a failure of the disk into one line; `kept` says what is still there."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"{what} could not be written: {reason}; {kept}free some room or make the folder writable, then go on") from error


def sync_path(path: Path) -> None:
    """Bring a file to the disk, or make renames within a folder last through a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes its name only when it is whole and on the disk."""
    # A fixed name, so that what a killed run left is overwritten and not collected.
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


def write_tensors(
    file: IO[bytes], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, sealed: bool = False
) -> tuple[int, str]:
    """Write tensors as safetensors into an open file; returns its bytes and their SHA-256.

    One copy in memory at most, of one tensor at a time. Equal tensors and metadata give equal bytes. A sealed file carries a
    checksum of itself in its metadata, and is refused when it is read and does not fit.
    """
    names, header = lay_out({name: form_of(tensor) for name, tensor in tensors.items()})
    if metadata or sealed:
        header = {"__metadata__": dict(sorted((metadata or {}).items())), **header}
    if sealed:
        header["__metadata__"][SEAL] = _seal(header, _data(tensors, names))
    text = header_text(header)
    digest = hashlib.sha256()
    total = 0
    start_of_file: tuple[bytes | memoryview, ...] = (text,)
    for piece in chain(start_of_file, _data(tensors, names)):
        for start in range(0, len(piece), BLOCK_BYTES):
            # Written and hashed while it is in the processor's cache, and without Python's lock: training goes on beside it.
            block = piece[start : start + BLOCK_BYTES]
            file.write(block)
            digest.update(block)
        total += len(piece)
    return total, digest.hexdigest()


def form_of(tensor: Tensor) -> Form:
    """Dtype and shape of a tensor."""
    return tensor.dtype, tuple(tensor.shape)


def lay_out(forms: Mapping[str, Form]) -> tuple[list[str], dict[str, Any]]:
    """The order in which tensors stand in a file, and the entries of its header."""
    # Wide elements first keeps every tensor aligned, as the library's own writer does.
    names = sorted(forms, key=lambda name: (-forms[name][0].itemsize, name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        dtype, shape = forms[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    return names, header


def header_text(header: Mapping[str, Any]) -> bytes:
    """The first bytes of a file: the header's length, and the header."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _data(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Iterator[memoryview]:
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        # Bytes as they are: NumPy has no bfloat16.
        yield flat.view(torch.uint8).numpy().data


def _seal(header: Mapping[str, Any], data: Iterable[bytes | memoryview]) -> str:
    """SHA-256 of all that a file says and holds, less the seal itself."""
    said = {name: {key: value for key, value in entry.items() if key != SEAL} for name, entry in header.items()}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; one line for a file that is anything else."""
    check_form(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"{path} is not a sound safetensors file ({_line(error)}); copy it again, or use another one") from error


def read_metadata(path: Path) -> dict[str, str]:
    """The texts that a safetensors file carries beside its tensors."""
    check_form(path)
    try:
        with safe_open(path, "pt") as file:
            return {name: text for name, text in (file.metadata() or {}).items() if name != SEAL}
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is not a sound safetensors file ({_line(error)}); copy it again, or use another one") from error


def check_form(path: Path) -> None:
    """Whether a file can be safetensors at all: there, no pickle, as long as its header says, and whole where it is sealed."""
    if path.exists() and not path.is_file():
        raise RunError(f"{path} is not a plain file; give the path of a safetensors file")
    try:
        with path.open("rb") as file:
            head = file.read(8)
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(head, "little")
            text = file.read(length) if 8 + length <= size and length <= MOST_HEADER_BYTES else b""
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}; give the path of a safetensors file") from error
    refuse_pickle(path, head + text[:1])
    if len(head) < 8 or (not text and length <= MOST_HEADER_BYTES):
        raise RunError(f"{path} is truncated: {size} bytes are less than its header; copy it again, or use another one")
    try:
        header = json.loads(text)
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise RunError(f"{path} is not a safetensors file: it has no readable header; give the path of a safetensors file") from error
    if isinstance(end, int) and size < 8 + length + end:
        raise RunError(f"{path} is truncated: {size} of {8 + length + end} bytes are there; copy it again, or use another one")
    _check_seal(path, header, 8 + length)


def refuse_pickle(path: Path, head: bytes) -> None:
    """Refuse what torch.save writes, by the first nine bytes of a file."""
    # A zip archive, or in its old form a bare pickle: protocol 2 and above begin with 0x80.
    bare = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and head[8:9] != b"{"
    if head[:4] == b"PK\x03\x04" or bare:
        raise RunError(f"{path} is a pickle (torch.save), which can run code when it is read; convert it to safetensors first")


def _check_seal(path: Path, header: Mapping[str, Any], start: int) -> None:
    """Nothing for a file without a seal, such as another program writes."""
    metadata = header.get("__metadata__")
    seal = metadata.get(SEAL) if isinstance(metadata, dict) else None
    if seal is None:
        return
    with path.open("rb") as file:
        file.seek(start)
        if seal != _seal(header, iter(lambda: file.read(BLOCK_BYTES), b"")):
            raise RunError(f"{path} is damaged: its SHA-256 does not fit; copy it again, or use another one")


def remove(folder: Path) -> None:
    """Remove a folder as far as that can be done; what is left of it is never read."""
    shutil.rmtree(folder, ignore_errors=True)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
