"""What the functions that serve a `Trainer` may use of it, so that they can be read, and imported, without it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.stage import Stage
from carrywave.model.state import State
from carrywave.parallel.mesh import Mesh
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.checks.agreement import Agreement
from carrywave.step.checks.trial import SplitTrial
from carrywave.step.engine import Engine
from carrywave.step.optim.loss_scaler import Scaler
from carrywave.step.worker_setup import HeldStage


class TrainerView(Protocol):
    """A trainer, as those see it who evaluate its model or save its state."""

    model: Model | OpaqueModel
    spec: TrainSpec
    mesh: Mesh
    device: torch.device
    held: HeldStage
    stage: Stage | OpaqueModel
    keep_state: bool
    user_optimizer: bool
    scaler: Scaler | None
    engine: Engine
    agreement: Agreement
    evaluation_trial: SplitTrial
    # The position, which loading a state changes.
    state: State | None
    lanes: tuple[int, ...] | None
    uncounted: int

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def parameters(self) -> dict[str, Tensor]: ...

    def check_unbroken(self) -> None: ...

    def broke_off(self, error: BaseException) -> None: ...

    def restart_recordings(self) -> None: ...
