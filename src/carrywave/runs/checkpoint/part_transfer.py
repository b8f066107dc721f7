"""Moves the files of snapshots between rank 0 and workers that do not see the run's folder: their parts to it, and all files from it.

A part is streamed from the copies that are to be written, piece by piece, and rank 0 writes each piece to disk as it arrives: neither side
holds a file in memory. Every file is hashed on both sides.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from carrywave.errors import RunError, from_system, remedy_for
from carrywave.parallel.byte_channel import PIECE_BYTES, Channel
from carrywave.parallel.liveness import heartbeat, lost_contact
from carrywave.parallel.startup.process_identity import boot_id
from carrywave.parallel.world import World, all_gather_text, raise_on_all
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.checkpoint.folder_visibility import FolderVisibility
from carrywave.runs.checkpoint.manifest import File, is_plain
from carrywave.runs.checkpoint.snapshot import Stored, Tensors, part_files

DRAFT = ".draft-snapshot-"  # in the cache, which removes drafts that were left behind


def send_part(channel: Channel, groups: Mapping[str, Tensors]) -> None:
    """Send one worker's part of a snapshot; nothing is sent if its parameters are not finite."""
    for name, file, tensors in part_files(groups):
        channel.send_json({"name": name, **file.to_json()})
        _, checksum = atomic_files.write_tensors(channel, tensors)
        channel.flush()
        channel.send_json(checksum)
    channel.send_json(None)


def receive_part(channel: Channel, draft: Path) -> tuple[dict[str, File], Any]:
    """Write the part that a worker sends into the draft of a snapshot, synced to disk; also returns why the worker failed, if it did."""
    files: dict[str, File] = {}
    failure: Exception | None = None  # everything is received all the same: the sender is not to wait for a full disk
    while (message := channel.receive_json()) is not None:
        if "failure" in message:
            return {}, message["failure"]
        name, file = message["name"], File.of(message)
        if not is_plain(name):
            raise RunError(f"a worker sent the file {name!r}, which is outside the snapshot's folder; start every worker with one version")
        sha256 = ""
        try:
            sha256 = _receive(channel, draft / name, file.num_bytes)
        except OSError as error:
            failure = failure or error
        if channel.receive_json() != sha256 and failure is None:
            failure = RunError(f"{name} of a snapshot was damaged on its way over the network; the previous snapshot is kept")
        files[name] = replace(file, sha256=sha256)
    if failure is not None:
        raise failure
    return files, None


def send_file(channel: Channel, path: Path, num_bytes: int) -> None:
    """Send this many bytes of a file."""
    left = num_bytes
    try:
        with path.open("rb", buffering=0) as file:
            while left and (block := file.read(min(left, PIECE_BYTES))):
                channel.write(block)
                left -= len(block)
    finally:
        # The receiver waits for all of them. Zeros do not pass for the file: its checksum is verified there.
        while left:
            left -= channel.write(bytes(min(left, PIECE_BYTES)))
        channel.flush()


@contextmanager
def handed_out(world: World, visibility: FolderVisibility, stored: Stored, cache: Path) -> Iterator[Stored]:
    """Inside this context, a snapshot of rank 0 that this worker can read. Collective: every rank must enter and leave it.

    Each host that does not see the run's folder gets one copy, in its cache folder, and removes it in the end.
    """
    if not visibility.apart:
        yield stored
        return
    heartbeat.rest()  # no step is taken meanwhile, and that is no hang
    place: tempfile.TemporaryDirectory[str] | None = None
    leaders = _leaders(world, visibility, cache)
    try:
        with raise_on_all(world, no_timeout=True):
            if world.rank == 0:
                _serve(visibility, stored, sorted(set(leaders.values())))
            elif leaders.get(world.rank) == world.rank:
                with atomic_files.writing(str(cache)):
                    cache.mkdir(parents=True, exist_ok=True)
                    place = tempfile.TemporaryDirectory(prefix=DRAFT, dir=cache, ignore_cleanup_errors=True)
                _fetch(visibility, stored, Path(place.name))
        places = all_gather_text(world, "" if place is None else place.name)
        mine = leaders.get(world.rank)
        yield stored if mine is None else Stored(Path(places[mine]), stored.manifest)
        all_gather_text(world, "")  # the others of this host have read it too
    finally:
        if place is not None:
            place.cleanup()


def _leaders(world: World, visibility: FolderVisibility, cache: Path) -> dict[int, int]:
    """For each rank apart, the one that receives for it: the first with the same cache folder of the same host. Collective."""
    where = None if visibility.sees(world.rank) else [*_mounts(), str(cache.absolute())]
    caches = all_gather_text(world, json.dumps(where))
    return {rank: caches.index(caches[rank]) for rank in visibility.apart}


def _mounts() -> list[str]:
    """What two processes have in common if they see the same files under the same paths."""
    try:
        return [boot_id(), os.readlink("/proc/self/ns/mnt")]
    except OSError:
        return [os.uname().nodename, str(os.getpid())]


@lost_contact.kept
def _serve(visibility: FolderVisibility, stored: Stored, leaders: list[int]) -> None:
    """Send all files to these ranks, to all of them at once."""
    assert visibility.star is not None
    failures: list[Exception] = []

    def serve(channel: Channel) -> None:
        for name, file in stored.manifest.files.items():
            try:
                send_file(channel, stored.folder / name, file.num_bytes)
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=serve, args=(visibility.star.channel(rank),), daemon=True) for rank in leaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        if isinstance(failure, OSError):
            raise RunError(f"snapshot {stored.folder} cannot be read: {failure.strerror or failure}; resume from another snapshot")
        raise failure


@lost_contact.kept
def _fetch(visibility: FolderVisibility, stored: Stored, folder: Path) -> None:
    """Receive all files into a folder of this host."""
    assert visibility.star is not None
    channel = visibility.star.channel(0)
    failure: OSError | None = None
    for name, file in stored.manifest.files.items():
        try:
            _receive(channel, folder / name, file.num_bytes)
        except OSError as error:
            failure = failure or error
    if failure is not None:
        raise from_system(failure, RunError)(
            f"the snapshot cannot be received on {os.uname().nodename}: {failure.strerror or failure}; "
            f"{remedy_for(failure, 'make room')} in {folder.parent}, or set $CARRYWAVE_CACHE to another folder"
        ) from failure


def _receive(channel: Channel, path: Path, num_bytes: int) -> str:
    """Receive a file and sync it to disk; returns its SHA-256. After a disk error the rest is received too, and then the error raised."""
    digest = hashlib.sha256()
    pieces = channel.read(num_bytes)
    try:
        with path.open("xb", buffering=0) as file:
            for piece in pieces:
                digest.update(piece)
                while piece:  # a nearly full disk accepts a part, and refuses the rest
                    piece = piece[file.write(piece) :]
            os.fsync(file.fileno())
    finally:
        for _ in pieces:
            pass
    return digest.hexdigest()
