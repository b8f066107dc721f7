"""Three stages over gloo, with links as NCCL gets them, play a scene: `_scene.py FOLDER NAME`. What each has heard goes to FOLDER.

A worker that waits in vain fails after some seconds, and the program with it.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from carrywave.parallel import process_groups
from carrywave.parallel.links import pair_links
from carrywave.parallel.links.pair_links import PairLinks
from carrywave.parallel.links.transport import Pending
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.world import World
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.messages import Channel

STAGES, SECONDS = 3, 20


def word(value: float) -> torch.Tensor:
    return torch.full((2,), float(value))


def receive(links: PairLinks, sender: int, receiver: int) -> Pending:
    return links.receive(Channel("F" if sender < receiver else "B", sender, receiver), (2,), torch.float32)


def send(links: PairLinks, sender: int, receiver: int, value: float) -> None:
    links.send(Channel("F" if sender < receiver else "B", sender, receiver), word(value))


def the_other_pair(links: PairLinks, stage: int) -> list[float]:
    """Stage 1 hears stage 2, and is heard by it, before stage 0 sends what stage 1 has posted a receive for."""
    if stage == 0:
        dist.barrier()
        send(links, 0, 1, 10)
        links.flush()
        return []
    if stage == 1:
        late, early = receive(links, 0, 1), receive(links, 2, 1)
        send(links, 1, 2, 12)
        links.flush()
        heard = [early.wait()[0].item()]
        dist.barrier()
        return [*heard, late.wait()[0].item()]
    send(links, 2, 1, 21)
    pending = receive(links, 1, 2)
    links.flush()
    heard = [pending.wait()[0].item()]
    dist.barrier()
    return heard


def the_next_message(links: PairLinks, stage: int) -> list[float]:
    """Stage 1 has the first message of stage 0 before stage 0 sends the second, whose receive is posted beside the first."""
    if stage == 0:
        send(links, 0, 1, 1)
        links.flush()
        dist.barrier()
        send(links, 0, 1, 2)
        links.flush()
        return []
    if stage == 1:
        first, second = receive(links, 0, 1), receive(links, 0, 1)
        links.flush()
        heard = [first.wait()[0].item()]
        dist.barrier()
        return [*heard, second.wait()[0].item()]
    dist.barrier()
    return []


def hanging_up(links: PairLinks, stage: int) -> list[float]:
    """Stage 1 closes its links: those that wait for it are told, and do not run into the timeout."""
    if stage == 1:
        dist.barrier()
        links.close()
        return []
    pending = receive(links, 1, stage)
    links.flush()
    dist.barrier()
    try:
        pending.wait()
    except RuntimeError as error:
        return [int("imed out" not in str(error))]
    return [0]


SCENES = {play.__name__: play for play in (the_other_pair, the_next_message, hanging_up)}


def main(folder: Path, name: str, rank: int) -> None:
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store=FileStore(str(folder / "store"), STAGES), rank=rank, world_size=STAGES, timeout=timeout)
    process_groups.limit(SECONDS)
    pair_links.takes_order = lambda backend: True
    links = Mesh(World(rank, STAGES, rank, STAGES, torch.device("cpu"), "gloo"), Plan(stages=STAGES, chunk_steps=1)).links
    assert isinstance(links, PairLinks)
    heard = SCENES[name](links, rank)
    links.drain()
    (folder / f"{rank}.json").write_text(json.dumps(heard))
    os._exit(0)


if __name__ == "__main__":
    children = []
    for number in range(STAGES):
        child = os.fork()
        if child == 0:
            main(Path(sys.argv[1]), sys.argv[2], number)
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
