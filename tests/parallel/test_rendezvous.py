"""Stages as threads, over links as strict as `prove` in tests/plan: programs run on them, and give the gradients of one stage.

A send blocks until its receive is posted; the i-th send of a channel meets its i-th receive, whose shape and dtype must be those of the
message; and where all stages wait for each other, they are told so instead of hanging.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from carrywave.data.batch import Batch
from carrywave.kernels import random
from carrywave.model.dropout import Dropout
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.pooled import PooledSoftmax
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.model.stage import Stage
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.messages import Channel, Program, ProgramStep
from carrywave.plan.schedule.schedule import Phase
from carrywave.step.passes.executor import run
from carrywave.step.passes.job import Job
from carrywave.step.passes.programs import program_for

VOCABULARY, WIDTH, CLASSES = 7, 4, 3


class Broken(Exception):
    """Messages that do not fit, or stages that wait for each other."""


class Hall:
    """Where the stages meet: their channels, and who waits for what."""

    def __init__(self, stages: int) -> None:
        self.changed = threading.Condition()
        self.live = set(range(stages))
        self.waiting: dict[int, tuple[str, Callable[[], bool]]] = {}
        self.failure: BaseException | None = None
        self.sent: dict[Channel, list[Tensor]] = {}
        self.posted: dict[Channel, list[tuple[tuple[int, ...], torch.dtype]]] = {}  # shapes and dtypes

    def wait(self, stage: int, what: str, ready: Callable[[], bool]) -> None:
        """Until something is ready. The caller holds the lock."""
        self.waiting[stage] = (what, ready)
        self.changed.notify_all()
        while not ready():
            if self.failure is None and self.live == set(self.waiting) and not any(done() for _, done in self.waiting.values()):
                words = "; ".join(f"stage {number} waits to {what}" for number, (what, _) in sorted(self.waiting.items()))
                self.failure = Broken(f"deadlock: {words}")
                self.changed.notify_all()
            if self.failure is not None:
                raise Broken("another stage failed") from self.failure
            self.changed.wait()
        del self.waiting[stage]

    def carry_out(self, works: list[Callable[[StrictLinks], Any]]) -> list[Any]:
        """Each stage's work in a thread of its own; the first failure is raised here."""
        results: list[Any] = [None] * len(works)

        def work(stage: int) -> None:
            try:
                results[stage] = works[stage](StrictLinks(self, stage))
            except BaseException as error:
                with self.changed:
                    self.failure = self.failure or error
            finally:
                with self.changed:
                    self.live.discard(stage)
                    self.waiting.pop(stage, None)
                    self.changed.notify_all()

        threads = [threading.Thread(target=work, args=(stage,)) for stage in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        for line, posted in self.posted.items():
            if len(posted) != len(self.sent.get(line, [])):
                raise Broken(f"a receive of {line.phase} on stage {line.receiver} was posted for nothing")
        return results


class StrictLinks:
    """The `Links` of one stage."""

    in_order = False

    def __init__(self, hall: Hall, stage: int) -> None:
        self.hall, self.stage = hall, stage

    def receive(self, line: Channel, shape: tuple[int, ...], dtype: torch.dtype) -> StrictReceive:
        assert line.receiver == self.stage
        with self.hall.changed:
            posted = self.hall.posted.setdefault(line, [])
            posted.append((shape, dtype))
            self.hall.changed.notify_all()
            return StrictReceive(self.hall, line, len(posted) - 1)

    def send(self, line: Channel, tensor: Tensor) -> None:
        assert line.sender == self.stage
        with self.hall.changed:
            sent = self.hall.sent.setdefault(line, [])
            posted = self.hall.posted.setdefault(line, [])
            place = len(sent)
            self.hall.wait(self.stage, f"send message {place} of {line.phase}", lambda: len(posted) > place)
            if posted[place] != (tuple(tensor.shape), tensor.dtype) or not tensor.is_contiguous() or tensor.requires_grad:
                shape, dtype = posted[place]
                raise Broken(f"message {place} of {line.phase} is {tuple(tensor.shape)} {tensor.dtype}, received as {shape} {dtype}")
            # A copy: whatever the sender does to it afterwards is its own affair.
            sent.append(tensor.clone())
            self.hall.changed.notify_all()

    def flush(self) -> None:
        """Nothing is held back."""

    def drain(self) -> None:
        """Nothing is under way: a send ends when it has been received."""

    def close(self) -> None:
        pass


class StrictReceive:
    def __init__(self, hall: Hall, line: Channel, place: int) -> None:
        self.hall, self.line, self.place = hall, line, place

    def wait(self) -> Tensor:
        with self.hall.changed:
            sent = self.hall.sent.setdefault(self.line, [])
            self.hall.wait(self.line.receiver, f"receive message {self.place} of {self.line.phase}", lambda: len(sent) > self.place)
            return sent[self.place]


class Dropping(Softmax):
    """A head of the user's own, with dropout in it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.dropout = nn.Dropout(0.3)

    def forward(self, y_TBW: Tensor) -> Tensor:
        return super().forward(self.dropout(y_TBW))


def model_of(layers: int, *, pooled: bool, tie: bool, **options: Any) -> Model:
    torch.manual_seed(1)
    encoder = Embedding(VOCABULARY, WIDTH, 0.1)
    lstm = LSTM(WIDTH, WIDTH, layers, dropout=0.3, weight_drop=0.2, **options)
    head: nn.Module = PooledSoftmax(WIDTH, CLASSES, "mean") if pooled else Dropping(WIDTH, VOCABULARY, tied=encoder.weight if tie else None)
    return Model(encoder, lstm, head, dropout_in=Dropout(0.2), dropout_out=Dropout(0.2)).double().train()


def batch_of(steps: int, lengths: list[int], number: int, *, pooled: bool) -> Batch:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randint(VOCABULARY, (steps, len(lengths)), generator=generator)
    targets = torch.randint(CLASSES, (len(lengths),) if pooled else (steps, len(lengths)), generator=generator)
    return Batch.of(inputs, targets, torch.tensor(lengths), pooled=pooled, step=number)


def outcome(model: Model, plan: Plan, batches: list[Batch], program: Program | None = None) -> dict[str, Tensor]:
    """The loss and the gradients of all stages, each with a copy of the model, as threads that meet in a hall."""
    program = program or program_for(plan, batches, backward=True)
    copies = [copy.deepcopy(model) for _ in range(plan.stages)]
    edges = [0, *plan.cuts, model.units]

    def work(place: int) -> Callable[[StrictLinks], Tensor]:
        stage = Stage(copies[place], edges[place], edges[place + 1], share_head=plan.shares_head)

        def carry_out(links: StrictLinks) -> Tensor:
            jobs = [
                Job(
                    batch.without(inputs=not stage.has_encoder, targets=not stage.scores),
                    stage.start(batch.lanes.shape[0]),
                    random.key(4, batch.step),
                    alpha=0.3,
                    beta=0.2,
                )
                for batch in batches
            ]
            return torch.stack([each.loss_sum + each.penalty for each in run(stage, plan, program, jobs, links, stage_number=place)]).sum()

        return carry_out

    losses = Hall(plan.stages).carry_out([work(place) for place in range(plan.stages)])
    found = {"loss": torch.stack(losses).sum()}
    for each in copies:
        for name, parameter in each.named_parameters():
            if parameter.grad is not None:
                found[name] = found.get(name, 0) + parameter.grad
    return found


@st.composite
def settings_of(draw: st.DrawFn) -> tuple[int, Plan, list[tuple[int, list[int]]]]:
    """Layers, a plan of two to four stages, and the steps and lengths of one or two batches."""
    layers = draw(st.integers(2, 4))
    stages = draw(st.integers(2, 4))
    plan = Plan(
        stages=stages,
        cuts=tuple(sorted(draw(st.permutations(range(1, layers + 2)))[: stages - 1])),
        chunk_steps=draw(st.none() | st.integers(1, 4)),
        micro_batches=draw(st.integers(1, 3)),
        recompute=draw(st.booleans()),
        share_head=draw(st.booleans()),
    )
    shapes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=2))
    return layers, plan, [(steps, draw(st.lists(st.integers(0, steps), min_size=lanes, max_size=lanes))) for steps, lanes in shapes]


@settings(max_examples=25)
@given(drawn=settings_of(), pooled=st.booleans(), tie=st.booleans(), learned=st.booleans())
def test_stages_that_meet_strictly_give_the_gradients_of_one(
    drawn: tuple[int, Plan, list[tuple[int, list[int]]]], pooled: bool, tie: bool, learned: bool
) -> None:
    layers, plan, shapes = drawn
    pooled = pooled and not plan.share_head
    model = model_of(layers, pooled=pooled, tie=tie and not pooled, learned_carry=learned)
    batches = [batch_of(steps, lengths, number, pooled=pooled) for number, (steps, lengths) in enumerate(shapes)]
    got, wanted = outcome(model, plan, batches), outcome(model, Plan.serial(), batches)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # Sums of some hundred terms, in another order, in float64.
        torch.testing.assert_close(got[name], tensor, rtol=1e-10, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")


PLAN = Plan(stages=2, cuts=(2,), chunk_steps=2)
UP, DOWN = Channel("F", 0, 1), Channel("B", 1, 0)


def swapped(program: Program, place: int, phase: Phase) -> Program:
    """The first two receives of a stage posted in the other order."""
    steps = list(program.stages[place])
    first, second = [at for at, step in enumerate(steps) if step.kind == "receive" and step.task.phase == phase][:2]
    steps[first], steps[second] = steps[second], steps[first]
    return with_stage(program, place, steps)


def with_stage(program: Program, place: int, steps: list[ProgramStep]) -> Program:
    rows = list(program.stages)
    rows[place] = tuple(steps)
    return replace(program, stages=tuple(rows))


def test_receives_in_another_order_do_not_fit() -> None:
    """The second chunk has one step, the first two."""
    batches = [batch_of(3, [3, 2], 0, pooled=False)]
    program = swapped(program_for(PLAN, batches, backward=True), 1, "F")
    with pytest.raises(Broken, match=r"message 0 of F is \(2, 2, 4\) torch.float64, received as \(1, 2, 4\)"):
        outcome(model_of(2, pooled=False, tie=False), PLAN, batches, program)


def test_receives_of_one_shape_in_another_order_mix_up_data() -> None:
    """Nothing in the messages tells them apart, so the result is wrong, which is why their order is derived from the sender's."""
    batches = [batch_of(4, [4, 3], 0, pooled=False)]
    model = model_of(2, pooled=False, tie=False)
    program = swapped(program_for(PLAN, batches, backward=True), 1, "F")
    assert not torch.allclose(outcome(model, PLAN, batches, program)["loss"], outcome(model, PLAN, batches)["loss"], rtol=1e-6)


def test_a_message_that_nobody_receives_does_not_hang() -> None:
    batches = [batch_of(4, [4, 3], 0, pooled=False)]
    program = program_for(PLAN, batches, backward=True)
    steps = list(program.stages[1])
    last = max(at for at, step in enumerate(steps) if step.kind == "receive")
    program = with_stage(program, 1, [step for step in steps[:last] if step.task != steps[last].task])
    with pytest.raises(Broken, match="deadlock: stage 0 waits to send message 1 of F"):
        outcome(model_of(2, pooled=False, tie=False), PLAN, batches, program)


def test_a_receive_that_nobody_sends_to_is_seen() -> None:
    with pytest.raises(Broken, match="posted for nothing"):
        Hall(2).carry_out([lambda links: None, lambda links: links.receive(UP, (1,), torch.float64)])


def test_stages_that_wait_for_each_other_do_not_hang() -> None:
    """Both send first and post their receives afterwards."""

    def below(links: StrictLinks) -> None:
        links.send(UP, torch.zeros(1))
        links.receive(DOWN, (1,), torch.float32).wait()

    def above(links: StrictLinks) -> None:
        links.send(DOWN, torch.zeros(1))
        links.receive(UP, (1,), torch.float32).wait()

    with pytest.raises(Broken, match="deadlock: stage 0 waits to send message 0 of F; stage 1 waits to send message 0 of B"):
        Hall(2).carry_out([below, above])


def test_another_dtype_does_not_fit() -> None:
    with pytest.raises(Broken, match="received as"):
        Hall(2).carry_out([lambda links: links.send(UP, torch.zeros(1)), lambda links: links.receive(UP, (1,), torch.float16).wait()])
