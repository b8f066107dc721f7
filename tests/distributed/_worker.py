"""The workers of the exactness tests: `_worker.py FOLDER DEVICE BACKEND IN:OUT …`, a pair of pipes for each of them.

BACKEND is gloo, nccl, "in order": gloo with messages as NCCL gets them, "one at a time": the same on the strictest device there may be, or
"mapped": gloo, with messages and sums as in device memory, but in a file that all processes map.

This process loads the libraries and forks into the workers, which is much quicker than to load them in each. A case comes in as
a line of JSON, and a line goes back. They serve worlds of any size, one after the other: a line says where its workers meet.
Tensors go back in a file of their own, from rank 0.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import FileStore  # type: ignore[attr-defined]

sys.path.insert(0, str(Path(__file__).parent))
from _broken import broken
from _cases import Run, plan_of, train
from _mapped import MappedMemory
from _serial_device import SerialDevice

from carrywave.parallel import mesh as mesh_module
from carrywave.parallel import process_groups
from carrywave.parallel.links import pair_links
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.startup import nccl
from carrywave.parallel.sums import host_sums
from carrywave.parallel.world import World
from carrywave.plan.plan import Plan
from carrywave.step import worker_setup
from carrywave.step.gradients import Gradients

TRANSPORTS = {"nccl": "pair_links", "device": "device_links", "gloo": "transport"}  # the modules of their links


class Worker:
    """This process in one world after the other."""

    def __init__(self, rank: int, size: int, device: str, backend: str) -> None:
        # Several workers share a GPU, except under NCCL, if there is one for each.
        gpus = torch.cuda.device_count() if backend == "nccl" else 1
        self.device = torch.device(device, rank % gpus) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            torch.cuda.set_device(self.device)
        if backend == "nccl":
            nccl.prepare(rank, [str(each % gpus) for each in range(size)], one_host=True)
        host_sums.LEAST_BYTES = 0  # small models are summed as large ones are
        if backend in ("in order", "one at a time"):
            pair_links.takes_order = lambda backend: True
            if backend == "one at a time":
                dist.batch_isend_irecv = SerialDevice().batch_isend_irecv
            backend = "gloo"
        if backend == "mapped":
            mesh_module.symmetric_memory = MappedMemory
            mesh_module.peer_access.in_reach = lambda there, ranks: True
            backend = "gloo"
        self.rank, self.backend = rank, backend
        self.meeting = ""
        self.meshes: dict[tuple[int, int, bool, tuple[str, ...]], Mesh] = {}

    def run(self, line: dict[str, Any]) -> Run:
        case = line["case"]
        plan = plan_of(case)
        if line["meeting"] != self.meeting:
            self._meet(line["meeting"], plan.workers)
        options = {} if case.get("bucket_bytes") is None else {"bucket_bytes": case["bucket_bytes"]}
        with broken(case.get("broken"), self.rank), mock.patch.object(worker_setup, "Gradients", functools.partial(Gradients, **options)):
            return train(case, self._mesh(plan, tuple(case.get("hosts", ()))))

    def _meet(self, path: str, size: int) -> None:
        if dist.is_initialized():
            process_groups.leave()
            dist.destroy_process_group()
        self.meshes.clear()
        process_groups.limit(60)
        self.meeting, self.size = path, size
        MappedMemory.meeting = Path(path)
        # A minute: a hang is a failure of the case at hand, and is told as one.
        backend = "cpu:gloo,cuda:nccl" if self.backend == "nccl" else "gloo"
        dist.init_process_group(backend, store=FileStore(path, size), rank=self.rank, world_size=size, timeout=timedelta(seconds=60))

    def _mesh(self, plan: Plan, hosts: tuple[str, ...]) -> Mesh:
        """Process groups follow from replicas, stages and who scores: plans that agree in them share them, which saves most of the time."""
        shape = plan.replicas, plan.stages, plan.shares_head, hosts
        if shape not in self.meshes:
            world = World(self.rank, self.size, self.rank, self.size, self.device, self.backend, hosts)
            made = self.meshes[shape] = Mesh(world, plan)
            if (asked := os.environ.get("CARRYWAVE_TRANSPORT")) is not None and made.links is not None:
                assert type(made.links).__module__.endswith(f".{TRANSPORTS[asked]}"), f"asked for {asked}, got {type(made.links)}"
        mesh = copy.copy(self.meshes[shape])
        mesh.plan = plan
        return mesh


def serve(rank: int, worker: Worker, folder: Path, incoming: int, outgoing: int) -> None:
    """Run the cases that come in, until there are no more."""
    with os.fdopen(incoming) as lines, os.fdopen(outgoing, "w", buffering=1) as replies:
        for number, text in enumerate(lines):
            try:
                run = worker.run(json.loads(text))
                reply = {key: getattr(run, key) for key in ("losses", "norms", "finite", "scale", "digests", "replays", "failure")}
                if rank == 0:
                    tensors = {f"gradient/{k}": v for k, v in run.gradients.items()} | {f"weight/{k}": v for k, v in run.weights.items()}
                    path = folder / f"{number}.safetensors"
                    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)
                    reply["tensors"] = str(path)
            except Exception:
                reply = {"error": traceback.format_exc()}
            replies.write(json.dumps(reply) + "\n")


def main() -> None:
    folder, device, backend = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    pipes = [tuple(map(int, pair.split(":"))) for pair in sys.argv[4:]]
    # What an optimizer loads when it is first made is loaded here. Nothing has run yet, on any device or thread, so that a fork is safe.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    for rank, (incoming, outgoing) in enumerate(pipes):
        if os.fork() == 0:
            for other, ends in enumerate(pipes):
                if other != rank:
                    for end in ends:
                        os.close(end)
            serve(rank, Worker(rank, len(pipes), device, backend), folder, incoming, outgoing)
            os._exit(0)
    for pair in pipes:
        for end in pair:
            os.close(end)
    for _ in pipes:
        os.wait()


if __name__ == "__main__":
    main()
