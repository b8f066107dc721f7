"""What NCCL is told before it starts: the order of its launches, that shares of one GPU are GPUs of their own, and how many multiprocessors
the messages of a pipeline may take.

NCCL refuses two ranks on one GPU of one host. Ranks with a host id of their own it takes for different hosts, and connects them over its
network transport: slower than device memory, but all of its code paths run, which is what shares are for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from carrywave.parallel.startup.environment import TRANSPORT, shares_run_at_once

# Thread blocks of a kernel that sends and receives, each on a multiprocessor of its own. The messages of a pipeline are small, so that one
# is as fast as more; what it takes is missing to the kernels of the layers.
MESSAGE_BLOCKS = 1


def backend_for(gpus: Sequence[str]) -> str:
    """The backend of workers on these GPUs, by UUID; empty for one without."""
    asked = os.environ.get(TRANSPORT)
    if "" in gpus or asked == "gloo":
        return "gloo"
    return "nccl" if (asked == "nccl" and shares_run_at_once()) or len(set(gpus)) == len(gpus) else "gloo"


def prepare(rank: int, gpus: Sequence[str], *, one_host: bool) -> None:
    """Set the variables that NCCL reads when it starts."""
    # The device starts the kernels of different communicators in the order in which they are issued. Otherwise a later one might take the
    # last free multiprocessors, and wait for a worker that waits for the earlier one.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if len(set(gpus)) == len(gpus):
        return
    os.environ["NCCL_HOSTID"] = f"carrywave-{rank}"
    if one_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def message_options(timeout: timedelta | None) -> object:
    """Options of a process group whose messages keep to `MESSAGE_BLOCKS`."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = MESSAGE_BLOCKS
    if timeout is not None:
        options._timeout = timeout
    return options
