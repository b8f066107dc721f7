"""Ways of messages and sums that this machine lacks, acted out by what it has, for `Workers(transport=...)`.

`one at a time`: over gloo, in the order in which NCCL gets them, on the strictest device. `mapped`: as in the memory of GPUs,
in a file that all processes map.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from _mapped import MappedMemory
from _serial_device import SerialDevice

from carrywave.parallel import mesh
from carrywave.parallel.links import group_links
from carrywave.parallel.sums import host_sums

TRANSPORTS = ("one at a time", "mapped")


def use(transport: str, meeting: Path) -> None:
    """Have this process use it. `meeting`: a path that only the workers of this world know."""
    host_sums.LEAST_BYTES = 0  # small models are summed as large ones are
    if transport == "mapped":
        MappedMemory.meeting = meeting
        mesh.symmetric_memory = MappedMemory  # type: ignore[assignment, misc]
        mesh.peer_access.in_reach = lambda there, ranks: True  # type: ignore[attr-defined]
    elif transport:
        group_links.takes_order = lambda backend: True
        dist.batch_isend_irecv = SerialDevice().batch_isend_irecv  # type: ignore[assignment]
