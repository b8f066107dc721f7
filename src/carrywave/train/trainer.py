"""`Trainer` does one optimizer step: batches in, loss out. The loop around it may be ours or the user's.

A step sums the loss over all its batches, differentiates the sum, divides the gradient once by the number of real targets
in all of them, clips, and updates. The state of the lanes goes from batch to batch, cut off from the graph.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.data.batch import Batch
from carrywave.errors import PlanError, UserError
from carrywave.kernels import random
from carrywave.kernels.lstm import check
from carrywave.model.model import Model
from carrywave.model.stage import Stage
from carrywave.model.state import State
from carrywave.parallel import gradients, pipeline
from carrywave.parallel.capture import Capture
from carrywave.parallel.precision import configure, parameter_dtype
from carrywave.plan.plan import Plan
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec, TrainSpec
from carrywave.train import optimizer as optimizers
from carrywave.train.scaler import Scaler


@dataclass(frozen=True)
class StepResult:
    """Sums of one optimizer step, still on the device."""

    loss_sum: Tensor
    count: Tensor
    norm: Tensor  # of the gradient, before clipping
    finite: Tensor  # bool: loss and gradient are numbers (an overflow that the fp16 scaler skips counts as finite)


class Trainer:
    """Model, optimizer and the state of the lanes, for one plan on one device.

    `spec` is the train section of a spec, or a mapping of its keys; without `device`, it trains where the model is. An
    `optimizer` of the user's own takes the place of the spec's, and its learning rate is the user's to set. `keep_state`
    hands the carry from step to step, to lanes that are not fresh; it is left out where the head pools or the model reads both ways.
    On CUDA, steps of a shape that comes again are recorded as CUDA graphs; CARRYWAVE_CAPTURE=0 switches that off.
    """

    def __init__(
        self,
        model: Model,
        spec: TrainSpec | Spec | Mapping[str, Any] | None = None,
        *,
        plan: Plan | None = None,
        device: torch.device | str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        keep_state: bool | None = None,
    ) -> None:
        if not isinstance(model, Model):
            raise UserError(f"a trainer trains a cw.Model, got {type(model).__name__}; wrap your modules: cw.Model(encoder, lstm, head)")
        whole = model.pooled or model.lstm.bidirectional
        if keep_state and whole:
            raise UserError("a head that pools, or a model that reads both ways, reads whole sequences; leave keep_state out")
        self.spec, self.plan = _train_spec(spec), plan or Plan.serial()
        _check_plan(self.plan, model)
        self.device = next(model.parameters()).device if device is None else torch.device(device)
        configure(self.spec.precision)
        self.model = model.to(self.device, parameter_dtype(self.spec.precision))
        self.stage = Stage(self.model)
        self.named: list[tuple[str, nn.Parameter]] = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = optimizer or optimizers.build(self.spec, self.named, self.device)
        self.scaler = Scaler(self.device) if self.spec.precision == "fp16" else None
        self.keep_state = not whole if keep_state is None else keep_state
        self.state: State | None = None
        self._uncounted = 0  # batches so far that had no place of their own in an epoch
        recordable = self.device.type == "cuda" and optimizer is None and self.spec.optimizer != "ntasgd"
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
        batches = tuple(batch if batch.inputs.device == self.device else batch.to(self.device) for batch in batches)
        if self.keep_state:
            self._check_lanes(batches)
            lanes = batches[0].lanes.shape[0]
            if self.state is None or _lanes(self.state) != lanes:
                self.state = self.model.start(lanes, self.device).detach()
        keys = [random.key(self.spec.seed, batch.epoch, self._place(batch)) for batch in batches]
        state = pipeline.flatten(self.state) if self.keep_state and self.state is not None else None
        if self._capture is not None:
            result, left = self._capture(batches, keys, state)
        else:
            result, left = self._step(batches, [key.to(self.device) for key in keys], state)
        if left is not None:
            self.state = pipeline.unflatten(left)
        return result

    def _check_lanes(self, batches: Sequence[Batch]) -> None:
        """A batch of another number of lanes than the one before it must start all of them anew."""
        before = None if self.state is None else _lanes(self.state)
        for batch in batches:
            lanes = batch.lanes.shape[0]
            if before is not None and lanes != before and not bool(batch.fresh.all()):
                raise UserError(f"a batch goes on with {lanes} lanes after one of {before}; keep the lanes, or make all of them fresh")
            before = lanes

    def _place(self, batch: Batch) -> int:
        """The batch's step, or how many without one came before it: each needs dropout masks of its own."""
        if batch.step >= 0:
            return batch.step
        self._uncounted += 1
        return self._uncounted - 1

    def _step(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: list[Tensor] | None) -> tuple[StepResult, list[Tensor] | None]:
        """The step as a function of tensors alone: nothing is read on the host, so that it can be recorded."""
        self.optimizer.zero_grad(set_to_none=True)
        outcomes = []
        for batch, key in zip(batches, keys, strict=True):
            lanes = batch.lanes.shape[0]
            anew = state is None or state[0].shape[1] != lanes
            entered = self.model.start(lanes, self.device) if state is None or anew else pipeline.unflatten(state)
            outcome = self._run(batch, key.to(self.device), entered)
            outcomes.append(outcome)
            state = pipeline.flatten(outcome.state) if self.keep_state else None
        loss_sum, count = (sum_of([getattr(outcome, name) for outcome in outcomes]) for name in ("loss_sum", "count"))
        grads = [p.grad for _, p in self.named if p.grad is not None]
        overflow = self.scaler.unscale_(grads) if self.scaler is not None else None
        gradients.divide_(grads, count)
        norm = gradients.global_norm(grads)
        if self.spec.clip is not None:
            gradients.clip_(grads, norm, self.spec.clip)
        finite = torch.isfinite(norm)
        if self.scaler is not None and overflow is not None:
            finite = finite | overflow
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()
        return StepResult(loss_sum, count, norm, finite & torch.isfinite(loss_sum)), state

    def _run(self, batch: Batch, key: Tensor, state: State) -> pipeline.Outcome:
        scale = None if self.scaler is None else self.scaler.scale
        job = pipeline.Job(batch, state, key, scale, self.spec.alpha, self.spec.beta, self.spec.precision)
        schedule = pipeline.schedule_for(self.plan, batch.steps, batch.lanes.shape[0], backward=True)
        return pipeline.run(self.stage, self.plan, schedule, job)

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
        """Every parameter and saved buffer by name."""
        return tensors_of(self.model)


def tensors_of(model: Model) -> dict[str, Tensor]:
    """Every parameter and buffer that is saved, by name, each once (a tied one under its first name); detached, not copied."""
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    saved = model.state_dict(keep_vars=True).keys()
    return own | {name: buffer.detach() for name, buffer in model.named_buffers() if name in saved}


def _check_plan(plan: Plan, model: Model) -> None:
    if plan.workers > 1:
        raise PlanError(f"the plan needs {plan.workers} workers, and this is one; use replicas=1 and stages=1")
    if plan.chunk_steps is not None and model.lstm.bidirectional:
        raise PlanError("a model that reads both ways reads whole sequences; leave plan.chunk_steps out")
    if plan.kernel != "auto":
        check(plan.kernel)
        model.lstm.kernel = plan.kernel


def _train_spec(given: TrainSpec | Spec | Mapping[str, Any] | None) -> TrainSpec:
    if isinstance(given, TrainSpec):
        return given
    return given.train if isinstance(given, Spec) else parse({"train": dict(given or {})}).train


def _lanes(state: State) -> int:
    return state.carries[0].h.shape[1]


def sum_of(parts: list[Tensor]) -> Tensor:
    """Their sum."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
