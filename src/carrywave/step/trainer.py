"""`Trainer` does one optimizer step: batches in, loss out. The loop around it may be ours or the user's, on one worker or on many.

A step sums the loss over all its batches, differentiates the sum, adds up gradients over the workers, divides once by the
number of real targets in all of them, clips, and updates. The state of the lanes goes from batch to batch, cut off from the graph.
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

Loss = Callable[[Any, Tensor], tuple[Tensor, Tensor]]  # (what the module gave, targets) -> sum over targets, their number


@dataclass(frozen=True)
class StepResult:
    """Sums of one optimizer step over all workers, still on the device."""

    loss_sum: Tensor
    count: Tensor
    norm: Tensor  # of the gradient, before clipping
    finite: Tensor  # bool: loss and gradient are numbers (an overflow that the fp16 scaler skips counts as finite)
    votes: Tensor  # [2]: how many workers were asked to stop by then, as `Trainer.votes` said it
    sound: Tensor  # [2] bool: `finite`, and whether a loss that is not zero has targets to be divided by


class Trainer:
    """Model, optimizer and the state of the lanes, for one worker's place in a plan.

    `model` is a `Model`, or any nn.Module with a `loss` (replicas only). `spec` is the train section of a spec, or a mapping of
    its keys; without `device`, it trains where the model is. `plan` is a `Plan`, or a mapping of the keys of a spec's plan; left out,
    every worker that a launcher started is a replica. All workers are given the same whole batches, and each takes its own
    lanes and layers of them. All start from the weights of rank 0.

    An `optimizer` of the user's own takes the place of the spec's, and its learning rate is the user's to set. `keep_state`
    hands the carry from step to step, to lanes that are not fresh; it is left out where the head pools or the model reads both ways.
    On CUDA, what comes again in the same shape is recorded as CUDA graphs, except in a pipeline and with modules of the user's own, whose
    code a replay does not run; CARRYWAVE_CAPTURE=0 switches that off, and 1 records those as well.
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
        if mesh is None:  # a user's own loop; ours casts the model itself, and acts on all keys
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
        # A bad step changes no weights; only where that would cost, and the run ends anyhow, they are left to it.
        free = optimizer is not None or self.device.type == "cpu" or self.spec.optimizer != "ntasgd"
        self.guards_weights = free or mesh is None or self.spec.on_nan != "stop"
        self.state: State | None = None
        self.lanes: int | None = None  # whose state is kept, of all workers together
        self.uncounted = 0  # batches so far that had no place of their own in an epoch
        self.scheduler: compute.Scheduler = wavefront
        self.votes = (0.0, 0.0)  # of this worker, for the next step: to stop as after Ctrl-C, as after SIGTERM
        self.clock: TaskClock | None = None  # times the tasks of the steps that it is set for; recorded ones have none
        self.agreement = Agreement(self.mesh, self.held.parameters, self.model)
        self.hooks = Hooks(self.held.parameters, self.model, self.plan)
        self._followed = Followed(self.model, self.mesh.world)
        self._hooked = False  # whether there are hooks that a recorded step would not call
        self._audited = False  # whether what the loss depends on was looked at, since it was last known to change
        self._sound: Later | None = None  # of a step that has not been looked at
        self._broken = False  # whether a step ended halfway here, and other stages were left without its messages
        self._probed = False  # whether the user's modules have been seen to bear being split
        known = optimizer is None and self.spec.precision != "fp64"
        self.record(Capture.of(self.device, self.plan, self.model, self.optimizer) if known else None)

    def step(self, *batches: Batch) -> Tensor:
        """One optimizer step over these batches (several: accumulated); returns the mean loss over their real targets.

        With `on_nan: stop` a loss or gradient that is not a number raises `Diverged`: with GPUs one step later, when it is known without
        waiting. Weights and optimizer are as they were before it, and lanes whose carry is bad begin anew.
        """
        result = self.update(*batches)
        if self.spec.on_nan == "stop":
            self._look(result)
        mean = result.loss_sum / result.count.clamp(min=1e-30)
        return mean if self.spec.precision == "fp64" else mean.to(torch.float32)

    @lost_contact.kept
    def update(self, *batches: Batch) -> StepResult:
        """One optimizer step, with its sums; they last until the next one."""
        if not self.model.training:
            self.model.train()
        if self._broken:
            raise WorkerError(
                "an earlier step of this trainer ended halfway, so that its stages no longer agree; make a new Trainer on all workers, and "
                "give it what trainer.state_dict() returned before"
            )
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
            self.uncounted, self.lanes = stood  # the step may be taken again, with the same randomness
            if self.mesh.links is not None and getattr(error, "told_by", None) is None:
                self._broken = True
                self.mesh.hang_up()
            raise
        if left is not None:
            self.state = unflatten(left)
        return result

    @lost_contact.kept
    def evaluate(self, batches: Iterable[Batch], observe: compute.Observer | None = None) -> float:
        """The mean loss over the real targets of these batches, without dropout or gradients; the same on every worker.

        All workers give the same whole batches. Lanes keep a carry of their own from batch to batch, apart from the one in training.
        `observe(out, targets)` sees what the head puts out for this worker's lanes, on the workers that hold it.
        """
        self.agreement.settle()
        with self.evaluation_weights():
            return mean_loss(self, batches, observe)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refused: it is bound to the parameters that it trains."""
        raise UserError(
            "a trainer cannot be copied; make another over copy.deepcopy(model), and give it what trainer.state_dict() of this one returns"
        )

    def state_dict(self) -> dict[str, Any]:
        """On rank 0 all that is needed to go on, on any plan: weights, optimizer, carry, position. Elsewhere nothing; all must ask."""
        return trainer_state.state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; what rank 0 gives counts, on all workers."""
        trainer_state.load_state_dict(self, state)

    def _take_place(self) -> None:
        """What is trained, as `requires_grad` has it now."""
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
        """Other parameters are trained from here on."""
        for parameter in self.held.parameters.values():
            parameter.grad = None  # an optimizer would go on with the last one
        kept = self.bad.kept
        self._take_place()
        self.bad.kept.copy_(kept)
        if not self.own_optimizer:
            optimizers.enlarge(self.optimizer, self.named)
        self._audited = False
        self.restart_recordings()

    @contextmanager
    def _audit(self) -> Iterator[None]:
        """In the first step, and after a change of what is trained: look whether the loss depends on parameters of something else."""
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
        """Tensors that recordings read are not the same any more."""
        if self.capture is not None:
            self.capture.forget()
        self.record(self.capture)

    def _look(self, result: StepResult) -> None:
        """Whether a step had bad numbers: this one, or with a GPU the one before it. All workers look at the same."""
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
        """Take steps from the recordings of `capture` from here on; None: without any."""
        self.capture = capture
        parameters = [parameter for _, parameter in self.named]
        self._parts: RecordedParts[StepResult] | None = None
        if capture is not None:
            self._parts = RecordedParts(
                capture, parameters, self._one, lambda parts: self._update(self._outcomes(parts)), enter=self._enter, reducer=self.reducer
            )
        self._restarts = 0  # of the average that recordings know

    def _recorded(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: Lanes) -> tuple[StepResult, Lanes]:
        """The step, from recordings where there are any."""
        self._hooked = self.hooks.there(self.optimizer)
        if self.capture is not None and isinstance(self.optimizer, optimizers.NTASGD) and self.optimizer.restarts != self._restarts:
            # A step with an average is another one than without, and an average that has begun anew lies elsewhere.
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
        """This worker's lanes of a batch, and of those what its stage reads, on its device. `scores`: whether it reads the targets."""
        scores = self.stage.scores if scores is None else scores
        if batch.whole is None and self.plan.replicas > 1:
            batch = batch.take(*self.mesh.share().bounds(batch.lanes.shape[0]), pooled=self.model.pooled)
        if self.plan.stages > 1:
            batch = batch.without(inputs=not self.stage.has_encoder, targets=not scores)
        return batch if batch.lengths.device == self.device else batch.to(self.device)

    def _check_lanes(self, batches: Sequence[Batch]) -> None:
        """A batch of another number of lanes than the one before it must start all of them anew; each replica and slice has one."""
        before = self.lanes
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
        self.lanes = before

    def _place(self, batch: Batch) -> int:
        """The batch's step, or how many without one came before it: each needs dropout masks of its own."""
        if batch.step >= 0:
            return batch.step
        self.uncounted += 1
        return self.uncounted - 1

    def _step(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: Lanes) -> tuple[StepResult, Lanes]:
        """The step as a function of tensors alone: nothing is read on the host, so that it can be recorded."""
        if self.reducer is not None:
            self.reducer.begin()
        outcomes, state = self._backward(batches, keys, state)
        if self.reducer is not None:
            self.reducer.finish()
        return self._update(outcomes), self._mended(state)

    def backward(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: Lanes) -> tuple[list[compute.BatchOutcome], Lanes]:
        """Forward and backward of these lanes, whose gradients alone the parameters have then; from recordings where there are any."""
        if self._parts is None or self.clock is not None or self._hooked:
            return self._backward(batches, keys, state)
        found, _, left = self._parts.batches(batches, keys, state)
        return self._outcomes(found), left

    def _backward(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: Lanes) -> tuple[list[compute.BatchOutcome], Lanes]:
        for parameter in self.held.parameters.values():  # also those that the user's optimizer does not hold
            parameter.grad = None
        outcomes: list[compute.BatchOutcome] = []
        # A pipeline takes all batches at once, so that one follows the other through its stages. Elsewhere each is a run of its own, as
        # it is where they are recorded one by one.
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
        """Divide the gradients, clip them, and take the step."""
        grads = [p.grad for _, p in self.named if p.grad is not None]
        overflow = self.scaler.unscale_(grads) if self.scaler is not None else None
        sums = self._sums(outcomes, overflow, by_shard)
        self.agreement.after(sums.marks)
        self._reach.forget(sums.reached)
        loss_sum, count = sums.score.unbind()
        norm = gradients.norm_of_mean(sums.squared, count)
        gradients.scale_(grads, gradients.factor(norm, count, self.spec.clip))
        # Any worker's overflow is everyone's: all of them skip the step, or none does.
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
        """The state of so many lanes that begin."""
        return flatten(self.stage.start(lanes, self.device).detach())

    def _enter(self, batches: Sequence[Batch], number: int, state: Lanes) -> Lanes:
        """The state before a batch of the step: as the one before left it; anew where there are other lanes, all of which are fresh."""
        lanes = batches[number].lanes.shape[0]
        if not self.keep_state or not number or lanes == batches[number - 1].lanes.shape[0]:
            return state
        return self.anew(lanes)

    def _one(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: Lanes) -> tuple[Tensor, Lanes]:
        """Forward and backward of one batch, which adds to the gradients: all that the update needs of it, in one tensor.

        Its shape is the same whatever that of the batch is: of carries and outputs it holds the norms, which say whether they are numbers.
        """
        with self.bad.encoding():
            [outcome] = self._run(batches, keys, state, None)
        norms = sizes([part for carry in outcome.state.carries for part in carry])
        if self.bad.entered:
            norms.append(torch.stack(self.bad.entered).amax().double())
        numbers = [outcome.loss_sum, outcome.count, outcome.penalty, *norms]
        return torch.stack(numbers), flatten(outcome.state) if self.keep_state else None

    def _outcomes(self, parts: Sequence[Tensor]) -> list[compute.BatchOutcome]:
        """From what `_one` gave of each batch."""
        end = 3 + 2 * len(self.stage.layers)  # of the carries
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
        """Loss, count, square of the norm and overflow, votes, and what each worker says of bad numbers, over all workers."""
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

    def gathered(self, *, each_once: bool = False) -> dict[str, Tensor]:
        """On rank 0 the weights of the whole model, as `load_state_dict` takes them; on other workers nothing. All of them must ask.

        `each_once`: a tied one under its first name alone, as files hold them.
        """
        weights = trainer_state.whole_weights(self)
        return weights if each_once else trainer_state.under_all_names(self.model, weights)


def _lanes(state: State, otherwise: int) -> int:
    """Lanes of a state; a stage without layers has none of its own."""
    return state.carries[0].h.shape[1] if state.carries else otherwise


def _score(outcomes: Sequence[compute.BatchOutcome]) -> Tensor:
    """Loss and count of several batches."""
    return torch.stack([_sum([getattr(outcome, name) for outcome in outcomes]) for name in ("loss_sum", "count")])


def _sum(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
