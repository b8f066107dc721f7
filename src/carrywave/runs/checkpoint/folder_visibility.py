"""Finds out which workers see the folder in which rank 0 keeps the run, so that the others send their parts over the network.

Rank 0 leaves a file with a random name there, and every other worker looks for it under the same path. A path that exists on two hosts is
not enough: each may have a folder of that name.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carrywave.parallel.byte_channel import Star
from carrywave.parallel.startup.process_identity import identity
from carrywave.parallel.world import World, all_gather_json, from_rank_0
from carrywave.runs.checkpoint import atomic_files

MARK = ".carrywave-meeting-"
POLL_SECONDS = 0.02
SEEN_SECONDS = 3.0  # within which a file written by another host must be visible here


@dataclass(frozen=True)
class FolderVisibility:
    """Which workers see the run's folder, the same on every worker."""

    host: str = ""  # that keeps the run
    apart: tuple[int, ...] = ()  # the ranks that do not see its folder
    hosts: tuple[str, ...] = ()  # theirs, each once
    star: Star | None = None  # the channels between rank 0 and these ranks

    def sees(self, rank: int) -> bool:
        """True if a worker reads and writes files of the run itself."""
        return rank not in self.apart

    def share(self, world: World) -> tuple[int, int]:
        """The index of this worker among those that see the folder, and their number."""
        return world.rank - sum(rank < world.rank for rank in self.apart), world.size - len(self.apart)

    def line(self, folder: Path | str, workers: int) -> str:
        """Where the run is kept, and how the parts of snapshots get there; empty for a single worker."""
        if workers == 1:
            return ""
        if not self.apart:
            return f"{folder}: all {workers} workers see it, and each writes its part of a snapshot"
        others = f"{self.hosts[0]} does" if len(self.hosts) == 1 else f"{', '.join(self.hosts)} do"
        return (
            f"{folder} on {self.host}; {others} not share it, so the parts of {len(self.apart)} of {workers} workers go there over the "
            "network; logs of other hosts stay with them"
        )


def look(world: World, folder: Path) -> FolderVisibility:
    """Find out who sees a folder of rank 0, which need not exist yet. Collective: every rank must call it."""
    if world.size == 1:
        return FolderVisibility()
    mark: Path | None = None

    def leave_mark() -> list[Any]:
        nonlocal mark
        # What is created later will be in the nearest folder that exists, and so on the same file system.
        mark = next(place for place in (folder, *folder.parents) if place.is_dir()) / f"{MARK}{secrets.token_hex(8)}"
        with atomic_files.writing(str(folder)):
            mark.touch()
        return [str(mark), os.uname().nodename, identity(os.getpid())["boot"]]

    try:
        path, host, boot = from_rank_0(world, leave_mark)
        # The same kernel shows a new file at once; another host's may take a moment to.
        seen = visible(Path(path), 0.0 if boot and boot == identity(os.getpid())["boot"] else SEEN_SECONDS)
        answers = all_gather_json(world, [seen, os.uname().nodename])
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)
    return agreed(host, answers)


def agreed(host: str, answers: Sequence[tuple[bool, str]]) -> FolderVisibility:
    """The conclusion from what every worker saw, with its host name. Collective if any of them is apart."""
    apart = tuple(rank for rank, (seen, _) in enumerate(answers) if not seen)
    return FolderVisibility(host, apart, tuple(dict.fromkeys(answers[rank][1] for rank in apart)), Star(apart) if apart else None)


def visible(path: Path, seconds: float = SEEN_SECONDS) -> bool:
    """True if a path exists. A network file system may take a while to show what another host has created."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
