"""One trial of a user's own modules: do they give the same answer when a batch is cut as this plan cuts it?

Before the first batch that a plan cuts into more pieces than any before, copies of this worker's stage take the batch whole and in pieces,
through the same code as the step, with the same keyed dropout. Loss, count and gradients must be equal, up to rounding. Whatever the reason
for a difference (a module looks at other steps or lanes, takes statistics over the batch, counts its calls, draws random numbers of its
own), it shows; what raises on a piece is refused with its message. Nothing is inferred from a module's class, code or attributes. Modules
of ours, those of torch that work step by step, and those whose owner has promised it (`splittable = True`) are not tried.

A worker of a pipeline tries what it holds: random numbers stand in for what comes from the stage before, and a weighted sum of its outputs
for the loss. Where new sequences begin inside a lane (resets), the batch must give the same as with a lane for each sequence.

Shapes: T time, B lane, W width.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from carrywave.data.batch import IGNORED, Batch
from carrywave.errors import PlanError, one_line
from carrywave.kernels.lengths import real_steps
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.over_time.front import shorter
from carrywave.model.over_time.global_norm import GlobalNorm
from carrywave.model.stage import Stage
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.process_state import generators, set_generators
from carrywave.parallel.world import raise_on_all
from carrywave.plan.plan import Plan
from carrywave.step.checks.stepwise import own_modules
from carrywave.step.passes.executor import Pass
from carrywave.step.passes.jobs import PassJob, program_for

LANE_STEPS = 1 << 16  # most steps of all lanes that are tried, so that a trial takes about as long as a few steps
DOUBLE_UP_TO = 1 << 26  # most parameters to copy as float64; larger models keep their dtype
# Relative: a module may compute in float32 inside, where sums in another order are off by some 1e-6; half precision has 8 or 11 bits.
IN_DOUBLE, IN_SINGLE, IN_HALF = 1e-5, 1e-3, 2**-4


@dataclass(frozen=True)
class Answer:
    """What a batch comes to: sums over its targets, and the gradients of the loss by the names of the parameters."""

    loss: float
    count: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Cut:
    """One way of a plan to cut a batch."""

    plan: Plan
    piece: str  # in words
    remedy: str


class SplitTrial:
    """The trials of one worker's stage. `mesh`: those who share a step."""

    def __init__(self, model: Model | OpaqueModel, stage: Stage | OpaqueModel, mesh: Mesh, precision: str) -> None:
        self.model, self.stage, self.mesh, self.precision = model, stage, mesh, precision
        self._most: dict[bool, tuple[int, int, int]] = {}  # chunks, lane groups and resets, in training and in evaluation
        self._last: object = None  # the shape of the last batch
        plan = mesh.plan
        self._cuts_anything = plan.workers > 1 or plan.micro_batches > 1 or plan.chunk_steps is not None or bool(plan.recompute)

    def has_to_look(self, batches: Sequence[Batch]) -> bool:
        """True if this plan or these batches cut anything."""
        return self._cuts_anything or any(batch.resets is not None for batch in batches)

    def before(self, batches: Sequence[Batch], keys: Sequence[Tensor], *, training: bool) -> None:
        """Refuse a plan that would change what the user's modules compute. Collective: every rank calls it with batches of one kind."""
        for batch, key in zip(batches, keys, strict=True):
            last, self._last = self._last, (training, batch.inputs.shape[:2], batch.part_of, batch.resets is None)
            if last == self._last:
                continue
            before = self._most.get(training, (1, 1, 0) if not self.mesh.plan.recompute else (0, 0, 0))
            kind = self._chunks(batch), self._groups(batch.cells[1] // batch.steps), int(batch.resets is not None)
            if all(new <= old for new, old in zip(kind, before, strict=True)):
                continue
            chunks, groups, resets = (max(pair) for pair in zip(kind, before, strict=True))
            self._most[training] = chunks, groups, resets
            # Replicas that are all given the whole batch find the same. Others wait for each other, also one whose modules are known.
            alike = batch.part_of is None and self.mesh.plan.stages == 1
            with nullcontext() if alike else raise_on_all(self.mesh.world, same_message=True, no_timeout=True):
                own = own_modules(self.model)
                why = self._why_not(batch, key, " or ".join(own), training=training) if own else None
                if why is not None:
                    raise PlanError(why)

    def _chunks(self, batch: Batch) -> int:
        return 1 if self.model.reads_whole else self.mesh.plan.chunks(batch.steps)

    def _groups(self, lanes: int) -> int:
        return min(lanes, self.mesh.plan.replicas * self.mesh.plan.micro_batches)

    def _why_not(self, batch: Batch, key: Tensor, who: str, *, training: bool) -> str | None:
        """The first difference between the whole batch and its pieces, as a message; None if there is none."""
        lanes = batch.lanes.shape[0]
        batch = batch.take(0, min(lanes, max(2 * self._groups(lanes), LANE_STEPS // batch.steps)), pooled=self.model.pooled)
        batch = stand_in(self.stage, batch.to(self.mesh.device))
        if lanes == 1 and self._groups(batch.cells[1] // batch.steps) > 1:
            batch = doubled(batch, self.model.pooled)
        with unseen(self.mesh.device):
            try:
                twin(self.stage, self.stage.dtype)
            except Exception as error:
                what = one_line(error, 300)
                return f"{who} cannot be copied for a trial ({what}); set splittable = True in it if no step or lane needs another"
            for dtype, precision, tolerance in self._ways():
                try:
                    whole = self._answer(batch, key, Plan(), dtype, precision, training=training)
                except Exception:
                    continue  # in another dtype it may work; if not, the step says so in the module's own words
                for cut in self._cuts(batch):
                    try:
                        parts = self._answer(batch, key, cut.plan, dtype, precision, training=training)
                    except Exception as error:
                        return f"{who} takes the whole batch but not {cut.piece}: {one_line(error)}"
                    if (found := difference(whole, parts, tolerance)) is not None:
                        return f"{who} gives {found} on {cut.piece} alone; {cut.remedy}"
                if batch.resets is not None and batch.history is None:
                    # Without dropout, whose masks are another lane's there.
                    one, other = (self._answer(each, key, Plan(), dtype, precision, evaluates=True) for each in (batch, apart(batch)))
                    if (found := difference(one, other, tolerance)) is not None:
                        return f"{who} gives {found} on each sequence alone; make it work step by step, or use no resets"
                return None
        return None

    def _ways(self) -> Iterator[tuple[torch.dtype, str, float]]:
        """Dtypes and precisions to try one after the other, until the module works in one."""
        if sum(parameter.numel() for parameter in self.stage.parameters()) <= DOUBLE_UP_TO:
            yield torch.float64, "fp64", IN_DOUBLE
        yield self.stage.dtype, "fp32", IN_SINGLE
        yield self.stage.dtype, self.precision, IN_HALF

    def _cuts(self, batch: Batch) -> Iterator[Cut]:
        """How the plan cuts a batch, along one axis at a time, which tells what is to blame."""
        plan, lanes = self.mesh.plan, batch.lanes.shape[0]
        same = Plan(recompute=plan.recompute)
        # Of a batch of which others have other lanes, these stand for all: they are cut as well.
        groups = min(lanes, max(2, plan.micro_batches)) if batch.part_of is not None and self._groups(lanes) > 1 else self._groups(lanes)
        chunks = self._chunks(batch)
        if chunks > 1:
            piece = f"{plan.chunk_steps} of {batch.steps} steps"
            yield Cut(replace(same, chunk_steps=plan.chunk_steps), piece, "make it work step by step, or remove plan.chunk_steps")
        if groups > 1:
            yield Cut(replace(same, micro_batches=groups), f"1 of {groups} groups of lanes", "make it work lane by lane, or use one device")
        if plan.recompute and chunks == groups == 1:
            yield Cut(same, "a second run", "let it keep no state and draw no numbers, or remove plan.recompute")

    def _answer(
        self, batch: Batch, key: Tensor, plan: Plan, dtype: torch.dtype, precision: str, *, training: bool = True, evaluates: bool = False
    ) -> Answer:
        """What a copy of the stage makes of a copy of a batch. `evaluates`: in evaluation mode, but with gradients."""
        stage = twin(self.stage, dtype)
        if evaluates or not training:
            stage.eval()
        batch = batch.each_tensor(lambda _, tensor: tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True))
        program = program_for(plan, [batch], backward=training, uncut_time=self.model.reads_whole)
        job = PassJob(batch, stage.start(batch.lanes.shape[0], self.mesh.device), key.to(self.mesh.device), precision=precision)
        with torch.set_grad_enabled(training):
            [outcome] = Pass(stage, plan, program, [job]).run()
        gradients = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
        return Answer(float(outcome.loss_sum), float(outcome.count), gradients)


def difference(whole: Answer, parts: Answer, tolerance: float) -> str | None:
    """What differs first by more than rounding, and by how much."""
    if abs(whole.count - parts.count) > tolerance * abs(whole.count):
        return f"{parts.count:g} targets instead of {whole.count:g}"
    apart = abs(whole.loss - parts.loss)
    if math.isfinite(whole.loss) and not apart <= tolerance * abs(whole.loss):
        return f"a loss {_off(apart, abs(whole.loss))}"
    norms = {name: float(gradient.norm()) for name, gradient in whole.gradients.items()}
    largest = max(norms.values(), default=0.0)
    for name in {**whole.gradients, **parts.gradients}:
        one, other = (each.gradients.get(name, torch.zeros(())).cpu() for each in (whole, parts))
        apart, size = float((one - other).norm()), norms.get(name, 0.0)
        if apart > tolerance * (size + 0.1 * largest):  # some gradients are zero but for rounding, such as a bias's before a norm
            return f"a gradient of {name} {_off(apart, size)}"
    return None


def _off(apart: float, size: float) -> str:
    return f"that is {100 * apart / size:.2g}% off" if size else "that is not 0"


def twin(stage: Stage | OpaqueModel, dtype: torch.dtype) -> Stage | OpaqueModel:
    """A copy of a stage that shares nothing with it, and has a head."""
    # Results that a module keeps belong to a graph, which torch does not copy.
    kept = [value for module in stage.modules() for value in vars(module).values() if isinstance(value, Tensor) and not value.is_leaf]
    made = copy.deepcopy(stage, {id(value): value.detach().clone() for value in kept}).to(dtype)
    for norm in (each for each in made.modules() if isinstance(each, GlobalNorm)):
        norm.eval()  # in a step, it knows the other pieces of a batch
    if isinstance(made, Stage):
        made.lstm.kernel = "auto"
        if not made.has_encoder:
            made.has_front, made.stride = False, 1
        if not made.has_head:
            made.head, made.has_head, made.pooled, made.accumulates, made.whole_head, made.past_steps = (
                WeightedSum(),
                True,
                False,
                False,
                False,
                0,
            )
    return made


class WeightedSum(nn.Module):
    """A head for a stage that has none: a different number for each output, so that nothing cancels."""

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The targets are the weights, NaN in padding."""
        return (y * target.nan_to_num()).sum(), (~target.isnan()).sum()


def stand_in(stage: Stage | OpaqueModel, batch: Batch) -> Batch:
    """The batch, with random numbers for the inputs and targets that a stage of a pipeline has not."""
    if isinstance(stage, Stage) and not stage.has_encoder:
        steps = shorter(batch.steps, stage.stride)
        lengths = shorter(batch.lengths, stage.stride)
        x = torch.where(real_steps(lengths, steps), _numbers(steps, len(lengths), stage.width_in).to(lengths.device), 0.0)
        batch = replace(batch, inputs=x, lengths=lengths, real=-1)
    if not stage.has_head:
        targets = _numbers(shorter(batch.steps, stage.stride), len(batch.lengths), stage.width_out).to(batch.lengths.device)
        batch = replace(batch, targets=targets, weights=None, history=None, linear=None)
    return batch


def _numbers(steps: int, lanes: int, width: int) -> Tensor:
    return torch.rand(steps, lanes, width, generator=torch.Generator().manual_seed(steps)) * 2 - 1


def doubled(batch: Batch, pooled: bool) -> Batch:
    """The only lane of a batch, and the same backwards, so that there are lanes to cut."""
    end = int(batch.lengths)
    by_lane = {"lengths", "fresh", "lanes", "sequence", "offset", "linear"} | ({"targets"} if pooled else set())

    def both(name: str, tensor: Tensor) -> Tensor:
        if name in by_lane or tensor.dim() == 1:
            return torch.cat([tensor, tensor + (name == "lanes")])
        return torch.cat([tensor, torch.cat([tensor[:end].flip(0), tensor[end:]])], 1)

    return replace(batch.each_tensor(both), real=-1)


def apart(batch: Batch) -> Batch:
    """A batch with a lane for each of the sequences that begin inside the lanes of this one."""
    assert batch.resets is not None
    spans: list[tuple[int, int, int]] = []  # lane, first step, end
    for lane, length in enumerate(batch.lengths.tolist()):
        edges = [0, *(step for step in batch.resets[:, lane].nonzero().flatten().tolist() if 0 < step < length), length]
        spans += [(lane, first, end) for first, end in pairwise(edges) if first < end]

    def cut(tensor: Tensor, padding: float = 0.0) -> Tensor:
        return pad_sequence([tensor[first:end, lane] for lane, first, end in spans], padding_value=padding)

    targets = batch.targets
    if targets is not None:
        targets = cut(targets, math.nan if targets.is_floating_point() else IGNORED)
    weights = None if batch.weights is None else cut(batch.weights)
    return Batch.of(cut(batch.inputs), targets, [end - first for _, first, end in spans], pooled=False, weights=weights)


@contextmanager
def unseen(device: torch.device) -> Iterator[None]:
    """Leave generators as they are, and warnings and compilation to the step."""
    states = generators(device)
    try:
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")
            yield
    finally:
        set_generators(states, device)
