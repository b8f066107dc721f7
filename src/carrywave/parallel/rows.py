"""The row of numbers with which every exchange of words between workers begins: one form for all of them, so that any two can meet.

Messages of a process group match by order alone. If a worker takes a step while another creates a trainer (its own step has failed, and it
has already begun anew), what meets is not meant for each other, and where the sizes differ gloo ends the process. A row says which exchange
it begins, and if they differ, all workers raise the same error and are still in step with each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
import torch.distributed as dist

from carrywave.errors import WorkerError
from carrywave.parallel.startup.rendezvous import on_every_rank

NUMBERS = 6  # most numbers that an exchange has for its row


class Exchange(IntEnum):
    """What a row begins."""

    TEXT = 1  # texts follow, of which it has the length
    INPUTS = 2  # nothing follows: checksums of what a step or an evaluation is given


DOES = {
    Exchange.TEXT: "creates a trainer, or reads or writes the state of one",
    Exchange.INPUTS: "takes a step or evaluates",
}


def gather_rows(kind: Exchange, numbers: Sequence[int], size: int, group: dist.ProcessGroup | None) -> list[list[int]]:
    """The numbers of all workers of a group, which has this size. Collective: if others have begun something else, all of them raise."""
    own = torch.tensor([kind, *numbers, *[0] * (NUMBERS - len(numbers))], dtype=torch.int64)
    rows = [torch.zeros_like(own) for _ in range(size)]
    dist.all_gather(rows, own, group=group)
    found = torch.stack(rows).tolist()
    for rank, (theirs, *_) in enumerate(found):
        if theirs != found[0][0]:
            fact = f"rank {rank} {DOES[Exchange(theirs)]} while rank 0 {DOES[Exchange(found[0][0])]}"
            raise on_every_rank(WorkerError(f"{fact}; make the same calls on all workers in the same order, also after an error"))
    return [row[1 : 1 + len(numbers)] for row in found]
