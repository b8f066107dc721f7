"""Memory that the workers of one host share between their GPUs, and signals in it: torch's symmetric memory, behind one class.

Every worker of a group allocates a buffer of the same size and can write to those of the others, over NVLink or PCIe, or within one GPU. A
signal is a flag between two workers: raising it waits until it is down, awaiting it takes it down. Copies, raises and waits are ordinary
work of the current CUDA stream, in its order: the host does not take part, and they can be captured in a CUDA graph.

A group's memory is as large as its work needs it: work that needs more gets a larger one (`GrowingMemory`); smaller ones are kept, because
captured work uses them. torch's interface for this is young, so nothing else in the package touches it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Store, _register_process_group
from torch.distributed.distributed_c10d import GroupName

from carrywave.errors import WorkerError
from carrywave.parallel import process_groups
from carrywave.parallel.liveness import lost_contact
from carrywave.parallel.startup.environment import TRANSPORT
from carrywave.parallel.startup.rendezvous import reason

_ALIGNED = 256  # bytes
_PAD_BYTES = 2048  # torch's default, of which every signal takes 4 bytes for each worker of the group


class SharedMemory(Protocol):
    """One buffer on each worker of a group; `rank` is this worker's number in the group."""

    rank: int
    workers: int
    size: int  # of each buffer, in bytes

    def of(self, rank: int) -> Tensor:
        """A worker's buffer, as bytes."""

    def signal(self, rank: int, number: int) -> None:
        """Raise a signal for a worker, after all earlier work of the stream."""

    def wait(self, rank: int, number: int) -> None:
        """Let the stream wait for a worker's signal, and take it down."""

    def barrier(self, number: int) -> None:
        """Let the stream wait until those of all workers have reached this barrier."""


class SymmetricMemory:
    """Buffers on GPUs. Creating one is collective: every worker of the group must do so, in the same order."""

    def __init__(self, group: ProcessGroup, size: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.size = size
        self._local = symmetric.empty(size, dtype=torch.uint8, device=device)
        # torch clears the signals in the order of the stream: that must have happened before another worker can raise one.
        torch.cuda.synchronize(device)
        self._handle: Any = symmetric.rendezvous(self._local, _meeting(group))
        self.rank: int = self._handle.rank
        self.workers: int = self._handle.world_size
        self._timeout_ms = int(process_groups.seconds() * 1000)
        self._buffers = [self._local if rank == self.rank else self._other(rank) for rank in range(self.workers)]

    def of(self, rank: int) -> Tensor:
        return self._buffers[rank]

    def signal(self, rank: int, number: int) -> None:
        self._handle.put_signal(rank, number, timeout_ms=self._timeout_ms)

    def wait(self, rank: int, number: int) -> None:
        self._handle.wait_signal(rank, number, timeout_ms=self._timeout_ms)

    def barrier(self, number: int) -> None:
        self._handle.barrier(number, timeout_ms=self._timeout_ms)

    def _other(self, rank: int) -> Tensor:
        buffer: Tensor = self._handle.get_buffer(rank, (self.size,), torch.uint8)
        return buffer


class _Exchange(Store):
    """The store in which the workers of one group meet for one buffer.

    torch names the keys of a rendezvous by a count over the whole process, whatever the group, so that two workers of a group that have met
    others before would wait for different keys. Here they are counted from the first.
    """

    def __init__(self, store: Store, name: str) -> None:
        super().__init__()
        self.store, self.name = store, name
        self.first: int | None = None

    def set(self, key: str, value: Any) -> None:
        self.store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        value: bytes = self.store.get(self._key(key))
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self.store.add(self._key(key), amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self.store.check([self._key(key) for key in keys]))

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.store.wait([self._key(key) for key in keys], *timeout)

    def _key(self, key: str) -> str:
        match = _COUNT.search(key)
        if match is None:
            return f"{self.name}/{key}"
        if self.first is None:
            self.first = int(match[1])
        return f"{self.name}/{key[: match.start(1)]}{int(match[1]) - self.first}{key[match.end(1) :]}"


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COUNT = re.compile(r"/(\d+)(?=/|$)")
_made: Counter[tuple[int, GroupName]] = Counter()  # buffers of each group, by store and name
_kept: list[tuple[_Exchange, ProcessGroup]] = []  # kept, because torch keeps only its side of a store


def _meeting(group: ProcessGroup) -> GroupName:
    """The name of a group of the same workers for one rendezvous: with such a store, and with a name that is used once. Groups of a later
    world have the names of earlier ones, and torch remembers by name.
    """
    ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
    world = dist.distributed_c10d._get_default_store()
    key = id(world), group.group_name  # `_kept` holds the store alive, so that its id stays its own
    _made[key] += 1
    store = _Exchange(world, f"carrywave/memory/{group.group_name}/{ranks}/{_made[key]}")
    name = GroupName(f"carrywave-memory-{len(_kept)}")
    meeting = ProcessGroup(store, group.rank(), group.size())
    _register_process_group(name, meeting)
    _kept.append((store, meeting))
    return name


def write(to: Tensor, source: Tensor) -> None:
    """Copy a tensor's bits to another of the same shape, on the multiprocessors.

    Not with `copy_`, which may leave it to the GPU's copy engines: they are shared by all processes on a GPU, and a copy of one worker that
    waits for a signal should never keep another from the copies that lead to it.
    """
    words = _WORDS[source.element_size()]
    torch.bitwise_or(source.contiguous().view(words), 0, out=to.view(words))


def symmetric_memory(group: ProcessGroup, size: int, device: torch.device) -> SharedMemory:
    """Shared memory of a group of workers. Collective: every worker of the group must call it."""
    try:
        return SymmetricMemory(group, size, device)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or lost_contact.lost(error):
            raise
        remedy = f"set {TRANSPORT}=nccl, or gloo where workers share a GPU"
        raise WorkerError(f"the workers' GPUs could not share memory ({reason(error)}); {remedy}") from error


def signals_of(workers: int) -> int:
    """How many signals there are between any two workers of a group of this size."""
    return _PAD_BYTES // 4 // workers


class GrowingMemory:
    """`make` creates memory of a given size, at least `least` bytes. Every worker must ask for the same sizes in the same order."""

    def __init__(self, make: Callable[[int], SharedMemory], least: int) -> None:
        self.make, self.least = make, least
        self.memories: list[SharedMemory] = []

    def of(self, size: int) -> SharedMemory:
        """The first that is large enough, the same one on every worker. Sizes are powers of two, so that there are few."""
        for memory in self.memories:
            if memory.size >= size:
                return memory
        self.memories.append(self.make(1 << (max(size, self.least) - 1).bit_length()))
        return self.memories[-1]


def padded(size: int) -> int:
    """A size in bytes after which numbers of any kind may follow."""
    return -(-size // _ALIGNED) * _ALIGNED
