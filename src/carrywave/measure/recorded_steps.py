"""Times whole recorded steps of a GPU: what the update takes, and what every step adds to its passes and the update.

A step is one CUDA graph, so its time on the device is that of a replay. Besides, the device copies the batch into the graph and adds up
sums; and the host, which prepares the next step meanwhile, may need longer for that than the device for a small model's step.
"""

from __future__ import annotations

import torch

from carrywave.data.batch import Batch
from carrywave.measure.recorded import time_recorded
from carrywave.measure.timing import call_seconds, gpu_seconds
from carrywave.model.encoders import Numbers
from carrywave.model.heads.forecast import Forecast
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.parallel.mesh import Mesh
from carrywave.plan.cost.sample_requests import Ask
from carrywave.step.trainer import Trainer

SMALL_RATE = 1e-9  # learning rate of updates that are timed: wide models would diverge within a few steps of the usual one
LANES, SHORT, LONG = 16, 8, 256  # steps: few where the update is timed; enough for the host to stay ahead of the device
NARROW, WIDE = 8, 512  # units
DEEP = 4  # layers, of a model whose steps take the host longer
REPEATS, HOST_REPEATS = 20, 200


def train_section(optimizer: str, precision: str) -> dict[str, object]:
    """The train section of updates that are timed: with norm and clipping, but leaving the weights about where they are."""
    return {"optimizer": optimizer, "precision": precision, "clip": 1.0, "lr": SMALL_RATE}


class RecordedStep:
    """Steps of a small model, as the training loop takes them; captured, unless CARRYWAVE_CAPTURE forbids it."""

    def __init__(self, device: torch.device, hidden: int, steps: int, optimizer: str, precision: str, *, layers: int = 1) -> None:
        self.device = device
        # Dropout keeps several layers apart: in one call, they would take the host no longer than one.
        stack = LSTM(hidden, hidden, layers, dropout=0.1 if layers > 1 else 0.0)
        self.model = Model(Numbers(hidden), stack, Forecast(hidden, 1, 1))
        self.trainer = Trainer(self.model, train_section(optimizer, precision), mesh=Mesh.alone(device))
        self.batch = Batch.of(torch.zeros(steps, LANES, hidden), torch.zeros(steps, LANES, 1, 1)).to(device)
        self.sums: torch.Tensor | float = 0.0
        for _ in range(3):  # as it is, captured, replayed
            self()

    def __call__(self) -> None:
        self.trainer.set_lr(SMALL_RATE)
        self.sums = self.sums + self.trainer.update(self.batch).counted()

    def seconds(self, repeats: int = 0) -> float:
        """Seconds from one step to the next, over so many of them."""
        return call_seconds(self, repeats or REPEATS, self.device)

    def device_seconds(self) -> float:
        """Seconds of the device for the step's graph; of the whole step, if it was not captured."""
        graphs = [] if self.trainer.capture is None else self.trainer.capture.graphs("step")
        return gpu_seconds(graphs[0].replay, REPEATS) if graphs else self.seconds()


def time_update(device: torch.device, optimizer: str, parameters: int, precision: str) -> tuple[Model, float]:
    """A model with about so many parameters, and the seconds of a step besides the passes through its layer: mostly norm, clipping and
    optimizer.
    """
    hidden = max(1, round((parameters / 8) ** 0.5))
    step = RecordedStep(device, hidden, SHORT, optimizer, precision)
    whole = step.device_seconds()
    passes = time_recorded(Ask("lstm", hidden, hidden, LANES, SHORT, precision=precision), device, 0.0)
    return step.model, max(whole - passes.forward_seconds - passes.backward_seconds, 0.05 * whole)


def step_overheads(device: torch.device, precision: str) -> dict[str, float]:
    """What every step adds on the device outside its graph, and the least seconds of any step, which are the host's: of a model without
    parameters, and for each tensor of them.
    """
    busy = RecordedStep(device, WIDE, LONG, "adam", precision)
    flat, deep = (RecordedStep(device, NARROW, SHORT, "adam", precision, layers=layers) for layers in (1, DEEP))
    few, many = (len(list(step.model.parameters())) for step in (flat, deep))
    least, more = flat.seconds(HOST_REPEATS), deep.seconds(HOST_REPEATS)
    each = min(max(0.0, (more - least) / (many - few)), least / few)  # noise never makes either negative
    outside = max(0.0, busy.seconds() - busy.device_seconds())
    return {"step_seconds": outside, "least_step_seconds": least - few * each, "least_tensor_seconds": each}
