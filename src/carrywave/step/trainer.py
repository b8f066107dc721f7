"""`Trainer` runs one optimizer step: batches in, loss out. The loop around it may be ours or the user's, on one worker or many.

A step is told in `_take`, top to bottom: check what came in, take this worker's lanes and what they go on from, run them, and go on from
the next position. What running them is, `engine` tells: forward and backward of all batches, a sum over the workers, one division, clip,
update. What a trainer goes on from is a value, `Position`; parts of a step are given what they need, never the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from carrywave.data.batch import Batch
from carrywave.errors import UserError
from carrywave.kernels import random
from carrywave.model.arguments import check_shapes
from carrywave.model.modes import TrainingModes
from carrywave.model.opaque_model import Loss, OpaqueModel
from carrywave.model.over_time.global_norm import summed_by
from carrywave.model.stage import Stage
from carrywave.model.state import State
from carrywave.parallel import process_groups
from carrywave.parallel.delayed_read import Later
from carrywave.parallel.liveness import device_faults, lost_contact
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.parallel.world import raise_on_all
from carrywave.plan.plan import Plan, check_sync
from carrywave.spec.plan_spec import PlanSpec
from carrywave.spec.spec import Spec
from carrywave.spec.train_spec import TrainSpec
from carrywave.step import trainer_state
from carrywave.step.checks import arguments
from carrywave.step.checks.agreement import Agreement
from carrywave.step.checks.batches import BatchChecks, check_continued, check_surroundings, why_no_carry
from carrywave.step.checks.hooks import Hooks
from carrywave.step.checks.parameters import TrainableParameters
from carrywave.step.checks.trial import SplitTrial
from carrywave.step.engine import Compute, Engine
from carrywave.step.evaluation import MeanLoss, taken_from
from carrywave.step.graphs.capture import Capture
from carrywave.step.nonfinite import NonfiniteRecord, diverged, reset_nonfinite_lanes, uncounted
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.optim import weight_average
from carrywave.step.optim.loss_scaler import Scaler
from carrywave.step.passes.jobs import FlatCarry, flatten
from carrywave.step.passes.timing import span
from carrywave.step.precision import configure, with_settled_precision
from carrywave.step.result import StepResult, Votes
from carrywave.step.sync.meeting import News, UserExchanges, check_unsaved, optimizer_of, sync_of, within_step
from carrywave.step.trainer_state import Position, Stateful
from carrywave.step.user_gradients import UserGradients
from carrywave.step.worker_setup import engine_of, local_part, mesh_of, place_model, trained, user_optimizer


class Trainer:
    """Model, optimizer and the state of the lanes, for one worker's place in a plan.

    `model` is a `Model`, or any nn.Module with a `loss` (replicas only). `spec` is the train section of a spec, or a mapping of its keys.
    Without `device`, training runs where the model is. `plan` is a `Plan`, or a mapping of the keys of a spec's plan section; if left out,
    every worker that a launcher started is a replica. All workers are given the same whole batches, and each takes its own lanes and
    layers. All start from the weights of rank 0.

    A user's `optimizer` replaces the one in the spec, and the user sets its learning rate. `keep_state` passes the carry from step to step,
    for lanes that are not fresh; by default it is on unless the head pools or the model reads whole sequences. On CUDA, steps whose shapes
    recur are captured as CUDA graphs, except in a pipeline whose messages pass through the host, and with user-defined modules, whose code
    a replay would not run; CARRYWAVE_CAPTURE=0 turns capture off, and CARRYWAVE_CAPTURE=1 captures user-defined modules as well.

    >>> import torch
    >>> import carrywave as cw
    >>> net = torch.nn.Linear(3, 1)
    >>> def loss(out, target):
    ...     return (out - target).square().sum(), torch.tensor(target.numel())  # a sum, and what to divide it by
    >>> trainer = cw.Trainer(net, {"optimizer": "sgd", "lr": 0.1}, loss=loss)
    >>> batch = cw.Batch.of(torch.ones(5, 4, 3), torch.ones(5, 4, 1))
    >>> first = trainer.step(batch)
    >>> bool(trainer.step(batch) < first), trainer.evaluate([batch]) < float(first)
    (True, True)
    >>> trainer.load_state_dict(trainer.state_dict())
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
        self.model = arguments.as_model(model, loss)
        whole = self.model.pooled or self.model.reads_whole
        if keep_state and whole:
            raise UserError(f"keep_state=True keeps the carry from batch to batch, but {why_no_carry(self.model)}remove keep_state")
        self.spec = arguments.train_spec(spec)
        if mesh is None:  # a user's own loop; ours casts the model itself and uses all keys
            arguments.check_spec(self.spec, user_optimizer=optimizer is not None)
            self.spec = arguments.in_model_dtype(self.spec, self.model)
        self.mesh = mesh or mesh_of(plan, self.model, device)
        self.plan, self.device = self.mesh.plan, self.mesh.device
        arguments.check_optimizer(optimizer, self.model, self.plan)
        if mesh is None:
            # Before anything else that is collective: whether settling the precision is depends on the spec.
            arguments.check_alike(self.mesh.world, self.spec, optimizer, keep_state=keep_state)
        self.spec = with_settled_precision(self.spec, self.mesh.world, self.model)
        check_sync(self.plan, self.spec.sync)
        self.within = within_step(self.mesh, self.spec)
        configure(self.spec.precision)
        self.held = place_model(self.model, self.mesh, self.spec)
        self.stage = self.held.stage
        self.keep_state = not whole if keep_state is None else keep_state
        self.named = trained(self.held)
        self.user_optimizer = optimizer is not None
        if optimizer is None:
            self._optimizer = optimizer_of(self.spec, self.named, self.device)
        else:
            self._optimizer = user_optimizer(optimizer, self.held)
        self.scaler = Scaler(self.device) if self.spec.precision == "fp16" else None
        # A non-finite step leaves the weights unchanged. The exception is NT-ASGD on CUDA, where this guard would copy all tensors: it is
        # left out in our own loop with on_nan=stop, where the run ends at such a step anyway.
        free = optimizer is not None or self.device.type == "cpu" or self.spec.optimizer != "ntasgd"
        self.guards_weights = free or mesh is None or self.spec.on_nan != "stop"
        self.position = Position()
        self._state_set = False  # by the user, since the last step
        self.votes: Votes = (0.0, 0.0)  # this worker's, for the next step
        # Its `scheduler` may be replaced; its `clock`, if set, times the tasks, and nothing is recorded.
        scale = None if self.scaler is None else self.scaler.scale
        self.compute = Compute(
            self.stage, self.within, self.spec, keep_state=self.keep_state, uncut_time=self.model.reads_whole, scale=scale
        )
        self.agreement = Agreement(self.within, self.held.parameters, self.model)
        self.hooks = Hooks(self.held.parameters, self.model, self.within.plan)
        self.normed = self.within.within_passes() if self.model.has_norms else None  # sums of norms over the global batch
        self.engine = self._new_engine()
        self.user_gradients = UserGradients(list(self.held.parameters.values()))  # of `backward`, until they are applied
        self.sync = sync_of(self.spec, self.mesh, self.model, self.named, self.optimizer)  # None: replicas exchange at every step
        self.exchanges = UserExchanges(self.mesh, self.sync, self.spec) if mesh is None and self.sync is not None else None
        self._followed = TrainableParameters(self.model, self.mesh.world)
        self._check_batches = BatchChecks(self.model, keep_state=self.keep_state)
        self._seen: Later | None = None  # of a step that has not been looked at yet
        self._trial = SplitTrial(self.model, self.stage, self.within, self.spec.precision)
        self.evaluation_trial = SplitTrial(self.model, self.stage, self.mesh, self.spec.precision)
        self.modes = TrainingModes(self.model.module if isinstance(self.model, OpaqueModel) else self.model)
        recordable = optimizer is None and self.spec.precision != "fp64" and self.spec.sync != "async"
        recordable = recordable and (self.normed is None or self.normed.on_device)
        where = self.device, self.plan, self.model, self.optimizer
        self.capture = Capture.of(*where, on_device=self.mesh.messages_on_device) if recordable else None

    def step(self, *batches: Batch) -> Tensor:
        """Take one optimizer step over these batches (several are accumulated); returns the mean loss over their real targets.

        With `on_nan: stop`, a non-finite loss or gradient raises `Diverged`; with GPUs one step later, when it is known without waiting.
        Weights and optimizer are then as they were before the bad step, and lanes with a non-finite carry are reset.
        """
        result = self._take(batches, self.position)
        if self.exchanges is not None:
            self.exchanges.after(result, self.news)
        elif self.spec.on_nan == "stop":
            self._look(result)
        return result.mean(self.spec.precision)

    def update(self, *batches: Batch) -> StepResult:
        """Take one optimizer step and return its sums, which are valid until the next one."""
        return self._take(batches, self.position)

    def _take(self, batches: Sequence[Batch], position: Position, *, applies: bool = True) -> StepResult:
        """A step: check what came in, take this worker's lanes, run them, update, and go on from the next position. `applies`: with the
        update; otherwise the gradient is left in `.grad`.
        """
        several, running = self.mesh.world.size > 1, False
        if several:
            device_faults.begin()
        try:
            if applies:
                self.user_gradients.end()
            lanes = self._check(batches, position)
            keys, counted = self._keys(batches, position.counted)
            local = [local_part(self.mesh, self.stage, batch, scores=self.stage.scores, pooled=self.model.pooled) for batch in batches]
            if self._trial.has_to_look(batches):
                self._trial.before(batches if self.within is self.mesh else local, keys, training=True)
            if self.spec.beta:
                self.compute.count_changes(batches)
            carry = self._carry(local, position) if self.keep_state else None
            hooked = self.hooks.any_registered(self._optimizer)  # also refuses some
            graphs = None if hooked or self.compute.clock is not None else self.capture  # a replay would not run a hook, nor ask a clock
            running = True
            with self._norms() if self.normed else nullcontext(), self.hooks.put_off() if hooked else nullcontext():
                result, left = self.engine.step(local, keys, carry, self.votes, graphs, applies=applies)
        except BaseException as error:
            if several and running:
                self._broke_off(error)  # other workers are not left waiting, and learn why
            if several:
                lost_contact.failed(error)
            raise
        # A stage of no layers has no carry, nor has a worker of no lanes.
        self.position, self._state_set = Position(position.carry if left is None else left or None, lanes, counted), False
        return result

    def _norms(self) -> AbstractContextManager[None]:
        """Norms over the global batch are summed over all replicas inside this context."""

        def total(tensor: Tensor) -> Tensor:
            if self.normed is not None and (work := self.normed.all_reduce(tensor)) is not None:
                work.wait()
            return tensor

        return summed_by(total)

    def _check(self, batches: Sequence[Batch], position: Position) -> tuple[int, ...] | None:
        """What a step is given, and the model that takes it; returns the lanes whose carry will be kept."""
        self.modes.resume()
        several = self.mesh.world.size > 1
        process_groups.check_unspoilt()
        self._check_batches(batches)
        check_surroundings(self.spec, self.device)
        if self._followed.changed():
            self._switch()
        if several:
            self.agreement.before(batches, self.optimizer, position.counted)
        return check_continued(batches, position.lanes) if self.keep_state else position.lanes

    def _keys(self, batches: Sequence[Batch], counted: int) -> tuple[list[Tensor], int]:
        """The random key of every batch, of its step number, or of a running count if it has none; and the count after them."""
        keys: list[Tensor] = []
        for batch in batches:
            keys.append(random.key(self.spec.seed, batch.epoch, batch.step if batch.step >= 0 else counted))
            counted += batch.step < 0
        return keys, counted

    def _carry(self, batches: list[Batch], position: Position) -> FlatCarry:
        """The carry with which these lanes begin; the first batch, in its place, starts anew if there is nothing to go on from."""
        first, carry, lanes = batches[0], position.carry, batches[0].lanes.shape[0]
        as_many = position.lanes is None or len(position.lanes) == (first.part_of or (0, lanes))[1]
        if self._state_set and as_many and carry is not None and not first.idle and isinstance(self.stage, Stage):
            check_shapes(self.stage.lstm, self.stage.carries(carry), lanes, self.stage.layers)
        if carry is not None and (not carry or carry[0].shape[1] == lanes):  # a stage of no layers has none
            return carry
        # There is nothing to continue: the initial carry, if it is learned, learns from these lanes too.
        batches[0] = replace(first, fresh=torch.ones_like(first.fresh))
        return flatten(self.stage.start(lanes, self.device).detach())

    def _broke_off(self, error: BaseException) -> None:
        if self.mesh.world.size > 1 and getattr(error, "reported_by", None) is None:
            lost_contact.announce_failure(error)
            self.engine.gradients.abandon()

    @property
    def state(self) -> State | None:
        """The carry of this worker's lanes and layers, with which the next step goes on; None if there is none."""
        return None if self.position.carry is None else State(self.stage.carries(self.position.carry))

    @state.setter
    def state(self, state: State | None) -> None:
        self.position, self._state_set = replace(self.position, carry=None if state is None else flatten(state)), True

    def backward(self, *batches: Batch, weight: float = 1.0, again: bool = False) -> Tensor:
        """Add `weight` times the gradient of the mean loss over these batches to `.grad`, and return that mean loss; no weight changes.

        The first backward after an update starts from zero. `again`: as the last one, from the same carry and with the same dropout.
        """
        start = self.user_gradients.start(self.position, again=again)
        if self.sync is not None:
            raise UserError(f"train.sync={self.spec.sync} exchanges weights after whole steps; use trainer.step, or train.sync=step")
        with self.user_gradients.adding(recorded=self.capture is not None) as kept:
            result = self._take(batches, start, applies=False)
        self.user_gradients.add([p for _, p in self.named], kept, weight, result, start)
        if self.agreement.at_once:
            finite, loss, count = result.seen().tolist()
            if finite and loss and count <= 0:
                raise on_every_rank(uncounted())
        return result.mean(self.spec.precision)

    @lost_contact.kept
    def apply(self) -> Tensor:
        """Clip what is in `.grad`, update the weights, and return the norm before clipping. Non-finite numbers are treated as in `step`."""
        self.check_unbroken()
        self.user_gradients.check_trained()
        with raise_on_all(self.mesh.world):
            unapplied, grads = self.user_gradients.taken()
        if self._followed.changed():
            self._switch()
        for parameter in self.held.parameters.values():
            parameter.grad = grads[id(parameter)] if parameter.requires_grad else None
        with span("update"), self.hooks.put_off():
            result = self.engine.apply(unapplied.finite, unapplied.codes)
        if self.spec.on_nan == "stop":
            self._look(result)
        return result.norm

    def zero_grad(self) -> None:
        """Drop the gradients of `backward`; its carry stays as it is."""
        self.user_gradients.drop()

    def exchange(self) -> None:
        """With `train.sync` local or diloco, have all replicas exchange their weights now. Collective: every rank must call it."""
        if self.exchanges is not None:
            self.exchanges.everything(self.news)

    @lost_contact.kept
    def gradient_norm(self) -> Tensor:
        """The norm of what is in `.grad`, over the parameters on all workers. Collective: every rank must call it."""
        return self.engine.norm()

    @lost_contact.kept
    def evaluate(self, batches: Iterable[Batch], observe: Callable[[Tensor, Tensor | None], None] | None = None) -> float:
        """The mean loss over the real targets of these batches, without dropout or gradients; the same on every worker.

        All workers are given the same whole batches. Lanes have a carry that passes from batch to batch, separate from the one in training.
        `observe(out, targets)` is called with the head's output for this worker's lanes, on the workers that hold the head.
        """
        self.check_unbroken()
        self.agreement.settle()
        precision, keeps = self.spec.precision, self.keep_state
        evaluation = MeanLoss(self.model, self.stage, self.mesh, precision, keeps, self.agreement, self.evaluation_trial)
        with self.evaluation_weights():
            return evaluation(batches, observe, self._broke_off)

    def check_unbroken(self) -> None:
        """Reject what would put parts of different steps together. Collective: every rank must call it."""
        process_groups.check_unspoilt()
        self.agreement.no_batch()
        if self.exchanges is not None:
            self.exchanges.check_met()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UserError("a trainer cannot be copied; create one with copy.deepcopy(model), and load trainer.state_dict() into it")

    def state_dict(self) -> dict[str, Any]:
        """On rank 0, all that is needed to resume under any plan: weights, optimizer, carry, position. Empty elsewhere. Collective."""
        self.user_gradients.check_applied()
        check_unsaved(self.spec.sync)
        if self._followed.changed():
            self._switch()  # what has been unfrozen since the last step has a state too, its first
        self.check_unbroken()
        self.agreement.settle()
        return trainer_state.state_dict(self._stateful, self.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state. Collective: every rank must call it; the state given on rank 0 is loaded on all."""
        self.user_gradients.check_trained()
        check_unsaved(self.spec.sync)
        self.position, self._state_set = trainer_state.load_state_dict(self._stateful, state), True
        self.user_gradients = UserGradients(self.user_gradients.held)
        if self.capture is not None:
            self.capture.forget()

    @property
    def _stateful(self) -> Stateful:
        return Stateful(self.model, self.held, self.mesh, self.optimizer, self.user_optimizer, self.scaler, self.keep_state)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that takes the steps. Its groups may be changed between steps; it cannot be replaced."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, other: object) -> NoReturn:
        raise UserError("the optimizer of a trainer cannot be replaced; make a new Trainer(model, optimizer=...) with it")

    @property
    def nonfinite(self) -> NonfiniteRecord:
        """The record of non-finite steps."""
        return self.engine.nonfinite

    @property
    def news(self) -> News:
        """What this worker brings to the next meeting of replicas that train on their own."""
        return News(self.model, self.votes, self.nonfinite, self.scaler, self.guards_weights)

    def _new_engine(self) -> Engine:
        """An engine for the parameters that are trained now. Collective: every rank must call it."""
        checks = self.agreement, self.hooks
        return engine_of(
            self.model, self.held, self.named, self.compute, self.optimizer, self.scaler, checks, guards_weights=self.guards_weights
        )

    def _switch(self) -> None:
        """Other parameters are trained than before: switch to these, without gradients. Collective: every rank must call it."""
        if self.sync is not None:
            raise UserError(f"with train.sync={self.spec.sync} the trained parameters are fixed; set requires_grad before the Trainer")
        for parameter in self.held.parameters.values():
            parameter.grad = None  # otherwise the optimizer would keep using the last one
        record = self.nonfinite
        self.named = trained(self.held)
        if not self.user_optimizer:
            optimizers.enlarge(self.optimizer, self.named)
        self.engine = self._new_engine()
        self.nonfinite.take_over(record)
        if self.capture is not None:
            self.capture.forget()

    def _look(self, result: StepResult) -> None:
        """Raise if a step had non-finite numbers: this one, or with a GPU the one before, which is known without waiting. All workers look
        at the same step.
        """
        now, before = None, self._seen
        if self.agreement.at_once:
            finite, loss, count = result.seen().tolist()
        else:
            now = Later(result.seen())
            finite, loss, count = (1.0, 0.0, 0.0) if before is None else before.read()
        self._seen = now if finite else None  # what is raised tells of this step too, which goes on from what was not finite
        if finite and loss and count <= 0:
            raise on_every_rank(uncounted())
        if not finite:
            carry = self.position.carry
            if carry:
                start = self.stage.start(carry[0].shape[1], self.device).detach().carries
                carry = reset_nonfinite_lanes(self.stage.carries(carry), start)
            self.position, self._state_set = replace(self.position, carry=carry), True  # on workers that have no lanes too
            raise diverged(self.model, self.nonfinite, guards_weights=self.guards_weights)

    def local_part(self, batch: Batch) -> Batch:
        """This worker's lanes of a batch, reduced to what its stage reads, on its device."""
        return local_part(self.mesh, self.stage, batch, scores=self.stage.scores, pooled=self.model.pooled)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate for the next step."""
        optimizers.set_lr(self.optimizer, lr)

    def evaluation_weights(self, of: nn.Module | None = None) -> AbstractContextManager[None]:
        """Use the weights to be evaluated inside this context: the average that `train.ema` or NT-ASGD keeps, those that replicas which
        train on their own agree on, otherwise the parameters themselves. `of`: those of this copy of the model, such as torch's
        `AveragedModel(trainer.model)`. Collective: every rank must enter it.
        """
        # torch's ASGD has averages in its state that are the user's business.
        averaged = not self.user_optimizer and bool(weight_average.averaged(self.optimizer))
        if of is not None:
            weights = taken_from(of, self.parameters(), self.mesh.world, has_average=averaged or self.sync is not None)
        elif averaged:
            weights = weight_average.swapped(self.optimizer)
        else:
            return nullcontext()
        return self.user_gradients.lending(weights)

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter and saved buffer that this worker holds, by name."""
        return self._stateful.tensors()

    def gathered(self, *, each_once: bool = False) -> dict[str, Tensor]:
        """On rank 0, the weights of the whole model, as `load_state_dict` takes them; empty on other ranks. All ranks must call it.

        `each_once`: list a tied weight under its first name only, as in files.
        """
        self.check_unbroken()
        weights = trainer_state.whole_weights(self._stateful)
        return weights if each_once else trainer_state.under_all_names(self.model, weights)
