"""Every schedule of one stage computes what plain autograd over the whole window computes. float64, dropout on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from _small_models import KEY, VOCABULARY, WIDTH, batch_of, build

sys.path.insert(0, str(Path(__file__).parents[1] / "cells"))

from carrywave.data.batch import Batch
from carrywave.errors import PlanError
from carrywave.kernels.deferred_gradients import Deferred
from carrywave.model.model import Model
from carrywave.model.stage import Stage
from carrywave.plan.memory import Footprint
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.messages import Channel, Program
from carrywave.plan.schedule.schedule import Schedule, StageTask, serial
from carrywave.plan.units import BatchShape, Units
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec
from carrywave.step.gradients import Gradients
from carrywave.step.passes.executor import Pass
from carrywave.step.passes.jobs import BatchOutcome, PassJob, flatten, program_for
from carrywave.step.passes.timing import Arrived


def outcome_of(model: Model, batch: Batch, plan: Plan, **asked: float) -> tuple[BatchOutcome, dict[str, Tensor]]:
    model.zero_grad()
    program = program_for(plan, [batch], backward=True)
    [outcome] = Pass(Stage(model), plan, program, [PassJob(batch, model.start(len(batch.lengths)), KEY, **asked)]).run()  # type: ignore[arg-type]
    return outcome, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain(model: Model, batch: Batch) -> dict[str, Tensor]:
    """The whole window through the model at once, and torch's own backward."""
    model.zero_grad()
    y, state = model(batch.inputs, None, batch.lengths, KEY, fresh=batch.fresh, lanes=batch.lanes)
    assert batch.targets is not None
    loss, _ = model.head.loss(state.acc if model.pooled else y, batch.targets)  # type: ignore[operator]
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_schedule_that_starts_a_batch_before_its_carry_is_there_is_refused() -> None:
    def mixed(stages: int, chunks: Sequence[int], *, backward: bool) -> Schedule:
        forward = [StageTask("F", 0, chunk, part) for chunk in range(2) for part in range(2)]  # the second batch follows chunk by chunk
        return Schedule(((*forward, *(task._replace(phase="B") for task in reversed(forward))),), tuple(chunks))

    model, plan = build(pooled=False), Plan(chunk_steps=2)
    batches = [batch_of(4, [4, 4], pooled=False), batch_of(4, [4, 3], pooled=False, fresh=[False, False])]
    jobs = [PassJob(batches[0], model.start(2), KEY), PassJob(batches[1], None, KEY)]
    program = program_for(plan, batches, backward=True, scheduler=mixed)
    with pytest.raises(PlanError, match="starts a batch before the previous one has left its carry"):
        Pass(Stage(model), plan, program, jobs).run()


def weights_last(stages: int, chunks: Sequence[int], *, backward: bool) -> Schedule:
    """One stage that computes all weight gradients at the very end."""
    [row] = serial(chunks, backward=backward).stages
    return Schedule((tuple(sorted(row, key=lambda task: task.phase == "W")),), tuple(chunks))


def two_batches(model: Model, steps: int = 7) -> tuple[list[Batch], list[PassJob]]:
    """Two batches that follow each other; the second may be shorter."""
    batches = [batch_of(7, [7, 4, 6], pooled=False), batch_of(steps, [steps] * 3, pooled=False, fresh=[False, True, False])]
    return batches, [PassJob(batches[0], model.start(3), KEY), PassJob(batches[1], None, KEY)]


def serial_of(stages: int, chunks: Sequence[int], *, backward: bool, defer_weights: bool = True) -> Schedule:
    return serial(chunks, backward=backward, defer_weights=defer_weights)


@dataclass
class Noted(Gradients):
    """Notes which gradients become final, and during which task."""

    model: Model
    final: list[Tensor] = field(default_factory=list)
    pending: Callable[[Tensor], bool] | None = None

    def sum_early(self, pending: Callable[[Tensor], bool] | None = None) -> None:
        self.pending = pending

    def is_final(self, parameter: Tensor) -> None:
        assert self.pending is not None
        assert not self.pending(parameter)
        assert parameter.grad is not None
        self.final.append(parameter.grad.clone())


@pytest.mark.parametrize("scheduler", [serial_of, weights_last])
@pytest.mark.parametrize("steps", [7, 3], ids=["chunks in both", "one chunk in the last"])
def test_a_gradient_is_final_once_nobody_will_add_to_it(scheduler: Callable[..., Schedule], steps: int) -> None:
    """Also if weight gradients of several micro-batches come after the last backward, and if the last micro-batch defers none."""
    model, plan = build(pooled=False), Plan(chunk_steps=3)
    batches, jobs = two_batches(model, steps)
    noted = Noted(model)
    model.zero_grad()
    Pass(Stage(model), plan, program_for(plan, batches, backward=True, scheduler=scheduler), jobs, gradients=noted).run()
    final = [p.grad for p in model.parameters() if p.grad is not None and any(torch.equal(p.grad, each) for each in noted.final)]
    assert len(noted.final) == len(final)  # each once, and with its final value
    if scheduler is weights_last or steps == 7:
        matrices = [p for name, p in model.named_parameters() if name.startswith(("lstm.weight", "head"))]
        assert all(any(p.grad is each for each in final) for p in matrices if p.ndim == 2)
    else:
        assert not final  # the only deferred ones were computed before the last backward
    assert noted.pending is not None
    assert not any(noted.pending(p) for p in model.parameters())


@dataclass
class Listening:
    """Links that have every message at once, and note what is sent and when it is passed to the device."""

    in_place: ClassVar[bool] = False
    told: list[str] = field(default_factory=list)

    def receive(self, line: Channel, shape: tuple[int, ...], dtype: torch.dtype) -> Arrived:
        return Arrived(torch.zeros(shape, dtype=dtype))

    def send(self, line: Channel, tensor: Tensor) -> None:
        self.told.append("send")

    def flush(self) -> None:
        self.told.append("flush")

    def arranged(self, program: Program) -> Program:
        return program

    def begin(self, program: Program, messages: object) -> None:
        """Nothing needs room."""

    def end(self) -> None:
        """Nothing is in flight."""


def test_the_last_gradient_is_on_its_way_before_weight_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, links = build(pooled=False), batch_of(6, [6, 6, 6], pooled=False), Listening()
    plan = Plan(stages=2, cuts=(2,), chunk_steps=3)
    flush = Deferred.flush

    def noting(self: Deferred, ready: Callable[[Tensor], None] | None = None) -> None:
        links.told.append("weights")
        flush(self, ready)

    monkeypatch.setattr(Deferred, "flush", noting)
    stage, program = Stage(model, 2, model.units), program_for(plan, [batch], backward=True)
    Pass(stage, plan, program, [PassJob(batch, stage.start(3), KEY)], links, stage_number=1).run()
    assert links.told[-5:] == ["flush", "send", "flush", "weights", "flush"]
    assert links.told.count("weights") == 1


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("recompute", [True, "twice"])
def test_recomputation_keeps_what_the_planner_counts(recompute: Any, beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured before every backward: what is in the memory of all chunks, each piece once, and at its most."""
    spec = Spec.model_validate({"model": {"hidden": WIDTH, "layers": 2, "embedding": WIDTH}, "train": {"precision": "fp64"}})
    units = Units.of(spec, DataFacts(vocabulary=VOCABULARY))
    chunk_steps, steps, lanes = 2, 32, 3
    plan = Plan(chunk_steps=chunk_steps, recompute=recompute)
    planned = Footprint(plan, BatchShape(lanes, steps), units).memory(0, 0, len(units))
    seen: list[int] = []
    backward = Pass._backward

    def looking(self: Pass, task: StageTask) -> None:
        backward(self, task)
        states = [state for kept in self.kept.values() for state in (kept.entered, kept.left) if state is not None]
        held = [t for kept in self.kept.values() for t in (kept.y, kept.root)] + [t for state in states for t in flatten(state)]
        held += [state.tail for state in states]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held if t is not None}
        seen.append(sum(storages.values()) + lanes * steps * 8)  # and the tokens, of which chunks are views

    monkeypatch.setattr(Pass, "_backward", looking)
    outcome_of(build(pooled=False), batch_of(steps, [steps] * lanes, pooled=False), plan, beta=beta)
    assert len(seen) == steps // chunk_steps
    # The state of the lanes between steps, and that of the running chunk, are counted but not in what is measured; the last output, kept
    # for `beta` as one more part of a carry of four, is not counted.
    around = 2 * lanes * 4 * WIDTH * 8
    assert max(seen) <= (planned.activations + planned.carries) * (1.25 if beta else 1.0)
    assert max(seen) >= (planned.activations + planned.carries - around) * 0.8
