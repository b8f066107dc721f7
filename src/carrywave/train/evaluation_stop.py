"""Leaving an evaluation where a stop was asked for: it may take longer than whoever asked will wait. All workers leave at one batch."""

from __future__ import annotations

import json

from carrywave.launch.signals import Reason, Stop
from carrywave.parallel.world import World, all_gather_text

ASK_EVERY = 32  # batches between two questions to all workers, each a message


class Stopped(Exception):
    """A stop was asked for during an evaluation, which is not waited for: it is made when the run goes on."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


def leave_if_asked(stop: Stop | None, world: World, done: int) -> None:
    """To be called by all workers after each batch but the last; with None, nothing is looked at."""
    if stop is None or (world.size > 1 and done % ASK_EVERY):
        return
    if world.size == 1:
        reason = stop.asked
    else:
        said = [json.loads(text) for text in all_gather_text(world, json.dumps(stop.votes))]
        reason = stop.decided([sum(votes) for votes in zip(*said, strict=True)])
    if reason is not None:
        raise Stopped(reason)
