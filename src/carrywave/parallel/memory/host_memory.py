"""Memory that the worker processes of one host share: an anonymous file of each, mapped by all.

The files have no name, so nothing is left of them when the processes end, however they end. The others open one through /proc, which needs
the same user and the same process ids; a word at its end tells whether it is the right one. Linux only.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_WORD = 8  # bytes of the word at the end


def shared_by(group: dist.ProcessGroup, sizes: Sequence[int]) -> list[Tensor] | None:
    """The buffers of all workers of a group, as bytes, zeroed; `sizes` in bytes, by rank in the group. None, on every worker, if one of
    them cannot share memory with the others. Collective: every rank of the group must call it.
    """
    rank, word = group.rank(), secrets.randbits(62)
    file, local = _made(sizes[rank], word)
    described = torch.tensor([os.getpid(), -1 if file is None else file, word])
    rows = [torch.zeros_like(described) for _ in sizes]
    try:
        dist.all_gather(rows, described, group=group)
        each = enumerate(zip(rows, sizes, strict=True))
        buffers = [local if number == rank else _opened(row.tolist(), size) for number, (row, size) in each]
        missing = torch.tensor([sum(each is None for each in buffers)])
        dist.all_reduce(missing, group=group)  # after it, everyone has opened every file
    finally:
        if file is not None:
            os.close(file)  # what is mapped stays
    return None if int(missing) else [each for each in buffers if each is not None]


def _made(size: int, word: int) -> tuple[int | None, Tensor | None]:
    """A file of this worker, and its bytes."""
    try:
        file = os.memfd_create("carrywave-sums")
    except (AttributeError, OSError):
        return None, None
    try:
        os.ftruncate(file, size + _WORD)
        os.pwrite(file, word.to_bytes(_WORD, "little"), size)
        return file, _bytes(file, size)
    except OSError:  # there is no room for it
        os.close(file)
        return None, None


def _opened(described: Sequence[int], size: int) -> Tensor | None:
    """The bytes of another worker's file; None if it cannot be opened here, or is another one."""
    pid, number, word = described
    try:
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(file).st_size != size + _WORD or os.pread(file, _WORD, size) != word.to_bytes(_WORD, "little"):
            return None
        return _bytes(file, size)
    except OSError:
        return None
    finally:
        os.close(file)


def _bytes(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size + _WORD), dtype=torch.uint8)[:size]
