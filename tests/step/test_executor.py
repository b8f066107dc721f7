"""Every schedule of one stage computes what plain autograd over the whole window computes. float64, dropout on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from carrywave.data.batch import IGNORED, Batch
from carrywave.errors import PlanError
from carrywave.kernels import random
from carrywave.model.dropout import Dropout
from carrywave.model.encoders import Embedding
from carrywave.model.heads import PooledSoftmax, Softmax
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.model.stage import Stage
from carrywave.plan.cost.memory import Split, one_micro_batch, stage_memory
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.schedule import Schedule, StageTask
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec
from carrywave.step import executor
from carrywave.step.executor import BatchOutcome, Job, program_for, run
from carrywave.step.micro_batches import flatten

VOCABULARY, WIDTH, CLASSES = 11, 6, 3
KEY = random.key(3, 1, 4)
# Sums of some hundred terms, in another order, in float64.
TOLERANCE = {"rtol": 1e-10, "atol": 1e-13}


def build(*, pooled: bool, layers: int = 2, **options: object) -> Model:
    torch.manual_seed(0)
    lstm = LSTM(WIDTH, WIDTH, layers, dropout=0.3, **options)  # type: ignore[arg-type]
    head: nn.Module = PooledSoftmax(WIDTH, CLASSES, "mean") if pooled else Softmax(WIDTH, VOCABULARY)
    return Model(Embedding(VOCABULARY, WIDTH, 0.1), lstm, head, dropout_in=Dropout(0.2), dropout_out=Dropout(0.2)).double().train()


def batch_of(steps: int, lengths: list[int], *, pooled: bool, fresh: list[bool] | None = None) -> Batch:
    generator = torch.Generator().manual_seed(steps + sum(lengths))
    lanes = len(lengths)
    inputs = torch.randint(VOCABULARY, (steps, lanes), generator=generator)
    padded = torch.arange(steps)[:, None] >= torch.tensor(lengths)
    if pooled:
        targets = torch.randint(CLASSES, (lanes,), generator=generator)
        targets[torch.tensor(lengths) == 0] = IGNORED
    else:
        targets = torch.randint(VOCABULARY, (steps, lanes), generator=generator)
        targets[padded] = IGNORED
    inputs[padded] = 0
    return Batch(
        inputs=inputs,
        targets=targets,
        lengths=torch.tensor(lengths),
        fresh=torch.tensor(fresh or [True] * lanes),
        lanes=torch.arange(lanes) + 40,
        sequence=torch.arange(lanes),
        offset=torch.zeros(lanes, dtype=torch.int64),
        real=sum(lengths),
    )


def outcome_of(model: Model, batch: Batch, plan: Plan, **asked: float) -> tuple[BatchOutcome, dict[str, Tensor]]:
    model.zero_grad()
    program = program_for(plan, [batch], backward=True)
    [outcome] = run(Stage(model), plan, program, [Job(batch, model.start(len(batch.lengths)), KEY, **asked)])  # type: ignore[arg-type]
    return outcome, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain(model: Model, batch: Batch) -> dict[str, Tensor]:
    """The whole window through the model at once, and torch's own backward."""
    model.zero_grad()
    y, state = model(batch.inputs, None, batch.lengths, KEY, fresh=batch.fresh, lanes=batch.lanes)
    assert batch.targets is not None
    loss, _ = model.head.loss(state.acc if model.pooled else y, batch.targets)  # type: ignore[operator]
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


plans = st.builds(
    Plan,
    chunk_steps=st.one_of(st.none(), st.integers(1, 9)),
    micro_batches=st.integers(1, 3),
    recompute=st.booleans(),
)


@settings(max_examples=25, deadline=None)
@given(plan=plans, pooled=st.booleans(), lengths=st.lists(st.integers(0, 7), min_size=3, max_size=5))
def test_any_plan_gives_the_gradients_of_plain_autograd(plan: Plan, pooled: bool, lengths: list[int]) -> None:
    lengths[0] = 7
    model, batch = build(pooled=pooled), batch_of(7, lengths, pooled=pooled)
    expected = plain(model, batch)
    outcome, gradients = outcome_of(model, batch, plan)
    torch.testing.assert_close(outcome.loss_sum, expected.pop("loss"), **TOLERANCE)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], msg=lambda text, name=name: f"{name}: {text}", **TOLERANCE)


@pytest.mark.parametrize("options", [{"locked": True, "weight_drop": 0.4}, {"layer_norm": True}, {"learned_carry": True}, {"proj_size": 3}])
def test_options_survive_chunks(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    width = int(options.get("proj_size", WIDTH))  # type: ignore[call-overload]
    lstm = LSTM(WIDTH, WIDTH, 2, dropout=0.3, **options)  # type: ignore[arg-type]
    model = Model(Embedding(VOCABULARY, WIDTH), lstm, Softmax(width, VOCABULARY)).double().train()
    batch = batch_of(9, [9, 4, 0, 7], pooled=False)
    expected = plain(model, batch)
    outcome, gradients = outcome_of(model, batch, Plan(chunk_steps=2, micro_batches=2))
    torch.testing.assert_close(outcome.loss_sum, expected.pop("loss"), **TOLERANCE)
    for name in expected:
        torch.testing.assert_close(gradients[name], expected[name], msg=lambda text, name=name: f"{name}: {text}", **TOLERANCE)


def test_the_gradient_of_the_carry_matters() -> None:
    """A chunked backward without it is far off: the comparison above can fail."""
    model, batch = build(pooled=False), batch_of(8, [8, 8, 8], pooled=False)
    whole = outcome_of(model, batch, Plan.serial())[1]
    model.zero_grad()
    stage, plan = Stage(model), Plan.serial()
    state = model.start(3)
    for first in (0, 4):
        part = batch_of(8, [8, 8, 8], pooled=False)
        half = Batch(
            part.inputs[first : first + 4],
            part.targets[first : first + 4],  # type: ignore[index]
            torch.full((3,), 4),
            part.fresh & (first == 0),
            part.lanes,
            part.sequence,
            part.offset,
            real=12,
        )
        state = run(stage, plan, program_for(plan, [half], backward=True), [Job(half, state, None)])[0].state
    name = "lstm.weight_hh_l0"
    cut = dict(model.named_parameters())[name].grad
    assert cut is not None
    assert float((cut - whole[name]).norm() / whole[name].norm()) > 1e-2


@pytest.mark.parametrize("layer_norm", [False, True])
def test_regularisation_is_the_same_over_chunks_and_by_hand(layer_norm: bool) -> None:
    model, batch = build(pooled=False, layer_norm=layer_norm), batch_of(7, [7, 3, 5], pooled=False)
    whole, expected = outcome_of(model, batch, Plan.serial(), alpha=2.0, beta=1.0)
    chunked, gradients = outcome_of(model, batch, Plan(chunk_steps=3), alpha=2.0, beta=1.0)
    torch.testing.assert_close(chunked.penalty, whole.penalty, **TOLERANCE)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], **TOLERANCE)
    model.eval()
    with torch.no_grad():
        y, _ = model(batch.inputs, None, batch.lengths, fresh=batch.fresh)
    hand = sum(
        2.0 * float(y[t, b].square().mean()) + (1.0 * float((y[t, b] - y[t - 1, b]).square().mean()) if t else 0.0)
        for b, length in enumerate([7, 3, 5])
        for t in range(length)
    )
    program = program_for(Plan.serial(), [batch], backward=False)
    [quiet] = run(Stage(model), Plan.serial(), program, [Job(batch, model.start(3), alpha=2.0, beta=1.0)])
    assert math.isclose(float(quiet.penalty), hand, rel_tol=1e-12)


def test_windows_of_35_equal_one_window() -> None:
    """One pass over a stream in windows, the carry kept, gives the outputs of one long window."""
    model = build(pooled=False).eval()
    batch = batch_of(100, [100, 100], pooled=False)
    whole, _ = model(batch.inputs)
    state, parts = model.start(2), []
    for first in range(0, 100, 35):
        y, state = model(batch.inputs[first : first + 35], state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0.0, atol=1e-12)


def test_a_schedule_that_starts_a_batch_before_its_carry_is_there_is_refused() -> None:
    def mixed(stages: int, chunks: Sequence[int], *, backward: bool) -> Schedule:
        forward = [StageTask("F", 0, chunk, part) for chunk in range(2) for part in range(2)]  # the second batch follows chunk by chunk
        return Schedule(((*forward, *(task._replace(phase="B") for task in reversed(forward))),), tuple(chunks))

    model, plan = build(pooled=False), Plan(chunk_steps=2)
    batches = [batch_of(4, [4, 4], pooled=False), batch_of(4, [4, 3], pooled=False, fresh=[False, False])]
    jobs = [Job(batches[0], model.start(2), KEY), Job(batches[1], None, KEY)]
    program = program_for(plan, batches, backward=True, scheduler=mixed)
    with pytest.raises(PlanError, match="starts a batch before the previous one has left its carry"):
        run(Stage(model), plan, program, jobs)


def test_evaluation_sees_every_output_and_makes_no_graph() -> None:
    model = build(pooled=False).eval()
    batch = batch_of(7, [7, 5, 2], pooled=False)
    seen: list[Tensor] = []
    plan = Plan(chunk_steps=3)
    job = Job(batch, model.start(3), observe=lambda out, target: seen.append(out))
    [outcome] = run(Stage(model), plan, program_for(plan, [batch], backward=False), [job])
    assert [len(out) for out in seen] == [3, 3, 1]
    assert not outcome.loss_sum.requires_grad
    assert float(outcome.count) == 14


@pytest.mark.parametrize("chunk_steps", [2, 4])
def test_recomputation_keeps_what_the_planner_counts(chunk_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured when all chunks have gone forward and none has come back: what is in their memory, each piece once."""
    spec = Spec.model_validate({"model": {"hidden": WIDTH, "layers": 2, "embedding": WIDTH}, "train": {"precision": "fp64"}})
    units = Units.of(spec, DataFacts(vocabulary=VOCABULARY))
    plan, steps, lanes = Plan(chunk_steps=chunk_steps, recompute=True), 16, 3
    chunks = steps // chunk_steps
    split = Split(lanes, chunk_steps, steps, lanes, put_off=False, recompute=True, share_head=False, reduced=False)
    planned = stage_memory(units, 0, len(units), one_micro_batch(chunks, put_off=False), split)
    seen: list[int] = []
    backward = executor._Run._backward

    def looking(self: executor._Run, task: StageTask) -> None:
        if not seen:
            assert len(self.kept) == chunks
            states = [state for kept in self.kept.values() for state in (kept.entered, kept.left) if state is not None]
            held = [t for kept in self.kept.values() for t in (kept.y, kept.root)] + [t for state in states for t in flatten(state)]
            storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held if t is not None}
            seen.append(sum(storages.values()) + lanes * steps * 8)  # and the tokens, of which chunks are views
        backward(self, task)

    monkeypatch.setattr(executor._Run, "_backward", looking)
    outcome_of(build(pooled=False), batch_of(steps, [steps] * lanes, pooled=False), plan)
    assert seen[0] <= planned.activations + planned.carries
