"""`Trainer` does one optimizer step: batches in, loss out. The loop around it may be ours or the user's.

A step sums the loss over all its batches, differentiates the sum, divides the gradient once by the number of real targets
in all of them, clips, and updates. The state of the lanes goes from batch to batch, cut off from the graph.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from carrywave.data.batch import Batch
from carrywave.kernels import random
from carrywave.model.model import Model
from carrywave.model.stage import Stage
from carrywave.model.state import State
from carrywave.parallel import gradients, pipeline
from carrywave.parallel.capture import Capture
from carrywave.parallel.precision import configure, parameter_dtype
from carrywave.plan.plan import Plan
from carrywave.spec.spec import TrainSpec
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

    On CUDA, steps of a shape that comes again are recorded as CUDA graphs; CARRYWAVE_CAPTURE=0 switches that off.
    """

    def __init__(
        self,
        model: Model,
        spec: TrainSpec | None = None,
        *,
        plan: Plan | None = None,
        device: torch.device | str = "cpu",
        optimizer: torch.optim.Optimizer | None = None,
        keep_state: bool = True,
    ) -> None:
        self.spec, self.plan, self.device = spec or TrainSpec(), plan or Plan.serial(), torch.device(device)
        configure(self.spec.precision)
        self.model = model.to(self.device, parameter_dtype(self.spec.precision))
        self.stage = Stage(self.model)
        self.named: list[tuple[str, nn.Parameter]] = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = optimizer or optimizers.build(self.spec, self.named, self.device)
        self.scaler = Scaler(self.device) if self.spec.precision == "fp16" else None
        self.keep_state = keep_state
        self.state: State | None = None
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
        lanes = batches[0].lanes.shape[0]
        if self.keep_state and (self.state is None or self.state.carries[0].h.shape[1] != lanes):
            self.state = self.model.start(lanes, self.device).detach()
        keys = [random.key(self.spec.seed, batch.epoch, batch.step) for batch in batches]
        state = pipeline.flatten(self.state) if self.keep_state and self.state is not None else None
        if self._capture is not None:
            result, left = self._capture(batches, keys, state)
        else:
            result, left = self._step(batches, [key.to(self.device) for key in keys], state)
        if left is not None:
            self.state = pipeline.unflatten(left)
        return result

    def _step(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: list[Tensor] | None) -> tuple[StepResult, list[Tensor] | None]:
        """The step as a function of tensors alone: nothing is read on the host, so that it can be recorded."""
        self.optimizer.zero_grad(set_to_none=True)
        outcomes = []
        for batch, key in zip(batches, keys, strict=True):
            entered = self.model.start(batch.lanes.shape[0], self.device) if state is None else pipeline.unflatten(state)
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


def sum_of(parts: list[Tensor]) -> Tensor:
    """Their sum."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
