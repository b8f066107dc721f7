"""Reads the data of a run: once on each host, into the cache, where the other workers find it.

Files are compared by checksum before any of them is parsed: paths may differ from host to host; the content may not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from carrywave.data.files import hashes
from carrywave.data.prepare import Prepared, digests_of, from_python, prepare
from carrywave.parallel.world import World, check_agreement, raise_on_all
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


def compare(world: World, spec: Spec) -> None:
    """Refuse files that are not the same on every worker. Collective: every rank must call it."""
    if world.size == 1:
        return
    with raise_on_all(world, no_timeout=True):
        found = {f"{key} with SHA-256": digest for key, (_, digest) in digests_of(spec).items()}
        if spec.model.pretrained is not None and Path(spec.model.pretrained).is_file():
            found["model.pretrained with SHA-256"] = hashes.sha256(Path(spec.model.pretrained))
    check_agreement(world, found, "copy the files of one of them to every host")
