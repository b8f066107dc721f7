"""`Trainer` does one optimizer step: batches in, loss out. The loop around it may be ours or the user's.

A step sums the loss over all its batches, differentiates the sum, divides the gradient once by the number of real targets
in all of them, clips, and updates. The state of the lanes goes from batch to batch, cut off from the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from carrywave.parallel.precision import autocast, configure, parameter_dtype
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
    """Model, optimizer and the state of the lanes, for one plan on one device."""

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

    def step(self, *batches: Batch) -> Tensor:
        """One optimizer step over these batches (several: accumulated); returns the mean loss over their real targets."""
        result = self.update(*batches)
        return (result.loss_sum / result.count.clamp(min=1e-30)).to(torch.float32)

    def update(self, *batches: Batch) -> StepResult:
        """One optimizer step, with its sums."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        outcomes = [self._run(batch) for batch in batches]
        loss_sum = torch.stack([outcome.loss_sum for outcome in outcomes]).sum()
        count = torch.stack([outcome.count for outcome in outcomes]).sum()
        grads = [p.grad for _, p in self.named if p.grad is not None]
        overflow = self.scaler.unscale_(grads) if self.scaler is not None else None
        gradients.divide_(grads, count)
        norm = gradients.global_norm(grads)
        if self.spec.clip is not None:
            gradients.clip_(grads, norm, self.spec.clip)
        finite = torch.isfinite(loss_sum) & torch.isfinite(norm)
        if self.scaler is not None and overflow is not None:
            finite = torch.isfinite(loss_sum) & (torch.isfinite(norm) | overflow)
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()
        return StepResult(loss_sum, count, norm, finite)

    def _run(self, batch: Batch) -> pipeline.Outcome:
        lanes = batch.lanes.shape[0]
        if self.state is None or not self.keep_state or self.state.carries[0].h.shape[1] != lanes:
            self.state = self.model.start(lanes, self.device)
        key = random.key(self.spec.seed, batch.epoch, batch.step).to(self.device)
        job = pipeline.Job(
            batch=batch,
            state=self.state,
            key=key,
            scale=None if self.scaler is None else self.scaler.scale,
            alpha=self.spec.alpha,
            beta=self.spec.beta,
        )
        schedule = pipeline.schedule_for(self.plan, batch.steps, lanes, backward=True)
        with autocast(self.spec.precision, self.device):
            outcome = pipeline.run(self.stage, self.plan, schedule, job)
        self.state = outcome.state
        return outcome

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step."""
        for group in self.optimizer.param_groups:
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
