"""`Trainer` does one optimizer step: batches in, loss out. The loop around it may be ours or the user's, on one worker or on many.

A step sums the loss over all its batches, differentiates the sum, adds up gradients over the workers, divides once by the
number of real targets in all of them, clips, and updates. The state of the lanes goes from batch to batch, cut off from the graph.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.data.batch import Batch
from carrywave.errors import PlanError, UserError
from carrywave.kernels import random
from carrywave.kernels.choice import check
from carrywave.model.holding import Shared, hold, shared
from carrywave.model.model import Model
from carrywave.model.stage import Stage
from carrywave.model.state import State
from carrywave.model.whole import Whole
from carrywave.parallel import gradients, pipeline
from carrywave.parallel.capture import Capture
from carrywave.parallel.gather import collect, spread
from carrywave.parallel.gradients import Reduced, Reducer
from carrywave.parallel.launched import launched
from carrywave.parallel.meeting import for_all
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.precision import configure, parameter_dtype
from carrywave.parallel.slices import flatten, unflatten
from carrywave.parallel.world import exchange, join
from carrywave.plan.plan import Plan, check_head, resolve
from carrywave.plan.schedule import wavefront
from carrywave.spec.load import parse
from carrywave.spec.spec import PlanSpec, Spec, TrainSpec
from carrywave.train import optimizer as optimizers
from carrywave.train.scaler import Scaler

Loss = Callable[[Any, Tensor], tuple[Tensor, Tensor]]  # (what the module gave, targets) -> sum over targets, their number


@dataclass(frozen=True)
class StepResult:
    """Sums of one optimizer step over all workers, still on the device."""

    loss_sum: Tensor
    count: Tensor
    norm: Tensor  # of the gradient, before clipping
    finite: Tensor  # bool: loss and gradient are numbers (an overflow that the fp16 scaler skips counts as finite)
    votes: Tensor  # [2]: how many workers were asked to stop by then, as `Trainer.votes` said it


class Trainer:
    """Model, optimizer and the state of the lanes, for one worker's place in a plan.

    `model` is a `Model`, or any nn.Module with a `loss` (replicas only). `spec` is the train section of a spec, or a mapping of
    its keys; without `device`, it trains where the model is. `plan` is a `Plan`, or a mapping of the keys of a spec's plan; left out,
    every worker that a launcher started is a replica. All workers are given the same whole batches, and each takes its own
    lanes and layers of them. All start from the weights of rank 0.

    An `optimizer` of the user's own takes the place of the spec's, and its learning rate is the user's to set. `keep_state`
    hands the carry from step to step, to lanes that are not fresh; it is left out where the head pools or the model reads both ways.
    On CUDA, steps of a shape that comes again are recorded as CUDA graphs; CARRYWAVE_CAPTURE=0 switches that off.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: TrainSpec | Spec | Mapping[str, Any] | None = None,
        *,
        plan: Plan | PlanSpec | Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        keep_state: bool | None = None,
        loss: Loss | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.model = model if isinstance(model, Model | Whole) else Whole(model, loss)
        whole = self.model.pooled or self.model.reads_whole
        if keep_state and whole:
            raise UserError("a head that pools, or a model that reads both ways, reads whole sequences; leave keep_state out")
        self.spec = _train_spec(spec)
        self.mesh = mesh or _mesh_of(plan, self.model, device)
        self.plan, self.device = self.mesh.plan, self.mesh.device
        self._check_plan()
        configure(self.spec.precision)
        self.stage = self._take_place()
        self.optimizer = self._own(optimizer) if optimizer else optimizers.build(self.spec, self.named, self.device)
        self.scaler = Scaler(self.device) if self.spec.precision == "fp16" else None
        self.keep_state = not whole if keep_state is None else keep_state
        self.state: State | None = None
        self._kept_lanes: int | None = None  # of all workers together
        self.scheduler: pipeline.Scheduler = wavefront
        self.votes = (0.0, 0.0)  # of this worker, for the next step: to stop as after Ctrl-C, as after SIGTERM
        self._compared = False  # whether all workers have been seen to be given the same batch
        self._uncounted = 0  # batches so far that had no place of their own in an epoch
        known = optimizer is None and self.spec.optimizer != "ntasgd" and self.spec.precision != "fp64"
        recordable = self.device.type == "cuda" and known and self.plan.workers == 1
        wanted = os.environ.get("CARRYWAVE_CAPTURE", "1") != "0"
        self._capture = Capture(self._step) if recordable and wanted else None

    def step(self, *batches: Batch) -> Tensor:
        """One optimizer step over these batches (several: accumulated); returns the mean loss over their real targets."""
        result = self.update(*batches)
        return (result.loss_sum / result.count.clamp(min=1e-30)).to(torch.float32)

    def update(self, *batches: Batch) -> StepResult:
        """One optimizer step, with its sums; they last until the next one."""
        if not self.model.training:
            self.model.train()
        if not batches:
            raise UserError("a step needs a batch; make one with Batch.of(inputs, targets)")
        for batch in batches:
            if not isinstance(batch, Batch):
                raise UserError(
                    f"a step takes batches, one after the other, got a {type(batch).__name__}; make them with Batch.of(inputs, targets)"
                )
        keys = [random.key(self.spec.seed, batch.epoch, self._place(batch)) for batch in batches]
        if self.plan.workers > 1 and not self._compared:
            self._compare(batches[0])
        if self.keep_state:
            self._check_lanes(batches)
        own = [self._own_part(batch) for batch in batches]
        if self.keep_state:
            lanes = own[0].lanes.shape[0]
            if self.state is None or _lanes(self.state, lanes) != lanes:
                self.state = self.stage.start(lanes, self.device).detach()
        state = flatten(self.state) if self.keep_state and self.state is not None else None
        if self._capture is not None:
            result, left = self._capture(own, keys, state)
        else:
            result, left = self._step(own, [key.to(self.device) for key in keys], state)
        if left is not None:
            self.state = unflatten(left)
        return result

    def _compare(self, batch: Batch) -> None:
        """Refuse a program that gives each worker a batch of its own, as other libraries want it: lanes would be lost. Once is enough."""
        self._compared = True
        if batch.whole is not None:
            return
        parts = [tensor for tensor in (batch.inputs, batch.targets, batch.lengths) if tensor is not None]
        digest = hashlib.sha256(b"".join(part.detach().cpu().contiguous().numpy().tobytes() for part in parts)).hexdigest()
        for rank, theirs in enumerate(said := exchange(self.mesh.world, digest)):
            if theirs != said[0]:
                raise for_all(
                    UserError(
                        f"rank {rank} was given another batch than rank 0; give every worker the same whole batch, it takes its own lanes"
                    )
                )

    def _own_part(self, batch: Batch) -> Batch:
        """This worker's lanes of a batch, and of those what its stage reads, on its device."""
        if batch.whole is None and self.plan.replicas > 1:
            batch = batch.take(*self.mesh.share().bounds(batch.lanes.shape[0]), pooled=self.model.pooled)
        if self.plan.stages > 1:
            batch = batch.without(inputs=not self.stage.has_encoder, targets=not self.stage.scores)
        return batch if batch.lengths.device == self.device else batch.to(self.device)

    def _check_lanes(self, batches: Sequence[Batch]) -> None:
        """A batch of another number of lanes than the one before it must start all of them anew; each replica and slice has one."""
        before = self._kept_lanes
        least = self.plan.replicas * self.plan.slices
        for batch in batches:
            lanes = batch.cells[1] // batch.steps
            if lanes < least and self.plan.workers > 1:
                raise PlanError(
                    f"{lanes} lanes that keep their state cannot be shared by {self.plan.replicas} replicas x {self.plan.slices} slices; "
                    f"use at least {least} lanes"
                )
            if before is not None and lanes != before and not bool(batch.fresh.all()):
                raise UserError(f"a batch goes on with {lanes} lanes after one of {before}; keep the lanes, or make all of them fresh")
            before = lanes
        self._kept_lanes = before

    def _place(self, batch: Batch) -> int:
        """The batch's step, or how many without one came before it: each needs dropout masks of its own."""
        if batch.step >= 0:
            return batch.step
        self._uncounted += 1
        return self._uncounted - 1

    def _step(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: list[Tensor] | None) -> tuple[StepResult, list[Tensor] | None]:
        """The step as a function of tensors alone: nothing is read on the host, so that it can be recorded."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.reducer is not None:
            self.reducer.begin()
        outcomes = self._run(batches, keys, state)
        if self.reducer is not None:
            self.reducer.finish()
        grads = [p.grad for _, p in self.named if p.grad is not None]
        overflow = self.scaler.unscale_(grads) if self.scaler is not None else None
        loss_sum, count, squared, flag, *votes = self._sums(outcomes, overflow)
        norm = gradients.norm_of_mean(squared, count)
        gradients.scale_(grads, gradients.factor(norm, count, self.spec.clip))
        finite = torch.isfinite(norm)
        if self.scaler is not None:
            # Any worker's overflow is everyone's: all of them skip the step, or none does.
            self.scaler.found_inf.copy_(flag > 0)
            finite = finite | (flag > 0)
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()
        left = flatten(outcomes[-1].state) if self.keep_state else None
        return StepResult(loss_sum, count, norm, finite & torch.isfinite(loss_sum), torch.stack(votes)), left

    def _run(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: list[Tensor] | None) -> list[pipeline.Outcome]:
        jobs: list[pipeline.Job] = []
        scale = None if self.scaler is None else self.scaler.scale
        for batch, key in zip(batches, keys, strict=True):
            lanes = batch.lanes.shape[0]
            before = None if not jobs else jobs[-1].batch.lanes.shape[0]
            entered: State | None = None
            if not self.keep_state or (before is not None and before != lanes):
                entered = self.stage.start(lanes, self.device)
            elif before is None:
                entered = unflatten(state or [])
            jobs.append(pipeline.Job(batch, entered, key.to(self.device), scale, self.spec.alpha, self.spec.beta, self.spec.precision))
        program = pipeline.program_for(self.plan, batches, backward=True, whole=self.model.reads_whole, scheduler=self.scheduler)
        return pipeline.run(
            self.stage,
            self.plan,
            program,
            jobs,
            self.mesh.links,
            place=self.mesh.stage,
            reducer=self.reducer,
        )

    def _sums(self, outcomes: Sequence[pipeline.Outcome], overflow: Tensor | None) -> list[Tensor]:
        """Loss, count, square of the norm, overflow and votes, over all workers: everything they must agree on, in one message."""
        counted = [p.grad for p in self._counted if p.grad is not None]
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        squared = gradients.norm_squared(counted).to(self.device)
        numbers = torch.stack(
            [
                *(sum_of([getattr(outcome, name) for outcome in outcomes]) for name in ("loss_sum", "count")),
                squared,
                zero if overflow is None else overflow.double(),
                *(zero + vote for vote in self.votes),
            ]
        )
        return list(self.mesh.sum_(numbers).unbind())

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """The weights to be judged: NT-ASGD's average where it has begun, otherwise the parameters themselves."""
        if isinstance(self.optimizer, optimizers.NTASGD):
            with self.optimizer.swapped():
                yield
        else:
            yield

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter and saved buffer that this worker holds, by name."""
        return {name: tensor for name, tensor in tensors_of(self.model).items() if not tensor.is_meta}

    def gathered(self) -> dict[str, Tensor]:
        """On rank 0 the parameters of the whole model, by name; on other workers nothing. All of them must ask."""
        own = self.parameters() if self.mesh.replica == 0 else {}
        found = [part for part in collect(self.mesh.world, own) if part]
        return {name: part[name] for name in tensors_of(self.model) for part in found[::-1] if name in part}

    def _check_plan(self) -> None:
        plan = self.plan
        if isinstance(self.model, Whole):
            if plan.stages > 1:
                raise PlanError(
                    f"a {type(self.model.module).__name__} cannot be cut into {plan.stages} stages; "
                    "wrap its modules as cw.Model(encoder, lstm, head), or use replicas alone"
                )
            if plan.chunk_steps is not None:
                raise PlanError(
                    f"a {type(self.model.module).__name__} cannot be run in chunks of time; "
                    "wrap its modules as cw.Model(encoder, lstm, head), or leave plan.chunk_steps out"
                )
            return
        check_head(plan, pooled=self.model.pooled)
        if plan.kernel != "auto":
            check(plan.kernel)
            self.model.lstm.kernel = plan.kernel

    def _take_place(self) -> Stage | Whole:
        """Take up rank 0's weights, keep those of this worker's stage, and prepare the sums over workers."""
        model, mesh, dtype = self.model, self.mesh, parameter_dtype(self.spec.precision)
        if mesh.world.size > 1:
            own = tensors_of(model)
            for name, tensor in spread(mesh.world, own).items():
                own[name].copy_(tensor)
        stage: Stage | Whole
        if isinstance(model, Whole):
            model.to(self.device, dtype)
            stage, tied = model, []
            self.named: list[tuple[str, nn.Parameter]] = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        else:
            first, last = mesh.span(model.units)
            share_head = self.plan.shares_head
            tied = shared(model, self.plan.edges(model.units)[1:-1], share_head=share_head)
            held = hold(model, first, last, self.device, dtype, share_head=share_head)
            stage = Stage(model, first, last, share_head=share_head)
            self.named = [(name, p) for name, p in held.items() if isinstance(p, nn.Parameter) and p.requires_grad]
        mine = [each for each in tied if mesh.stage in each.stages]
        elsewhere = {each.name for each in mine if each.stages[0] != mesh.stage}
        # Replicas hold the same reduced gradient, and stages those that they share: the norm counts each once.
        self._counted = [p for name, p in self.named if name not in elsewhere] if mesh.replica == 0 else []
        self.reducer = self._reducer(tied)
        return stage

    def _reducer(self, tied: Sequence[Shared]) -> Reducer | None:
        names = {each.name for each in tied}
        wanted: list[Reduced] = []
        group = self.mesh.replicas_of([self.mesh.stage])
        if group is not None:
            wanted.append(Reduced(group, [p for name, p in self.named if name not in names]))
        own = dict(self.named)
        for stages in dict.fromkeys(each.stages for each in tied):
            group = self.mesh.replicas_of(stages)  # made by every worker, also by those outside it
            if self.mesh.stage in stages and group is not None:
                # Not early: the other stages come to it only after messages that this one has yet to send.
                wanted.append(Reduced(group, [own[each.name] for each in tied if each.stages == stages], early=False))
        wanted = [each for each in wanted if each.parameters]
        return Reducer(wanted) if wanted else None

    def _own(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The user's optimizer, without the parameters that this worker gave up."""
        if self.plan.stages > 1:
            held = {id(p) for _, p in self.named}
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) in held]
        return optimizer


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer that is saved, by name, each once (a tied one under its first name); detached, not copied."""
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    saved = model.state_dict(keep_vars=True).keys()
    return own | {name: buffer.detach() for name, buffer in model.named_buffers() if name in saved}


def _mesh_of(plan: Plan | PlanSpec | Mapping[str, Any] | None, model: Model | Whole, device: torch.device | str | None) -> Mesh:
    """The place of this process among those that a launcher started; alone where there is none."""
    many = launched()
    if many:
        world = join("auto" if device is None else torch.device(device).type)
    elif isinstance(plan, Plan) and plan.workers > 1:
        raise PlanError(
            f"the plan needs {plan.workers} workers, and this is one; start the program with torchrun --nproc-per-node {plan.workers}"
        )
    if not isinstance(plan, Plan):
        asked = plan if isinstance(plan, PlanSpec) else _plan_spec(plan)
        layers = model.lstm.num_layers if isinstance(model, Model) else 0
        plan = resolve(asked, layers=layers, workers=world.size if many else 1, lanes=None, pooled=model.pooled)
    if many:
        return Mesh(world, plan)
    return Mesh.alone(next(model.parameters()).device if device is None else torch.device(device), plan)


def _plan_spec(given: Mapping[str, Any] | None) -> PlanSpec:
    return parse({"plan": dict(given)}).plan_spec if given else PlanSpec()


def _train_spec(given: TrainSpec | Spec | Mapping[str, Any] | None) -> TrainSpec:
    if isinstance(given, TrainSpec):
        return given
    return given.train if isinstance(given, Spec) else parse({"train": dict(given or {})}).train


def _lanes(state: State, otherwise: int) -> int:
    """Lanes of a state; a stage without layers has none of its own."""
    return state.carries[0].h.shape[1] if state.carries else otherwise


def sum_of(parts: list[Tensor]) -> Tensor:
    """Their sum."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
