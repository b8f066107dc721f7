"""Reads the data of a run: once on each host, into the cache, where the other workers find it.

Files are compared by checksum before any of them is parsed: paths may differ from host to host; the content may not.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from carrywave.data.files import hashes
from carrywave.data.prepare import Prepared, digests_of, from_python, prepare
from carrywave.errors import DataError, UserError
from carrywave.parallel.startup.rendezvous import NAMED, on_every_rank
from carrywave.parallel.world import World, all_gather_json, raise_on_all
from carrywave.spec.spec import Spec
from carrywave.train.start.opening import Start


def open_data(start: Start) -> tuple[Prepared, Mapping[str, str]]:
    """The data of a run, and the SHA-256 of each of its files, by part."""
    world, spec, say = start.world, start.spec, start.asked.watch.say
    if spec.data.train is None:
        with raise_on_all(world, no_timeout=True):
            return from_python(start.asked.data, spec, codec=start.codec), {}
    compare(world, spec)
    prepared: Prepared | None = None
    for turn in (world.local_rank == 0, True):
        with raise_on_all(world, same_message=True, no_timeout=True):
            if turn and prepared is None:
                prepared = prepare(spec, codec=start.codec, note=say)
    assert prepared is not None  # in the second turn every remaining worker reads
    digests = digests_of(spec) if world.rank == 0 else {}
    return prepared, {key.removeprefix("data."): digest for key, (_, digest) in digests.items()}


@dataclass(frozen=True)
class FilesSeen:
    """What one worker found under the names in its spec."""

    host: str
    files: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # the name and the SHA-256 of each file, by its key in the spec
    failure: str = ""  # why a file could not be read


def compare(world: World, spec: Spec) -> None:
    """Refuse files that are not the same on every worker. Collective: every rank must call it."""
    if world.size == 1:
        return
    with raise_on_all(world, no_timeout=True):
        seen = _look(spec)
    by_rank = all_gather_json(world, asdict(seen))
    files_seen = [FilesSeen(each["host"], {key: tuple(file) for key, file in each["files"].items()}, each["failure"]) for each in by_rank]
    if (problem := difference(files_seen)) is not None:
        raise on_every_rank(DataError(problem))


def difference(seen: Sequence[FilesSeen]) -> str | None:
    """What is wrong with the files that the workers found, by rank, in one line; None if all have what rank 0 has.

    A file that rank 0 itself cannot read is no difference: reading it gives the error.
    """
    first = seen[0]
    if first.failure:
        return None
    for rank, other in enumerate(seen):
        if other.failure:
            return f"rank {rank} on {other.host}: {other.failure}"
    for key, (name, digest) in first.files.items():
        differ = [rank for rank, other in enumerate(seen) if other.files.get(key, ("", ""))[1] != digest]
        if differ:
            theirs = seen[differ[0]].files.get(key, ("", "nothing"))[1]
            have = "has" if len(differ) == 1 else "have"
            return (
                f"{key}={name} is not the same file everywhere: {_who(differ, seen)} {have} SHA-256 {theirs[:12]}…, "
                f"rank 0 on {first.host} has {digest[:12]}…; copy one of them to every host"
            )
    return None


def _look(spec: Spec) -> FilesSeen:
    host = socket.gethostname()
    try:
        files = digests_of(spec)
        if spec.model.pretrained is not None and Path(spec.model.pretrained).is_file():
            files["model.pretrained"] = spec.model.pretrained, hashes.sha256(Path(spec.model.pretrained))
        return FilesSeen(host, files)
    except UserError as error:
        return FilesSeen(host, failure=str(error))


def _who(ranks: Sequence[int], seen: Sequence[FilesSeen]) -> str:
    """`rank 2 on nodeB`, or `ranks 2, 3 on nodeB`."""
    shown = ", ".join(map(str, ranks[:NAMED])) + (", …" if len(ranks) > NAMED else "")
    hosts = ", ".join(dict.fromkeys(seen[rank].host for rank in ranks))
    return f"rank{'s' * (len(ranks) > 1)} {shown} on {hosts}"
