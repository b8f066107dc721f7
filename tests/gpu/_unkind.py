"""Workers whose stages exchange messages over NCCL on shares of a GPU, for thousands of steps, and under waits that nothing was made for.

Every time that messages are issued, a worker's stream first sleeps for a moment of its own, up to what a chunk takes: receives are posted
long before their messages come, and persistent kernels are launched while they wait.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from carrywave.model.lstm import LSTM
from carrywave.parallel.links.group_links import GroupLinks
from carrywave.parallel.world import World

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.gpu_pipeline import Loop, Split, SummedStack

CYCLES = 200_000  # about a tenth of a millisecond


def work(world: World, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Train for so many steps; tells the losses, how many steps were recorded, and the kernel of a layer."""
    draw = random.Random(world.rank)
    issue = GroupLinks.flush

    def flush(links: GroupLinks) -> None:
        torch.cuda._sleep(draw.randrange(CYCLES))  # type: ignore[no-untyped-call]
        issue(links)

    GroupLinks.flush = flush  # type: ignore[method-assign]
    case, split = SummedStack(**job["case"]), Split(**job["split"])
    loop = Loop(world, case, split, "bf16")
    losses = [float(loop.update()) for _ in range(3)]
    for _ in range(job["steps"]):
        last = loop.update()
    losses.append(float(last))
    layer = LSTM(case.hidden, case.hidden, device=world.device).weights(0)
    one = torch.empty((), dtype=torch.bfloat16, device=world.device)
    steps = -(-case.steps // split.chunks)
    kernel = LSTM.backends.in_use("auto", one.expand(steps, case.lanes, case.hidden), layer)
    count = torch.cuda.get_device_properties(world.device).multi_processor_count
    yield {"losses": losses, "replays": loop.trainer.capture.replays["step"] if loop.trainer.capture else 0, "kernel": kernel, "of": count}
