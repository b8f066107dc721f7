"""`Trainer` runs one optimizer step: batches in, loss out. The loop around it may be ours or the user's, on one worker or many.

A step sums the loss over all its batches, differentiates the sum, all-reduces the gradients, divides once by the number of real targets on
all workers, clips, and updates. The state of the lanes is passed from batch to batch, detached from the autograd graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from carrywave.data.batch import Batch
from carrywave.errors import Diverged, PlanError, UserError, WorkerError
from carrywave.kernels import random
from carrywave.model.foreign_parameters import Audit
from carrywave.model.model import Model
from carrywave.model.opaque_model import Whole
from carrywave.model.state import State
from carrywave.parallel.delayed_read import Later
from carrywave.parallel.liveness import lost_contact
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.schedule import wavefront
from carrywave.spec.spec import PlanSpec, Spec, TrainSpec
from carrywave.step import compute, gradients, trainer_state
from carrywave.step.checks.agreement import Agreement
from carrywave.step.checks.arguments import (
    check_batches,
    check_optimizer,
    check_spec,
    check_surroundings,
    in_model_dtype,
    train_spec,
    uncounted,
)
from carrywave.step.checks.hooks import Hooks
from carrywave.step.checks.reached import Reach
from carrywave.step.checks.separable import check_separable
from carrywave.step.checks.splitting import check_splits
from carrywave.step.checks.trainable import Followed
from carrywave.step.gradients import Reducer
from carrywave.step.graphs.capture import Capture, Lanes, RecordedParts
from carrywave.step.mean_loss import mean_loss
from carrywave.step.micro_batches import flatten, unflatten
from carrywave.step.nonfinite import mended, sizes
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.optim.loss_scaler import Scaler, step_unless
from carrywave.step.precision import configure
from carrywave.step.reproducible.shard_backward import Shards
from carrywave.step.reproducible.shards import settle
from carrywave.step.step_stats import Sums
from carrywave.step.task_clock import TaskClock
from carrywave.step.worker_setup import mesh_of, own_optimizer, take_hold, take_place, tensors_of

Loss = Callable[[Any, Tensor], tuple[Tensor, Tensor]]  # (module output, targets) -> loss summed over targets, number of targets


@dataclass(frozen=True)
class StepResult:
    """Sums of one optimizer step over all workers, still on the device."""

    loss_sum: Tensor
    count: Tensor
    norm: Tensor  # gradient norm before clipping
    finite: Tensor  # bool: loss and gradient are finite (an overflow that the fp16 scaler skips counts as finite)
    votes: Tensor  # [2]: how many workers had been asked to stop, as in `Trainer.votes`
    sound: Tensor  # [2] bool: `finite`; and False if a non-zero loss has no targets to divide by


class Trainer:
    """Model, optimizer and the state of the lanes, for one worker's place in a plan.

    `model` is a `Model`, or any nn.Module with a `loss` (replicas only). `spec` is the train section of a spec, or a mapping of its keys.
    Without `device`, training runs where the model is. `plan` is a `Plan`, or a mapping of the keys of a spec's plan section; if left out,
    every worker that a launcher started is a replica. All workers are given the same whole batches, and each takes its own lanes and
    layers. All start from the weights of rank 0.

    A user's `optimizer` replaces the one in the spec, and the user sets its learning rate. `keep_state` passes the carry from step to step,
    for lanes that are not fresh; by default it is on unless the head pools or the model is bidirectional. On CUDA, steps whose shapes recur
    are captured as CUDA graphs, except in a pipeline and with user-defined modules, whose code a replay would not run; CARRYWAVE_CAPTURE=0
    turns capture off, and CARRYWAVE_CAPTURE=1 captures user-defined modules as well.
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
        self.spec = train_spec(spec)
        if mesh is None:  # a user's own loop; ours casts the model itself and uses all keys
            check_spec(self.spec, own_optimizer=optimizer is not None)
            self.spec = in_model_dtype(self.spec, self.model)
        if optimizer is not None:
            check_optimizer(optimizer, self.model)
        self.mesh = mesh or mesh_of(plan, self.model, device)
        self.plan, self.device = self.mesh.plan, self.mesh.device
        configure(self.spec.precision)
        if self.spec.reproducible:
            settle(self.device)
        self.held = take_hold(self.model, self.mesh, self.spec)
        self.stage = self.held.stage
        self.keep_state = not whole if keep_state is None else keep_state
        self._take_place()
        self.own_optimizer = optimizer is not None
        if optimizer is None:
            self.optimizer = optimizers.build(self.spec, self.named, self.device)
        else:
            check_separable(optimizer, self.plan)
            self.optimizer = own_optimizer(optimizer, self.held) if self.plan.stages > 1 else optimizer
        self.scaler = Scaler(self.device) if self.spec.precision == "fp16" else None
        # A non-finite step leaves the weights unchanged. The exception is NT-ASGD on CUDA, where this guard would copy all tensors: it is
        # left out in our own loop with on_nan=stop, where the run ends at such a step anyway.
        free = optimizer is not None or self.device.type == "cpu" or self.spec.optimizer != "ntasgd"
        self.guards_weights = free or mesh is None or self.spec.on_nan != "stop"
        self.state: State | None = None
        self.lanes: int | None = None  # number of lanes whose state is kept, over all workers
        self.uncounted = 0  # batches so far without a step number of their own
        self.scheduler: compute.Scheduler = wavefront
        self.votes = (0.0, 0.0)  # this worker's, for the next step: stop as on Ctrl-C, stop as on SIGTERM
        self.clock: TaskClock | None = None  # if set, times the tasks of each step; such steps are not captured
        self.agreement = Agreement(self.mesh, self.held.parameters, self.model)
        self.hooks = Hooks(self.held.parameters, self.model, self.plan)
        self._followed = Followed(self.model, self.mesh.world)
        self._hooked = False  # True if there are hooks that a captured step would not call
        self._audited = False  # True once the parameters behind the loss were checked, until those that are trained change
        self._sound: Later | None = None  # `sound` of a step that has not been checked yet
        self._broken = False  # True if a step failed midway here, and other stages were left without its messages
        self._probed = False  # True once the user's modules were checked to be safe to split
        known = optimizer is None and self.spec.precision != "fp64"
        self.record(Capture.of(self.device, self.plan, self.model, self.optimizer) if known else None)

    def step(self, *batches: Batch) -> Tensor:
        """Take one optimizer step over these batches (several are accumulated); returns the mean loss over their real targets.

        With `on_nan: stop`, a non-finite loss or gradient raises `Diverged`; with GPUs one step later, when it is known without waiting.
        Weights and optimizer are then as they were before the bad step, and lanes with a non-finite carry are reset.
        """
        result = self.update(*batches)
        if self.spec.on_nan == "stop":
            self._look(result)
        mean = result.loss_sum / result.count.clamp(min=1e-30)
        return mean if self.spec.precision == "fp64" else mean.to(torch.float32)

    @lost_contact.kept
    def update(self, *batches: Batch) -> StepResult:
        """Take one optimizer step and return its sums, which are valid until the next one."""
        if not self.model.training:
            self.model.train()
        if self._broken:
            self.check_unbroken()
        check_batches(batches, self.model, keep_state=self.keep_state)
        check_surroundings(self.spec, self.device)
        if self._followed.changed():
            self._follow()
        self.agreement.before(batches, self.optimizer)
        stood = self.uncounted, self.lanes
        keys = [random.key(self.spec.seed, batch.epoch, self._place(batch)) for batch in batches]
        if self.keep_state:
            self._check_lanes(batches)
        own = [self.own_part(batch) for batch in batches]
        if not self._probed:
            check_splits(self.stage, self.plan, own[0], keys[0], self.mesh, shards=self.shards is not None)
            self._probed = True
        if self.keep_state:
            lanes = own[0].lanes.shape[0]
            if self.state is None or _lanes(self.state, lanes) != lanes:
                self.state = self.stage.start(lanes, self.device).detach()
        state = flatten(self.state) if self.keep_state and self.state is not None else None
        try:
            with self._audit(), self.hooks.put_off():
                result, left = self._recorded(own, keys, state)
        except BaseException as error:
            self.uncounted, self.lanes = stood  # so that the step can be retried with the same randomness
            self.broke_off(error)
            raise
        if left is not None:
            self.state = unflatten(left)
        return result

    @lost_contact.kept
    def evaluate(self, batches: Iterable[Batch], observe: compute.Observer | None = None) -> float:
        """The mean loss over the real targets of these batches, without dropout or gradients; the same on every worker.

        All workers are given the same whole batches. Lanes have a carry that passes from batch to batch, separate from the one in training.
        `observe(out, targets)` is called with the head's output for this worker's lanes, on the workers that hold the head.
        """
        self.check_unbroken()
        self.agreement.settle()
        with self.evaluation_weights():
            return mean_loss(self, batches, observe)

    def broke_off(self, error: BaseException) -> None:
        """Note that a step or an evaluation ended halfway on this worker: other stages are not left waiting for its messages."""
        if self.mesh.links is not None and getattr(error, "told_by", None) is None:
            self._broken = True
            self.mesh.hang_up()

    def check_unbroken(self) -> None:
        """Reject what would put parts of different steps together. Collective: every rank must call it."""
        self.agreement.unbroken(broken=self._broken)
        if self._broken:  # on every rank
            raise _halfway()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Not supported: a trainer is bound to the parameters that it trains."""
        raise UserError(
            "a trainer cannot be copied; make another over copy.deepcopy(model), and give it what trainer.state_dict() of this one returns"
        )

    def state_dict(self) -> dict[str, Any]:
        """On rank 0, all that is needed to resume under any plan: weights, optimizer, carry, position. Empty elsewhere. Collective."""
        return trainer_state.state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state. Collective: every rank must call it; the state given on rank 0 is loaded on all."""
        trainer_state.load_state_dict(self, state)

    def _take_place(self) -> None:
        """Set up what is trained, according to the current `requires_grad` flags."""
        place = take_place(self.model, self.mesh, self.spec, self.held)
        self.named, self._counted, self.reducer, self._tree = place.named, place.counted, place.reducer, place.tree
        self.bad = place.bad
        names = [name for name, _ in self.model.named_parameters()]
        several = self.mesh.world.size > 1
        summed = place.reducer or place.tree if several else None
        self._reach = Reach(names, self.held.parameters, summed, self.device, several=several)
        self.shards: Shards | None = None
        if self._tree is not None:
            self.shards = Shards(self.mesh, self._tree, self.bad, self.backward, self.anew, pooled=self.model.pooled)

    def _follow(self) -> None:
        """Switch to the new set of trained parameters."""
        for parameter in self.held.parameters.values():
            parameter.grad = None  # otherwise the optimizer would keep using the last one
        kept = self.bad.kept
        self._take_place()
        self.bad.kept.copy_(kept)
        if not self.own_optimizer:
            optimizers.enlarge(self.optimizer, self.named)
        self._audited = False
        self.restart_recordings()

    @contextmanager
    def _audit(self) -> Iterator[None]:
        """In the first step, and after a change in what is trained, check that the loss depends on no parameters outside the model."""
        if self._audited:
            yield
            return
        loss: Any = self.model._loss if isinstance(self.model, Whole) else getattr(self.model.head, "loss", None)
        self.stage.audit = Audit(self.model, lambda: loss)
        try:
            yield
            self._audited = True
        finally:
            self.stage.audit = None

    def restart_recordings(self) -> None:
        """Discard captured graphs, because tensors that they read have been replaced."""
        if self.capture is not None:
            self.capture.forget()
        self.record(self.capture)

    def _look(self, result: StepResult) -> None:
        """Raise if a step had non-finite numbers: this step, or with a GPU the previous one. All workers check the same step."""
        if self.agreement.at_once:
            finite, counted = result.sound.tolist()
        else:
            before, self._sound = self._sound, Later(result.sound)
            finite, counted = (True, True) if before is None else before.read()
        if not counted:
            raise on_every_rank(uncounted())
        if finite:
            return
        self._sound = None
        seen = self.bad.look()
        cause = self.bad.cause(seen, weights=self.guards_weights)
        if self.state is not None and self.state.carries:
            left = flatten(self.state)
            self.state = unflatten(mended(left, self.anew(left[0].shape[1])))
        raise on_every_rank(
            Diverged(
                f"{cause} is not a number any more; lower the learning rate, or set clip; the weights are as they were before that step "
                "(on_nan=skip goes on without it)"
            )
        )

    def record(self, capture: Capture | None) -> None:
        """From here on, replay steps from `capture`; with None, capture nothing."""
        self.capture = capture
        parameters = [parameter for _, parameter in self.named]
        self._parts: RecordedParts[StepResult] | None = None
        if capture is not None:
            self._parts = RecordedParts(
                capture, parameters, self._one, lambda parts: self._update(self._outcomes(parts)), enter=self._enter, reducer=self.reducer
            )
        self._restarts = 0  # NT-ASGD restarts that the captured graphs reflect

    def _recorded(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: Lanes) -> tuple[StepResult, Lanes]:
        """Run the step, replaying captured graphs where possible."""
        self._hooked = self.hooks.there(self.optimizer)
        if self.capture is not None and isinstance(self.optimizer, optimizers.NTASGD) and self.optimizer.restarts != self._restarts:
            # A step with averaging differs from one without, and a restarted average is in different tensors.
            self.capture.forget()
            self._restarts = self.optimizer.restarts
        if self.shards is not None and self._tree is not None:
            outcomes, left = self.shards(batches, keys, state)
            self._tree.finish()
            return self._update([each for several in outcomes.values() for each in several], outcomes), self._mended(left)
        if self.capture is None or self._parts is None or self.clock is not None or self._hooked:
            return self._step(batches, [key.to(self.device) for key in keys], state)
        if len(batches) == 1 and self.reducer is None:
            return self.capture("step", self._step, batches, keys, state)
        result, left = self._parts(batches, keys, state)
        return result, self._mended(left)

    def own_part(self, batch: Batch, *, scores: bool | None = None) -> Batch:
        """This worker's lanes of a batch, reduced to what its stage reads, on its device. `scores`: whether it reads the targets."""
        scores = self.stage.scores if scores is None else scores
        if batch.whole is None and self.plan.replicas > 1:
            batch = batch.take(*self.mesh.share().bounds(batch.lanes.shape[0]), pooled=self.model.pooled)
        if self.plan.stages > 1:
            batch = batch.without(inputs=not self.stage.has_encoder, targets=not scores)
        return batch if batch.lengths.device == self.device else batch.to(self.device)

    def _check_lanes(self, batches: Sequence[Batch]) -> None:
        """Refuse a change in the number of lanes unless all are fresh. With several workers, each replica and micro-batch needs a lane."""
        before = self.lanes
        least = self.plan.replicas * self.plan.micro_batches
        for batch in batches:
            lanes = batch.cells[1] // batch.steps
            if lanes < least and self.plan.workers > 1:
                raise PlanError(
                    f"{lanes} lanes that keep their state cannot be shared by {self.plan.replicas} replicas x "
                    f"{self.plan.micro_batches} micro-batches; use at least {least} lanes"
                )
            if before is not None and lanes != before and not bool(batch.fresh.all()):
                raise UserError(f"a batch goes on with {lanes} lanes after one of {before}; keep the lanes, or make all of them fresh")
            before = lanes
        self.lanes = before

    def _place(self, batch: Batch) -> int:
        """The batch's step number, or a running count if it has none: every batch needs its own dropout masks."""
        if batch.step >= 0:
            return batch.step
        self.uncounted += 1
        return self.uncounted - 1

    def _step(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: Lanes) -> tuple[StepResult, Lanes]:
        """The step as a function of tensors alone: nothing is read on the host, so it can be captured."""
        if self.reducer is not None:
            self.reducer.begin()
        outcomes, state = self._backward(batches, keys, state)
        if self.reducer is not None:
            self.reducer.finish()
        return self._update(outcomes), self._mended(state)

    def backward(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: Lanes) -> tuple[list[compute.BatchOutcome], Lanes]:
        """Run forward and backward of these lanes, replaying captured graphs where possible; `.grad` then holds their gradients alone."""
        if self._parts is None or self.clock is not None or self._hooked:
            return self._backward(batches, keys, state)
        found, _, left = self._parts.batches(batches, keys, state)
        return self._outcomes(found), left

    def _backward(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: Lanes) -> tuple[list[compute.BatchOutcome], Lanes]:
        for parameter in self.held.parameters.values():  # including those that the user's optimizer does not hold
            parameter.grad = None
        outcomes: list[compute.BatchOutcome] = []
        # A pipeline takes all batches at once, so that they follow each other through its stages. Otherwise each batch is run separately,
        # as it is when they are captured one by one.
        size = len(batches) if self.plan.stages > 1 else 1
        with self.bad.encoding():
            for first in range(0, len(batches), size):
                several = slice(first, first + size)
                state = self._enter(batches, first, state)
                outcomes += self._run(batches[several], keys[several], state, self.reducer if several.stop == len(batches) else None)
                state = flatten(outcomes[-1].state) if self.keep_state else None
        return outcomes, state

    def _update(
        self, outcomes: Sequence[compute.BatchOutcome], by_shard: Mapping[int, Sequence[compute.BatchOutcome]] | None = None
    ) -> StepResult:
        """Divide and clip the gradients, and step the optimizer."""
        grads = [p.grad for _, p in self.named if p.grad is not None]
        overflow = self.scaler.unscale_(grads) if self.scaler is not None else None
        sums = self._sums(outcomes, overflow, by_shard)
        self.agreement.after(sums.marks)
        self._reach.forget(sums.reached)
        loss_sum, count = sums.score.unbind()
        norm = gradients.norm_of_mean(sums.squared, count)
        gradients.scale_(grads, gradients.factor(norm, count, self.spec.clip))
        # If any worker overflowed, all skip the step.
        overflowed = sums.overflow > 0
        finite = (torch.isfinite(norm) | overflowed if self.scaler is not None else torch.isfinite(norm)) & torch.isfinite(loss_sum)
        self.hooks.call()
        if self.scaler is not None:
            self.scaler.found_inf.copy_(overflowed | ~finite)
            self.scaler.step(self.optimizer)
        elif self.guards_weights:
            step_unless((~finite).to(torch.float32), self.optimizer)
        else:
            self.optimizer.step()
        self.bad.note(finite, sums.said)
        sound = torch.stack([finite, (count > 0) | (loss_sum == 0) | ~finite])
        return StepResult(loss_sum, count, norm, finite, sums.votes, sound)

    def _mended(self, left: Lanes) -> Lanes:
        return mended(left, self.anew(left[0].shape[1])) if left and self.spec.on_nan == "skip" else left

    def anew(self, lanes: int) -> list[Tensor]:
        """The initial state of this many lanes."""
        return flatten(self.stage.start(lanes, self.device).detach())

    def _enter(self, batches: Sequence[Batch], number: int, state: Lanes) -> Lanes:
        """The state before a batch of the step: what the previous one left, or the initial state if the number of lanes changed."""
        lanes = batches[number].lanes.shape[0]
        if not self.keep_state or not number or lanes == batches[number - 1].lanes.shape[0]:
            return state
        return self.anew(lanes)

    def _one(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: Lanes) -> tuple[Tensor, Lanes]:
        """Run forward and backward of one batch, accumulating gradients; returns everything the update needs from it in one tensor.

        The tensor's shape does not depend on the batch's: carries and encoder outputs enter as norms, which show whether they are finite.
        """
        with self.bad.encoding():
            [outcome] = self._run(batches, keys, state, None)
        norms = sizes([part for carry in outcome.state.carries for part in carry])
        if self.bad.entered:
            norms.append(torch.stack(self.bad.entered).amax().double())
        numbers = [outcome.loss_sum, outcome.count, outcome.penalty, *norms]
        return torch.stack(numbers), flatten(outcome.state) if self.keep_state else None

    def _outcomes(self, parts: Sequence[Tensor]) -> list[compute.BatchOutcome]:
        """Rebuild the outcomes from what `_one` returned for each batch."""
        end = 3 + 2 * len(self.stage.layers)  # end of the carries' norms
        self.bad.entered = [norm for part in parts for norm in part[end:].unbind()]
        return [compute.BatchOutcome(part[0], part[1], part[2], unflatten(part[3:end].unbind())) for part in parts]

    def _run(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: Lanes, reducer: Reducer | None) -> list[compute.BatchOutcome]:
        jobs: list[compute.Job] = []
        scale = None if self.scaler is None else self.scaler.scale
        for batch, key in zip(batches, keys, strict=True):
            lanes = batch.lanes.shape[0]
            before = None if not jobs else jobs[-1].batch.lanes.shape[0]
            entered: State | None = None
            if not self.keep_state or (before is not None and before != lanes):
                entered = self.stage.start(lanes, self.device)
            elif before is None:
                entered = unflatten(state or [])
            jobs.append(compute.Job(batch, entered, key.to(self.device), scale, self.spec.alpha, self.spec.beta, self.spec.precision))
        program = compute.program_for(self.plan, batches, backward=True, whole=self.model.reads_whole, scheduler=self.scheduler)
        return compute.run(
            self.stage,
            self.plan,
            program,
            jobs,
            self.mesh.links,
            place=self.mesh.stage,
            reducer=reducer,
            clock=self.clock,
        )

    def _sums(
        self,
        outcomes: Sequence[compute.BatchOutcome],
        overflow: Tensor | None,
        by_shard: Mapping[int, Sequence[compute.BatchOutcome]] | None,
    ) -> Sums:
        """Loss, count, squared gradient norm, overflow, votes, and each worker's code for non-finite numbers, over all workers."""
        counted = [p for p in self._counted if p.grad is not None]
        norms = gradients.norms([p.grad for p in counted if p.grad is not None]).to(self.device)
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        score = _score(outcomes) if outcomes else torch.stack([zero, zero])
        said = self.bad.say(counted, norms, outcomes, score, self.reducer or self._tree)
        votes = torch.stack([zero + vote for vote in self.votes])
        overflowed = zero if overflow is None else overflow.double()
        own = Sums(score, norms.square().sum(), overflowed, votes, said, self.agreement.marks(), self._reach.own())
        if by_shard is None:
            return own.over(self.mesh)
        return own.over_shards(self.mesh, {shard: _score(several) for shard, several in by_shard.items()})

    def set_lr(self, lr: float) -> None:
        """Set the learning rate for the next step."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Use the weights to be evaluated inside this context: NT-ASGD's average if it is active, otherwise the parameters themselves."""
        if isinstance(self.optimizer, optimizers.NTASGD):
            with self.optimizer.swapped():
                yield
        else:
            yield

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter and saved buffer that this worker holds, by name."""
        return {name: tensor for name, tensor in tensors_of(self.model).items() if not tensor.is_meta}

    def gathered(self, *, each_once: bool = False) -> dict[str, Tensor]:
        """On rank 0, the weights of the whole model, as `load_state_dict` takes them; empty on other ranks. All ranks must call it.

        `each_once`: list a tied weight under its first name only, as in files.
        """
        self.check_unbroken()
        weights = trainer_state.whole_weights(self)
        if each_once:
            return weights
        # Copies: what rank 0 holds itself would go on being trained, and what it received would not.
        return trainer_state.under_all_names(self.model, {name: tensor.clone() for name, tensor in weights.items()})


def _halfway() -> WorkerError:
    return WorkerError(
        "an earlier step of this trainer ended halfway, so that its stages no longer agree; make a new Trainer on all workers, and "
        "give it what trainer.state_dict() returned before"
    )


def _lanes(state: State, otherwise: int) -> int:
    """The number of lanes of a state; `otherwise` if the stage has no layers and so no carry."""
    return state.carries[0].h.shape[1] if state.carries else otherwise


def _score(outcomes: Sequence[compute.BatchOutcome]) -> Tensor:
    """Total loss and count of several batches."""
    return torch.stack([_sum([getattr(outcome, name) for outcome in outcomes]) for name in ("loss_sum", "count")])


def _sum(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
