"""The `World` is the set of processes that train together: this one's identity, and how they find each other, agree, and fail together.

The launcher's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) say who we are and are never changed. Only text is
exchanged here: nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from carrywave import errors
from carrywave.errors import UserError, WorkerError, denied, short
from carrywave.parallel import process_groups
from carrywave.parallel.devices import check_gpus, made_current, pick_device, settled
from carrywave.parallel.liveness import lost_contact
from carrywave.parallel.rows import Exchange, gather_rows
from carrywave.parallel.startup import nccl
from carrywave.parallel.startup.addresses import choose_interface
from carrywave.parallel.startup.environment import seconds_of
from carrywave.parallel.startup.launcher_env import WORKER, launched, parent_process, worker_file
from carrywave.parallel.startup.process_identity import identity
from carrywave.parallel.startup.rendezvous import check_hosts, everyone, find_store, number, on_every_rank, reason, start_seconds

# A worker that dies is noticed at once by its closed connections; this timeout is for one that stays silent. If one worker may take long
# while the others wait, they wait in the store (`raise_on_all(no_timeout=True)`).
TIMEOUT_SECONDS = 300.0
NO_TIMEOUT_SECONDS = 24 * 3600.0

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all that train together; a single process is a world of one."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str  # how tensors on `device` are sent: gloo (through host memory), nccl, or "" for one process
    hosts: tuple[str, ...] = ()  # the host of each rank, by a name that no other host has; empty if all are on one
    local_ranks: tuple[int, ...] = ()  # of each rank; empty if they are the ranks
    users: bool = False  # True if the user created the default process group, and may destroy it at any time
    group: dist.ProcessGroup | None = None  # None: the default group; otherwise these are some of its processes, and `rank` counts them

    @property
    def records_nccl(self) -> bool:
        """True if what goes over NCCL can be captured. NCCL does not destroy a communicator while a CUDA graph holds its work: a user who
        destroys a process group of their own would wait for ever.
        """
        return self.backend == "nccl" and not self.users

    @staticmethod
    def alone(device: torch.device) -> World:
        """A world of one process."""
        return World(0, 1, 0, 1, settled(device), "")


class _Joined:
    """What `join` created, for `leave` to undo; the store outlives the process group, so that an error is reported only once."""

    store: Store | None = None
    waits: Store | None = None  # where workers wait for each other, in a group that `join` created
    waited = 0
    arrivals: Counter[str] = Counter()  # noqa: RUF012 (how often this worker has arrived, by meeting)
    times = 0  # each join has its own keys: addresses from an earlier one are stale
    made_group = False
    watches_parent = False


def join(device: str = "auto") -> World:
    """Join the world that the launcher's variables describe, with every worker in it; a world of one if there are none."""
    if not launched():
        if dist.is_initialized():  # by the user, without a launcher
            return _of_group(device, dist.get_rank(), dist.get_world_size())
        return World.alone(pick_device(device))
    rank, size, local_rank = number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK")
    local_size = number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else None
    if size < 1 or rank >= size:
        raise WorkerError(
            f"RANK={rank} is out of range for WORLD_SIZE={size}; ranks run from 0 to WORLD_SIZE - 1: correct the launcher's variables"
        )
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise WorkerError(
                f"the process group has rank {dist.get_rank()} of {dist.get_world_size()}, but RANK={rank} and WORLD_SIZE={size}; "
                "destroy the group first, or let carrywave create it"
            )
        return _of_group(device, local_rank, local_size or size)
    _end_with_parent()
    where = made_current(pick_device(device, worker_file().device(local_rank)))
    if size == 1:
        return World(0, 1, local_rank, 1, where, "")
    start, timeout = start_seconds(), seconds_of("CARRYWAVE_TIMEOUT_SECONDS", TIMEOUT_SECONDS)
    interface = "" if worker_file().one_host else choose_interface(os.environ.get("MASTER_ADDR", ""))
    _Joined.store = _Joined.store or find_store(rank, start)
    _Joined.times += 1
    store = PrefixStore(f"{_room()}/{_Joined.times}", _Joined.store)
    workers_seen = everyone(store, rank, size, {**_self(where, local_rank), "interface": interface}, start)
    check_hosts(workers_seen)
    gpus = [one["gpu"] for one in workers_seen]
    check_gpus(workers_seen)
    hosts = host_names(workers_seen)
    backend = nccl.backend_for(gpus)
    if backend == "nccl":
        nccl.prepare(rank, gpus, one_host=len(set(hosts)) == 1)
    lost_contact.remember(workers_seen)
    process_groups.limit(timeout)
    backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
    try:
        dist.init_process_group(backends, store=PrefixStore("group", store), rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError, OSError) as error:
        if lost_contact.lost(error):
            raise lost_contact.of(error) from None
        raise WorkerError(
            f"rank {rank} cannot connect to the others ({reason(error)}); check that they can reach each other, and which "
            "interface they use (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
        ) from error
    _Joined.made_group = True
    _Joined.waits = PrefixStore("waits", store)
    local_ranks = tuple(int(one["local"]) for one in workers_seen)
    return World(rank, size, local_rank, local_size or hosts.count(hosts[rank]), where, backend, hosts, local_ranks)


def _self(device: torch.device, local_rank: int) -> dict[str, Any]:
    """What this worker reports to the others about itself."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return {**identity(os.getpid()), "gpu": gpu, "local": local_rank}


def host_names(workers_seen: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The host of each worker: its name, with a number if several hosts have the same name."""
    names_by_host: dict[tuple[str, str, str], str] = {}
    for one in workers_seen:
        key = (one["host"], one["boot"], one["net"])
        alike = sum(name == one["host"] for name, _, _ in names_by_host) + 1
        names_by_host.setdefault(key, one["host"] if alike == 1 else f"{one['host']} ({alike})")
    return tuple(names_by_host[one["host"], one["boot"], one["net"]] for one in workers_seen)


def leave(world: World) -> None:
    """Undo what `join` created. A group that the user created is kept, and a second call does nothing."""
    if world.size > 1 and _Joined.made_group and dist.is_initialized():
        process_groups.leave()
        dist.destroy_process_group()
        _Joined.made_group = False
        _Joined.waits = None


@lost_contact.kept
def all_gather_text(world: World, text: str) -> list[str]:
    """The texts of all ranks, in rank order. Collective."""
    if world.size == 1:
        return [text]
    mine = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)
    sizes = [length for (length,) in gather_rows(Exchange.TEXT, [len(text.encode())], world.size, world.group)]
    padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    padded[: mine.numel()] = mine[: padded.numel()]
    texts = [torch.zeros_like(padded) for _ in range(world.size)]
    dist.all_gather(texts, padded, group=world.group)
    return [bytes(one[:size].tolist()).decode() for one, size in zip(texts, sizes, strict=True)]


def all_gather_json(world: World, value: Any) -> list[Any]:
    """The values of all ranks, in rank order, as JSON holds them. Collective."""
    return [json.loads(text) for text in all_gather_text(world, json.dumps(value))]


def from_rank_0(world: World, make: Callable[[], T], *, no_timeout: bool = False) -> T:
    """What rank 0 makes, as JSON holds it, on every worker; a user error there is raised on all. Collective."""
    made: T | None = None
    with raise_on_all(world, same_message=True, no_timeout=no_timeout):
        if world.rank == 0:
            made = make()
    result: T = all_gather_json(world, made)[0]
    return result


@contextmanager
def raise_on_all(world: World, *, same_message: bool = False, no_timeout: bool = False) -> Iterator[None]:
    """Raise on every worker a user error that any worker hits in this block, so that none waits for one that has given up.

    `same_message`: one worker acts for all, so the message need not say which one failed. `no_timeout`: some workers may take very long,
    longer than the message timeout.
    """
    if world.size == 1:
        yield
        return
    failure: UserError | None = None
    try:
        yield
    except UserError as error:
        failure = error
    except PermissionError as error:  # of a folder, which one worker may look into first
        failure = denied(error)
    if no_timeout:
        wait_for_all(world)
    reports = all_gather_json(world, None if failure is None else [type(failure).__name__, str(failure)])
    failures = [(rank, each) for rank, each in enumerate(reports) if each is not None]
    if not failures:
        return
    rank, (kind, message) = failures[0]
    alike = len(failures) == world.size and all(each == [kind, message] for _, each in failures)
    error_type = getattr(errors, kind, UserError)
    raise on_every_rank(error_type(message if alike or same_message else f"rank {rank}: {message}")) from failure


def wait_for_all(world: World) -> None:
    """Return when every worker has arrived, which may take longer than a message. Collective."""
    store = _Joined.waits
    if store is None or world.size == 1 or world.group is not None:
        return  # the user created the group and chose its timeout, or these are only some of the workers
    key, _Joined.waited = str(_Joined.waited), _Joined.waited + 1
    _arrive(store, key, world.size, NO_TIMEOUT_SECONDS)


def all_arrive(world: World, what: str, seconds: float) -> bool:
    """Wait until every worker has called this for the same thing; False if some have not within this time."""
    ranks = range(world.size) if world.group is None else dist.get_process_group_ranks(world.group)
    meeting = f"carrywave/arrive/{'-'.join(map(str, ranks))}/{what}"
    _Joined.arrivals[meeting] += 1
    return _arrive(dist.distributed_c10d._get_default_store(), f"{meeting}/{_Joined.arrivals[meeting]}", world.size, seconds)


def _arrive(store: Store, key: str, size: int, seconds: float) -> bool:
    """Wait until this many workers have arrived at a key that is used once; False if some have not within this time.

    They poll the store: a collective that others never enter would time out, or keep this process from ending until it does.
    """
    deadline = time.monotonic() + seconds
    pause_seconds = 0.001
    try:
        if store.add(key, 1) == size:
            store.set(f"all/{key}", "")
        while not (came := store.check([f"all/{key}"])) and time.monotonic() < deadline:
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, 0.1)
    except dist.DistNetworkError:
        return True  # the launcher that kept the store is gone, for all alike: the next message shows who is still there
    return bool(came)


def _room() -> str:
    """Where the workers keep what they tell each other in this attempt."""
    return f"carrywave/{_attempt()}"


def _attempt() -> str:
    """The key under which restarted workers rendezvous, so that they do not read what the dead ones left behind."""
    if worker_file().agent:
        return "0"  # every attempt has a store of its own, and a host that was started anew counts from 0
    if WORKER in os.environ:
        return str(worker_file().attempt)  # the store is kept
    # A store that torchrun reopens on each restart holds nothing old, and the agents of several hosts need not agree on the restart count.
    # With --master-addr, or without any rendezvous backend, it is not reopened, whatever the variable says.
    reopened = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    fresh = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1" and reopened
    return "0" if fresh else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def check_agreement(
    world: World, what: Mapping[str, str], remedy: str = "start every worker with the same command, files and versions"
) -> None:
    """Refuse workers that were started with a different spec, data, version or model than rank 0."""
    if world.size == 1:
        return
    reports = all_gather_json(world, dict(what))
    for rank, theirs in enumerate(reports):
        for name in dict.fromkeys([*reports[0], *theirs]):
            if theirs.get(name) != reports[0].get(name):
                raise on_every_rank(
                    WorkerError(f"rank {rank} has {name} {short(theirs.get(name))}, but rank 0 has {short(reports[0].get(name))}; {remedy}")
                )


def report_once(error: UserError, rank: int, tell: Callable[[], None]) -> None:
    """Report an error that every worker raises from one of them; the rest wait, because launchers kill everyone after the first exit."""
    if rank == error.reported_by:
        tell()
    if _Joined.store is None:
        return
    try:
        if rank == error.reported_by:
            _Joined.store.set(f"{_room()}/told", "yes")
        else:
            _Joined.store.wait([f"{_room()}/told"], timedelta(seconds=5))
    except RuntimeError:
        return  # the reporting worker is gone, and the store with it


def first_to_report() -> bool:
    """True if this worker is the one to report when several lose contact at once; also True if the store is unreachable."""
    try:
        return _Joined.store is None or _Joined.store.add(f"{_room()}/lost", 1) == 1
    except RuntimeError:
        return True  # the store is gone too


def shared_store() -> Store | None:
    """A separate connection to the rendezvous store, for a thread; None in a world of one, or if the user created the process group."""
    if _Joined.store is None or not _Joined.made_group:
        return None
    return PrefixStore(f"{_room()}/{_Joined.times}", _Joined.store.clone())  # type: ignore[attr-defined]


def _of_group(device: str, local_rank: int, local_size: int) -> World:
    """The world of an existing process group, created by an earlier `join` or by the user."""
    config = dist.get_backend_config()
    if "cpu:" not in config:
        raise WorkerError(
            f"the process group was created with {dist.get_backend()} alone, which cannot send from the CPU; "
            'create it with init_process_group("cpu:gloo,cuda:nccl")'
        )
    rank, size = dist.get_rank(), dist.get_world_size()
    where = made_current(pick_device(device, local_rank))
    world = World(rank, size, local_rank, local_size, where, "", users=not _Joined.made_group)
    if size == 1:
        return world
    workers_seen = all_gather_json(world, _self(where, local_rank))
    lost_contact.remember(workers_seen)
    gpus = [bool(one["gpu"]) for one in workers_seen]
    if any(gpus) and not all(gpus) and "cuda:nccl" in config:
        raise on_every_rank(
            WorkerError(
                "some workers compute on a GPU and some do not, but the process group uses NCCL, which needs a GPU on every worker; "
                'create it with init_process_group("gloo")'
            )
        )
    backend = "nccl" if where.type == "cuda" and "cuda:nccl" in config else "gloo"
    return replace(world, backend=backend, hosts=host_names(workers_seen), local_ranks=tuple(int(one["local"]) for one in workers_seen))


def _end_with_parent() -> None:
    """Make a worker of our launcher or torchrun's shut down cleanly when the process that started it is gone: nobody else would stop it."""
    parent = parent_process()
    if parent is None or _Joined.watches_parent:
        return
    _Joined.watches_parent = True

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="carrywave-parent", daemon=True).start()
