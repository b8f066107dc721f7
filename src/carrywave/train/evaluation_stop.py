"""Leaves an evaluation when a stop is requested, since whoever asked may not wait for it; all workers leave at the same batch."""

from __future__ import annotations

import json

from carrywave.launch.signals import Reason, Stop
from carrywave.parallel.world import World, all_gather_text

ASK_EVERY = 32  # batches between two collective checks, each of which costs a message


class Stopped(Exception):
    """A stop was requested during an evaluation, which is abandoned and repeated when the run is resumed."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


def leave_if_asked(stop: Stop | None, world: World, done: int) -> None:
    """Raise `Stopped` if a stop was requested. Collective: every rank calls it after each batch but the last. None: never leave."""
    if stop is None or (world.size > 1 and done % ASK_EVERY):
        return
    if world.size == 1:
        reason = stop.asked
    else:
        said = [json.loads(text) for text in all_gather_text(world, json.dumps(stop.votes))]
        reason = stop.decided([sum(votes) for votes in zip(*said, strict=True)])
    if reason is not None:
        raise Stopped(reason)
