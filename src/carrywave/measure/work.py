"""Runs one worker of a measurement: times units, the optimizer, all-reduces and messages, simultaneously on all workers.

It yields rows that `measure.profiles` merges into a profile: `sample`, `lag`, `reduction`, `link`, `overheads`. On a GPU every unit is
timed in CUDA graphs, as a window of its own and as one chunk of a window; and, unless the job says that no plan needs it, launched by the
host, as in stages that exchange messages through it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch import distributed as dist

from carrywave.cells.cell import names
from carrywave.data.batch import Batch
from carrywave.measure import device_memory, nccl_links
from carrywave.measure.recorded import recorded_task, time_chunk, time_recorded
from carrywave.measure.recorded_steps import step_overheads, time_update, train_section
from carrywave.measure.rig import Rig, time_task, time_unit
from carrywave.measure.timing import LARGE_BYTES, SMALL_BYTES, call_seconds, rate_between, settle
from carrywave.model.encoders import Numbers
from carrywave.model.heads.forecast import Forecast
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.sums.group_sums import GroupSum
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World
from carrywave.plan.cost.profile import Sample
from carrywave.plan.cost.sample_requests import OPTIMIZER_SIZES, REDUCED_BYTES, Ask
from carrywave.plan.plan import Plan
from carrywave.step.passes.task_clock import TaskClock
from carrywave.step.trainer import Trainer

UPDATES, REDUCTIONS, MESSAGES = 3, 7, 40
LEAST_MESSAGES, WARM_MESSAGES = 7, 2
LINK_SECONDS = 1.0  # most time for messages of one size
ROUND_SECONDS, ROUNDS = 0.05, 12


def work(world: World, job: Row) -> Iterator[Row]:
    """Measure everything a job asks for; each worker yields its own times, even for what all workers run at once."""
    together = dist.barrier if world.size > 1 else lambda: None
    precision = job["precision"]
    task_seconds = time_task(world.device, precision, together)
    yield {"overheads": {"task_seconds": task_seconds}}
    on_gpu = world.device.type == "cuda"
    recorded = recorded_task(world.device, precision, together) if on_gpu else 0.0
    if on_gpu:
        yield {"overheads": {"recorded_seconds": recorded, **step_overheads(world.device, precision)}}
    asks = [Ask(**values) for values in job["asks"]]
    if on_gpu:
        for ask in asks:
            yield {"sample": asdict(time_recorded(ask, world.device, recorded, together))}
            if not ask.whole and ask.kind not in ("dropout", "norm"):
                yield {"sample": asdict(time_chunk(ask, world.device, recorded, together))}
    for name in job["optimizers"]:
        for parameters, layers in OPTIMIZER_SIZES[world.device.type]:
            yield {"sample": asdict(_update(world.device, name, parameters, layers, precision, together))}
    # On a GPU, stages that exchange messages through the host run chunks; whole windows only if time cannot be cut.
    launched = job.get("launched", True)
    uncut = all(ask.whole for ask in asks)
    for ask in asks:
        if ask.layers == 1 and (not on_gpu or (launched and (uncut or not ask.whole))):
            sample = time_unit(ask, world.device, task_seconds, together, alone=ask.whole and not on_gpu)
            yield {"sample": asdict(replace(sample, piped="launched" if on_gpu else ""))}
    if world.size > 1 and job.get("links", True):
        yield from _links(world, asks, precision)


def _links(world: World, asks: Sequence[Ask], precision: str) -> Iterator[Row]:
    """What workers lose to each other: lags, sums and messages, the latter as stages and replicas on these devices exchange them."""
    if world.device.type == "cpu":
        yield _lag(world, next((ask for ask in asks if ask.kind in names()), Ask("lstm", 128, 128, 8, 32, precision=precision)))
    mesh = Mesh(world, Plan(world.size))
    if mesh.in_device_memory:
        yield from device_memory.rows_of(mesh)
        return
    if mesh.on_device:
        yield from nccl_links.rows_of(mesh)
        return
    yield from time_reductions(world, cast(GroupSum, mesh.replicas_of([0])))
    yield from time_messages(world, mesh.sums)


def _update(device: torch.device, name: str, parameters: int, layers: int, precision: str, together: Callable[[], None]) -> Sample:
    """Time norm, clipping and optimizer: what a step takes besides forward and backward."""
    if device.type == "cuda":
        return _updated(*time_update(device, name, parameters, precision), name, precision)
    hidden = max(1, round((parameters / (8 * layers - 4)) ** 0.5))
    model = Model(Numbers(1), LSTM(1, hidden, layers), Forecast(hidden, 1, 1))
    trainer = Trainer(model, train_section(name, precision), mesh=Mesh.alone(device))
    batch = Batch.of(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, 1)).to(device)
    found = []
    for number in range(UPDATES + 1):
        together()
        trainer.compute.clock = clock = TaskClock(device)
        begin = clock.now()
        trainer.step(batch)
        took = clock.now() - begin - clock.seconds()
        if number:  # the first step allocates the optimizer state
            found.append(took)
    return _updated(model, statistics.median(found), name, precision)


def _updated(model: Model, seconds: float, name: str, precision: str) -> Sample:
    each = [parameter.numel() for parameter in model.parameters()]
    on_cpu = next(model.parameters()).device.type == "cpu"  # a GPU updates all tensors at once
    return Sample("optimizer", "fp64" if precision == "fp64" else "fp32", len(each) if on_cpu else 0, sum(each), 1, 1, seconds, name=name)


def _lag(world: World, ask: Ask) -> Row:
    """How far the slowest worker is behind the mean after equal work about as long as a step, as a fraction of that work."""
    rig = Rig(ask, world.device)
    rig.run(1, None)
    run = partial(rig.run, 1, None)
    seconds = torch.tensor([call_seconds(run, 1, world.device)], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # so that all workers repeat it equally often
    times = max(1, round(ROUND_SECONDS / seconds.item()))
    slowest, mean = torch.zeros(ROUNDS, dtype=torch.float64), torch.zeros(ROUNDS, dtype=torch.float64)
    for number in range(ROUNDS):
        dist.barrier()
        slowest[number] = mean[number] = call_seconds(run, times, world.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(mean)
    return {"lag": (slowest.sum() / mean.sum() * world.size - 1).item()}


def time_reductions(world: World, summing: GroupSum) -> Iterator[Row]:
    """Time all-reduces of several sizes over a group of workers."""
    workers = summing.group.size()
    busy = torch.zeros(1 << 20)
    for num_bytes in REDUCED_BYTES:
        tensor = summing.zeros(num_bytes // 4, dtype=torch.float32, device=world.device)
        found = []
        for _ in range(REDUCTIONS + 2):
            dist.barrier(summing.group)
            if world.device.type == "cpu":
                busy.add_(1.0)  # after parallel work, as after backward, the threads of every worker keep their cores busy for a while
            begin = time.perf_counter()
            summing.all_reduce(tensor).wait()
            settle(world.device)
            found.append(time.perf_counter() - begin)
        yield {"reduction": {"workers": workers, "num_bytes": num_bytes, "seconds": statistics.median(found[2:])}}


def time_messages(world: World, transport: str, pair: tuple[int, int] = (0, 1)) -> Iterator[Row]:
    """Time messages between two workers: half a round trip, and the sender's own time per message. Other workers do nothing."""
    if world.rank not in pair:
        return
    first, peer = world.rank == pair[0], pair[1] if world.rank == pair[0] else pair[0]
    seconds: dict[int, float] = {}
    handed: list[float] = []
    for num_bytes in (SMALL_BYTES, LARGE_BYTES):
        tensor = torch.zeros(num_bytes // 4, device=world.device)
        found: list[float] = []
        times = MESSAGES
        while len(found) < times:
            begin = time.perf_counter()
            if first:
                handed.append(_send(tensor, peer))
                dist.recv(tensor, peer)
            else:
                dist.recv(tensor, peer)
                handed.append(_send(tensor, peer))
            settle(world.device)
            found.append((time.perf_counter() - begin) / 2)
            if len(found) == WARM_MESSAGES + 1:
                times = _agreed(first, peer, found[-1])
        seconds[num_bytes] = statistics.median(found[WARM_MESSAGES:])
    rate = rate_between(seconds[SMALL_BYTES], seconds[LARGE_BYTES])
    if first:
        yield {"link": {"latency_seconds": seconds[SMALL_BYTES], "bytes_per_second": rate, "transport": transport}}
    yield {"overheads": {"message_seconds": statistics.median(handed)}}


def _agreed(first: bool, peer: int, seconds: float) -> int:
    """How many messages both ends time: fewer on a slow link, where few are enough."""
    times = torch.tensor([max(LEAST_MESSAGES, min(MESSAGES, round(LINK_SECONDS / max(1e-9, 2 * seconds))))])
    if first:
        dist.send(times, peer)
    else:
        dist.recv(times, peer)
    return int(times)


def _send(tensor: Tensor, peer: int) -> float:
    """Send a message and return the seconds until it was enqueued; waiting for its completion does not count."""
    begin = time.perf_counter()
    work = cast(dist.Work, dist.isend(tensor, peer))
    handed = time.perf_counter() - begin
    work.wait()
    return handed
