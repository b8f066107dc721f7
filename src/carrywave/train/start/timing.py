"""Times calls, links and steps on this worker's device, at the same moment as all other workers: for the planner.

Calls are timed as they are trained: on a GPU captured in CUDA graphs, so that the host has no part in them.

Shapes: T time, B lane, W width.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn
from torch import distributed as dist

from carrywave.data.augmentation import Augmentation
from carrywave.data.batch import Batch
from carrywave.data.loader import Loader
from carrywave.data.order import Cursor, Order
from carrywave.kernels import random
from carrywave.model.dropout import Dropout
from carrywave.model.encoders import Embedding, Numbers
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.forecast import Forecast
from carrywave.model.lstm import LSTM, class_of
from carrywave.model.model import Model
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World, all_gather_json
from carrywave.plan.plan import Plan
from carrywave.step.precision import HALVES, autocast, configure, parameter_dtype
from carrywave.step.trainer import Trainer
from carrywave.step.worker_setup import holding_of
from carrywave.tasks.kind import Part
from carrywave.tasks.task import Task
from carrywave.train.start.machine import CallToTime

REPEATS, LEAST_SECONDS, WARM_UP = 3, 0.03, 2
SMALL_BYTES, LARGE_BYTES = 4096, 1 << 20  # of the two messages, and the two sums, that tell a link's latency and rate
STEPS, WARM_STEPS = 3, {"cpu": 1, "cuda": 3}  # of a plan; on a GPU the second of a shape is captured
STEPS_SECONDS, MOST_STEPS = 0.2, 10  # short steps are taken more often: that long, but not more often than this
_CHUNKS = 8  # of a window whose tasks do hardly anything
LONG_SECONDS = 5.0  # a step this long needs no repetition


def work(world: World, job: Row) -> Iterator[Row]:
    """Time the calls of a job, then sums and messages; each worker yields its own times. Collective: every rank must call it."""
    precision = job["precision"]
    configure(precision)
    for values in job["calls"]:
        call = CallToTime(**values)
        forward, both = call_of(call, precision, world.device)
        if world.size > 1:
            dist.barrier()
        seconds = _median(both, world.device)
        share = 1.0 if forward is None else min(1.0, _median(forward, world.device) / seconds)
        yield {"call": values, "forward_seconds": share * seconds, "seconds": seconds}
    yield {"task_seconds": _task_seconds(precision, world.device)}
    if world.size > 1:
        yield from links(world)


def _task_seconds(precision: str, device: torch.device) -> float:
    """What a forward or a backward of a chunk takes besides its work: of a model that has hardly any, what more chunks add to a step."""
    seconds = []
    for chunk_steps in (_CHUNKS, 1):
        model = Model(Numbers(1), LSTM(1, 1), Forecast(1, 1, 1)).to(parameter_dtype(precision))
        trainer = Trainer(model, {"precision": precision}, mesh=Mesh.alone(device, Plan(chunk_steps=chunk_steps)))
        batch = Batch.of(torch.zeros(_CHUNKS, 1, 1), torch.zeros(_CHUNKS, 1, 1, 1)).to(device)
        seconds.append(_median(partial(trainer.update, batch), device))
    return max(0.0, seconds[1] - seconds[0]) / (2 * (_CHUNKS - 1))


def call_of(call: CallToTime, precision: str, device: torch.device) -> tuple[Callable[[], object] | None, Callable[[], object]]:
    """A call's forward alone, and with backward; the first is None for an update."""
    T, B, dtype = call.steps, call.lanes, parameter_dtype(precision)
    if call.kind == "update":
        return None, _update(call, precision, device)
    width = call.outputs if call.kind == "plain" else call.inputs
    x_TBW = torch.randn(T, B, width if call.unit != "embedding" else 1, device=device, dtype=HALVES.get(precision, dtype))
    if call.unit == "embedding":
        x_TBW = torch.randint(call.inputs, (T, B), device=device)
    else:
        x_TBW.requires_grad_()
    key, lanes_B = random.key(1, 0, 0).to(device), torch.arange(B, device=device)
    module = _module(call).to(device, dtype).train()
    labels = torch.randint(max(1, call.outputs), (T, B), device=device) if call.unit == "softmax" else None
    values = torch.zeros(T, B, call.outputs, 1, device=device) if call.unit == "linear" else None
    targets = labels if labels is not None else values

    def forward() -> Tensor:
        with random.Scope(key, lanes_B, 0), autocast(precision, device):
            if isinstance(module, Softmax | Forecast):
                assert targets is not None
                return module.loss(x_TBW, targets)[0]
            out = module(x_TBW)
            return out if isinstance(out, Tensor) else out[0]

    def both() -> None:
        y = forward()
        torch.autograd.backward(y, torch.ones_like(y))

    return forward, both


def _module(call: CallToTime) -> nn.Module:
    match call.unit:
        case "embedding":
            return Embedding(call.inputs, call.outputs)
        case "softmax":
            return Softmax(call.inputs, call.outputs)
        case "linear":
            return Forecast(call.inputs, call.outputs, 1)
        case "dropout":
            return Dropout(0.5, name="timed")
        case cell:
            return class_of(cell)(call.inputs, call.outputs, 1, proj_size=call.projection)


def _update(call: CallToTime, precision: str, device: torch.device) -> Callable[[], object]:
    """A step of a model with about so many parameters on one step of one lane: mostly norm, clipping and optimizer."""
    hidden = max(1, round((call.outputs / 4) ** 0.5))
    model = Model(Numbers(1), LSTM(1, hidden), Forecast(hidden, 1, 1)).to(parameter_dtype(precision))
    trainer = Trainer(model, {"optimizer": call.unit, "precision": precision, "clip": 1.0, "lr": 1e-9}, mesh=Mesh.alone(device))
    batch = Batch.of(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, 1)).to(device)
    return lambda: trainer.update(batch)


def _median(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call, after a warm-up."""
    for _ in range(WARM_UP):
        call()
    if device.type == "cuda":
        call = _captured(call)
    found: list[float] = []
    while len(found) < REPEATS or sum(found) < LEAST_SECONDS:
        found.append(call_seconds(call, device))
    return statistics.median(found)


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """A call as a CUDA graph; as it is, if it cannot be captured, as a trainer that captures its own steps cannot."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # Thread-local: NCCL has a thread that asks for the state of earlier work meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except RuntimeError:
        return call
    return graph.replay


def call_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call by the host's clock, from an idle device until it is done."""
    _settle(device)
    begin = time.perf_counter()
    call()
    _settle(device)
    return time.perf_counter() - begin


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def links(world: World) -> Iterator[Row]:
    """Sums over all workers as the step has them, and messages between the first two over gloo; others are taken to be as fast as sums."""
    mesh = Mesh(world, Plan(world.size))
    small, large = (_median_sum(mesh, size) for size in (SMALL_BYTES, LARGE_BYTES))
    # A ring passes 2 (n - 1) messages, each of an n-th of the numbers.
    passes = 2 * (world.size - 1)
    sums = link(small / passes, large / passes, SMALL_BYTES / world.size, LARGE_BYTES / world.size)
    yield {"sums": sums}
    if world.backend == "gloo" and world.device.type == "cpu":
        small, large = (time_messages(world, size, (0, 1)) for size in (SMALL_BYTES, LARGE_BYTES))
        if world.rank == 0:
            yield {"within": link(small, large, SMALL_BYTES, LARGE_BYTES)}
    elif world.rank == 0:
        yield {"within": sums}
    dist.barrier()


def link(small: float, large: float, small_bytes: float, large_bytes: float) -> Row:
    """A link from what a small and a large message take. On a busy machine the large one may take no longer; the bytes are then taken to
    need a twentieth of it, as less cannot be told from noise.
    """
    rate = (large_bytes - small_bytes) / max(1e-9, large - small, large / 20)
    return {"latency_seconds": small, "bytes_per_second": rate}


def _median_sum(mesh: Mesh, num_bytes: int) -> float:
    numbers = torch.zeros(num_bytes // 4, device=mesh.device)
    found = []
    for _ in range(WARM_UP + 2 * REPEATS):
        dist.barrier()
        found.append(call_seconds(lambda: mesh.sum_(numbers), mesh.device))
    return statistics.median(found[WARM_UP:])


def time_messages(world: World, num_bytes: int, pair: tuple[int, int]) -> float:
    """Median seconds of a message between two workers, half of the way there and back; others do nothing."""
    if world.rank not in pair:
        return 0.0
    first, peer = world.rank == pair[0], pair[1] if world.rank == pair[0] else pair[0]
    numbers = torch.zeros(num_bytes // 4, device=world.device)

    def there_and_back() -> None:
        for kind in (dist.send, dist.recv) if first else (dist.recv, dist.send):
            kind(numbers, peer)

    return statistics.median(call_seconds(there_and_back, world.device) / 2 for _ in range(WARM_UP + 2 * REPEATS))


def step_seconds(world: World, plans: Sequence[Plan], task: Task, part: Part, order: Order) -> list[float]:
    """The least seconds of a few real steps of each plan with a model of its own: other programs only ever add to it.

    On CPUs, whose load changes from moment to moment, plans take their steps in turns, so that it falls on all of them alike; a GPU, whose
    memory may hold no second model, takes one plan after another. Collective: every rank must call it.
    """
    together = [plans] if world.device.type == "cpu" else [[plan] for plan in plans]
    return [each for some in together for each in _in_turns(world, [_a_step(Mesh(world, plan), task, part, order) for plan in some])]


def _in_turns(world: World, steps: Sequence[Callable[[], float]]) -> list[float]:
    """What each step takes on its slowest worker, the least over rounds of one step each; `steps` return their seconds."""
    warm = [step() for _ in range(WARM_STEPS[world.device.type]) for step in steps]
    slowest = max(max(row) for row in all_gather_json(world, warm[-len(steps) :]))
    rounds = 1 if slowest >= LONG_SECONDS else min(MOST_STEPS, max(STEPS, int(STEPS_SECONDS / slowest)))
    own = [[step() for step in steps] for _ in range(rounds)]
    of_workers = all_gather_json(world, own)
    return [min(max(rows[at][plan] for rows in of_workers) for at in range(rounds)) for plan in range(len(steps))]


def _a_step(mesh: Mesh, task: Task, part: Part, order: Order) -> Callable[[], float]:
    """A real step under the plan of a mesh on the first batch, which says what it took."""
    spec, device = task.spec, mesh.device
    model = task.model(part.data, holding=holding_of(mesh, spec.model.layers + 2))
    model.to(parameter_dtype(spec.train.precision))
    trainer = Trainer(model, spec.train, mesh=mesh, keep_state=spec.streams)
    share = mesh.share(inputs=trainer.stage.has_encoder, targets=trainer.stage.scores)
    loader = Loader(part.view, order, device=device, share=share, augmentation=Augmentation.of(spec, part.view.inputs))
    batches = loader.batches(Cursor(0, 0))
    group = list(islice(batches, spec.train.accumulate))
    batches.close()
    return lambda: call_seconds(lambda: trainer.update(*group), device)
