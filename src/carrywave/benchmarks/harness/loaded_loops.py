"""Our training loop over our loader, and the labelled sequences of varying length that `bench train` and `bench replicas` train on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from carrywave.data.batch import Batch
from carrywave.data.codec import Codec
from carrywave.data.loader import Loader
from carrywave.data.order import Cursor
from carrywave.data.sequences import Sequences
from carrywave.parallel.mesh import Mesh
from carrywave.prediction.evaluation import order_for
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.step.trainer import Trainer
from carrywave.tasks.task import Task

FEATURES, CLASSES = 16, 10
LR, CLIP = 1e-3, 1.0
TRAIN = {"optimizer": "adam", "lr": LR, "clip": CLIP, "precision": "fp32"}

Step = Callable[[], int]  # runs one optimizer step and returns its real tokens


@dataclass(frozen=True)
class LabelledLengths:
    """Sequences of log-normal length, from 5 to `longest` steps, each with a label; `tokens` is the number of steps per batch."""

    hidden: int
    longest: int
    tokens: int
    sequences: int = 4000

    @property
    def name(self) -> str:
        """As shown in tables."""
        return f"lengths 1x{self.hidden} log-normal 5..{self.longest} batch {self.tokens}"

    def data(self) -> Sequences:
        """The data, identical on every worker."""
        draw = np.random.default_rng(0)
        lengths = np.clip(np.exp(draw.normal(math.log(80), 1.0, self.sequences)), 5, self.longest).astype(np.int64)
        inputs = draw.standard_normal((int(lengths.sum()), FEATURES)).astype(np.float32)
        return Sequences(inputs, np.cumsum(lengths) - lengths, lengths, labels=draw.integers(CLASSES, size=len(lengths)))

    def loop(self, data: Sequences, mesh: Mesh) -> Step:
        """Our loop over these sequences: the model of the peers, not the task's defaults."""
        model: dict[str, Any] = {"hidden": self.hidden, "layers": 1}
        spec = parse({"task": "classification", "model": model, "batch": {"tokens": self.tokens}, "train": TRAIN}, defaults=False)
        labels, columns = (tuple(str(label) for label in range(CLASSES)), tuple(f"x{i}" for i in range(FEATURES)))
        return loaded_loop(spec, Codec(task="classification", field="steps", labels=labels, columns=columns), data, mesh)


def examples(data: Sequences) -> tuple[list[torch.Tensor], list[int]]:
    """The sequences and their labels, as a plain loop takes them."""
    assert data.labels is not None
    return list(torch.split(torch.from_numpy(np.asarray(data.inputs)), data.lengths.tolist())), np.asarray(data.labels).tolist()


def loaded_loop(spec: Spec, codec: Codec, data: Sequences, mesh: Mesh) -> Step:
    """A loop over our trainer and loader, epoch after epoch; each step returns the real tokens of this worker's share."""
    task = Task.of(spec, codec, codec.facts(data), data)
    view = task.part("train", data).view
    trainer = Trainer(task.model(data), spec.train, mesh=mesh, keep_state=spec.streams)
    share = mesh.share() if mesh.plan.workers > 1 else None
    batches = _forever(Loader(view, order_for(spec, view, training=True), device=mesh.device, share=share))

    def step() -> int:
        batch = next(batches)
        trainer.update(batch)
        return batch.real

    return step


def _forever(loader: Loader) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from loader.batches(Cursor(epoch, 0))
        epoch += 1
