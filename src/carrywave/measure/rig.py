"""Times one unit of a model on one chunk as the runtime runs it: as a stage with that unit alone, and with instant links.

What is timed is `step.compute` itself, with its carries, deferred weight gradients and bookkeeping. The overhead of a task without any
unit is timed too and subtracted, so that the times of a stage's units add up.

Shapes: T time, B lane, W width.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from carrywave.cells.cell import names
from carrywave.data.batch import Batch
from carrywave.kernels import random
from carrywave.model.dropout import Dropout
from carrywave.model.encoders import Embedding, Numbers
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.forecast import Forecast
from carrywave.model.lstm import LSTM, class_of
from carrywave.model.model import Model
from carrywave.model.stage import Stage
from carrywave.model.state import Chunk
from carrywave.plan.cost.profile import Sample
from carrywave.plan.cost.sample_requests import Ask
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.messages import Channel, Program
from carrywave.step.passes import executor
from carrywave.step.passes.job import Job
from carrywave.step.passes.programs import program_for
from carrywave.step.passes.task_clock import Arrived, TaskClock
from carrywave.step.precision import HALVES, autocast, configure, parameter_dtype

STAGES = 3  # encoder, recurrent layers, head: each is a stage of its own
LEAST_RUNS, LEAST_SECONDS = 3, 0.06
LONG_SECONDS = 0.2  # a run this long needs no repetition
Part = Literal["begun", "returned", "all"]  # every forward and the first backward; every forward and backward; weight gradients too
_SMALL = 0.2  # at least this fraction of the measured time is attributed to the unit, however large the task overhead


@dataclass
class Echo:
    """A transport whose messages are available immediately."""

    in_order: ClassVar[bool] = False
    on_device: ClassVar[bool] = False
    closed: ClassVar[bool] = False

    device: torch.device
    messages: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = field(default_factory=dict)

    def receive(self, channel: Channel, shape: tuple[int, ...], dtype: torch.dtype) -> Arrived:
        """A random message of this shape, reused for later receives."""
        key = shape, dtype
        if key not in self.messages:
            self.messages[key] = 0.1 * torch.randn(shape, dtype=dtype, device=self.device)
        return Arrived(self.messages[key].detach())

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Discard the message."""

    def flush(self) -> None:
        """Do nothing: no message is buffered."""

    def drain(self) -> None:
        """Do nothing: no message is in flight."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


class Rig:
    """One unit, set up to run as a stage."""

    def __init__(self, ask: Ask, device: torch.device) -> None:
        self.ask, self.device = ask, device
        configure(ask.precision)
        torch.manual_seed(1)
        with device:  # where weights are drawn: on the host, those of large models would take longer than what is timed
            model, self.place, targets = _model(ask)
        model.to(device, parameter_dtype(ask.precision)).train()
        self.cuts = (1, 1 + ask.layers)
        edges = (0, *self.cuts, model.units)
        self.stage = Stage(model, edges[self.place], edges[self.place + 1])
        T, B = ask.steps, ask.lanes
        if self.place == 0 and ask.kind == "embedding":
            inputs = torch.randint(ask.inputs, (T, B))
        else:
            inputs = torch.zeros(T, B, ask.inputs if self.place == 0 else 1)
        batch = Batch.of(inputs, targets, fresh=False)
        self.batch = batch.without(inputs=self.place > 0, targets=self.place < STAGES - 1).to(device)
        self.echo = Echo(device)
        self.key = random.key(1, 0, 0).to(device)
        self.parameters = [parameter for parameter in self.stage.parameters() if parameter.requires_grad]

    def run(self, chunks: int, clock: TaskClock | None, part: Part = "all") -> None:
        """Run one step, forward and backward, in `chunks` chunks; or only the first part of it."""
        for parameter in self.parameters:
            parameter.grad = None
        plan = Plan(1, STAGES, self.cuts, None if chunks == 1 else -(-self.ask.steps // chunks))
        job = Job(self.batch, self.stage.start(self.ask.lanes, self.device), self.key, precision=self.ask.precision)
        program = up_to(part, program_for(plan, [self.batch], backward=True), self.place)
        executor.run(self.stage, plan, program, [job], self.echo, stage_number=self.place, clock=clock)

    def forward(self) -> Tensor:
        """Run the forward of one chunk alone, with autograd recording for backward."""
        batch = self.batch
        chunk = Chunk(batch.lengths, batch.fresh, batch.lanes, 0, self.key, True)
        shape = (self.ask.steps, self.ask.lanes, self.stage.width_in)
        x = self.echo.receive(Channel("F", 0, 1), shape, self.stage.dtype) if self.place else Arrived(batch.inputs)
        state = self.stage.start(self.ask.lanes, self.device)
        with torch.enable_grad(), autocast(self.ask.precision, self.device):
            y, _, left = self.stage(x.wait().requires_grad_(self.place > 0), state, chunk)
            return y if batch.targets is None else self.stage.loss(y, left, batch.targets, chunk)[0]

    def laps(self, chunks: int, together: Callable[[], None]) -> tuple[float, float, float]:
        """Median seconds, over a few runs, of a chunk's forward, a chunk's backward, and all deferred weight gradients."""
        found: list[tuple[float, float, float]] = []
        spent = 0.0
        self.run(chunks, None)  # warm-up: memory is allocated, libraries are initialized
        together()
        while not found or (spent < LONG_SECONDS and (len(found) < LEAST_RUNS or spent < LEAST_SECONDS) and len(found) < 200):
            clock = TaskClock(self.device)
            self.run(chunks, clock)
            spent += clock.seconds()
            found.append((clock.seconds("F") / chunks, clock.seconds("B") / chunks, clock.seconds("W")))
        forward, backward, put_off = (statistics.median(each) for each in zip(*found, strict=True))
        return forward, backward, put_off


def up_to(part: Part, program: Program, place: int) -> Program:
    """The program whose stage at `place` stops after a part of its steps."""
    kept, backwards = [], 0
    for step in program.stages[place]:
        backwards += step.kind == "run" and step.task.phase == "B"
        if (part == "begun" and backwards > 1) or (part != "all" and step.kind == "run" and step.task.phase == "W"):
            break
        kept.append(step)
    return replace(program, stages=(*program.stages[:place], tuple(kept), *program.stages[place + 1 :]))


def time_unit(ask: Ask, device: torch.device, task_seconds: float, together: Callable[[], None], alone: bool) -> Sample:
    """Time a request. `together` is a barrier, so that all workers time the same call at once.

    `alone`: time the call as a single chunk, as when time is not cut. Otherwise two chunks are run, to separate the deferrable weight
    gradients from the rest of backward.
    """
    if ask.kind in ("dropout", "norm"):
        return _plain(ask, device, together)
    if alone:
        whole = Rig(ask, device)
        put_off = whole.laps(2, together)[2] if ask.steps > 1 else 0.0
        forward, backward, _ = whole.laps(1, together)
        forward, backward = without_task(forward, task_seconds), without_task(backward, task_seconds)
    else:
        forward, backward, paid = Rig(ask.twice(), device).laps(2, together)
        put_off = paid / 2
        forward, backward = without_task(forward, task_seconds), without_task(backward, task_seconds) + put_off
    return ask.sample(forward, backward, min(put_off, backward))


def time_task(device: torch.device, precision: str, together: Callable[[], None]) -> float:
    """Seconds of overhead per task: a task without any unit, in which numeric input passes through unchanged."""
    forward, backward, _ = Rig(nothing(precision), device).laps(2, together)
    return (forward + backward) / 2


def nothing(precision: str) -> Ask:
    """The request for a task without any unit."""
    return Ask("linear", 1, 1, 4, 8, precision=precision, nothing=True)


def without_task(seconds: float, task_seconds: float) -> float:
    """The seconds of a unit itself: those of its task less the overhead of any task."""
    return max(seconds - task_seconds, _SMALL * seconds)


def _model(ask: Ask) -> tuple[Model, int, Tensor | None]:
    """A model that contains the unit, the stage the unit is on, and targets if it is the head."""
    T, B = ask.steps, ask.lanes
    narrow = Forecast(1, 1, 1)
    if ask.nothing:
        return Model(Numbers(ask.inputs), LSTM(ask.inputs, 1), narrow), 0, None
    if ask.kind in names():
        lstm = class_of(ask.kind)(ask.inputs, ask.outputs, ask.layers, proj_size=ask.projection)
        return Model(Numbers(ask.inputs), lstm, Forecast(lstm.output_size, 1, 1)), 1, None
    match ask.kind:
        case "embedding":
            return Model(Embedding(ask.inputs, ask.outputs), LSTM(ask.outputs, 1), narrow), 0, None
        case "softmax":
            return Model(Numbers(1), LSTM(1, ask.inputs), Softmax(ask.inputs, ask.outputs)), 2, torch.randint(ask.outputs, (T, B))
        case _:
            return Model(Numbers(1), LSTM(1, ask.inputs), Forecast(ask.inputs, ask.outputs, 1)), 2, torch.zeros(T, B, ask.outputs, 1)


def between(ask: Ask, device: torch.device) -> Callable[[bool], None]:
    """A function that runs dropout or norm, which lie between units: forward, and also backward if its argument is true."""
    dtype = parameter_dtype(ask.precision)
    module: nn.Module = Dropout(0.5, name="timed") if ask.kind == "dropout" else nn.LayerNorm(ask.outputs)
    module.to(device, dtype).train()
    x_TBW = torch.randn(ask.steps, ask.lanes, ask.outputs, device=device, dtype=HALVES.get(ask.precision, dtype), requires_grad=True)
    key, lanes = random.key(1, 0, 0).to(device), torch.arange(ask.lanes, device=device)

    def run(backward: bool) -> None:
        with random.scope(key, lanes, 0), autocast(ask.precision, device):
            y_TBW = module(x_TBW)
        if backward:
            torch.autograd.backward(y_TBW, y_TBW.detach())
            x_TBW.grad = None

    return run


def _plain(ask: Ask, device: torch.device, together: Callable[[], None]) -> Sample:
    """Time dropout or norm from the host."""
    run = between(ask, device)
    run(True)
    clock = TaskClock(device)
    found: list[tuple[float, float]] = []
    together()
    while len(found) < LEAST_RUNS or (sum(map(sum, found)) < LEAST_SECONDS and len(found) < 200):
        begin = clock.now()
        run(False)
        middle = clock.now()
        run(True)
        found.append((middle - begin, clock.now() - middle))
    forward, both = (statistics.median(each) for each in zip(*found, strict=True))
    return ask.sample(forward, max(both - forward, 0.1 * both), 0.0)
