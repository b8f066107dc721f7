"""A worker of test_train.py: trains, stops, resumes and evaluates on the plans that its job file lists, one after the other."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from _poison import poisoned

import carrywave as cw
from carrywave.errors import UserError
from carrywave.parallel.world import leave
from carrywave.prediction.evaluate import evaluate_run
from carrywave.prediction.predict import predict
from carrywave.runs.watcher import Silent
from carrywave.spec.load import parse
from carrywave.train.fit import train


def own_loop(own: bool, encoder: nn.Module | None = None, plan: dict[str, Any] | None = None) -> None:
    """A user's program: all workers are given one batch, or each one of its own, as with DDP."""
    model = cw.Model(encoder or nn.Linear(2, 4), cw.LSTM(4, 4), Head())
    trainer = cw.Trainer(model, {"optimizer": "sgd", "lr": 0.1}, device="cpu", plan=plan)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]) if own else 7)
    batch = cw.Batch.of(torch.randn(5, 6, 2, generator=generator), torch.zeros(5, 6, 4))
    trainer.step(batch)
    leave(trainer.mesh.world)


class Mixing(nn.Linear):
    """`dim` 0: over time; 1: over lanes."""

    def __init__(self, dim: int) -> None:
        super().__init__(2, 4)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(self.dim, keepdim=True))


class Head(nn.Module):
    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (y - target).square().sum(), torch.tensor(target.numel())


class TagHead(nn.Module):
    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(y.flatten(0, 1), target.flatten(), reduction="sum"), (target != -100).sum()


def fit(run: Path, encoder: nn.Module) -> None:
    """Our own loop, in which a worker reads only its own lanes: here one."""
    numbers = np.random.default_rng(1).normal(size=(12, 6, 2)).astype(np.float32)
    how: dict[str, Any] = {"task": "tagging", "batch": {"tokens": 18}, "train": {"epochs": 1}, "plan": {"replicas": 3}}
    cw.fit(
        cw.Model(encoder, cw.LSTM(4, 4), TagHead()),
        (numbers, (numbers.sum(axis=2) > 0).astype(int)),
        run=run,
        device="cpu",
        **how,
    )


def _runs(folder: Path, names: str | list[str]) -> Path | list[Path]:
    return folder / names if isinstance(names, str) else [folder / name for name in names]


def carry_out(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    try:
        if "fit" in job:
            fit(folder / job["fit"], Mixing(1))
        elif "mixing" in job:
            own_loop(False, Mixing(job["mixing"]), job["plan"])
        elif "lanes" in job:
            own_loop(job["lanes"] == "own")
        elif "evaluate" in job:
            told["row"] = evaluate_run(_runs(folder, job["evaluate"]), device="cpu", note=lambda _: None)
        elif "predict" in job:
            told["rows"] = predict(_runs(folder, job["predict"]), folder / job["data"], device="cpu", note=lambda _: None)
        else:
            if job.get("alien") == int(os.environ["RANK"]):
                job["spec"]["train"]["lr"] = 0.125
            watch = Listening()
            told |= {"lines": watch.lines}
            with poisoned(**job["poison"]) if "poison" in job else nullcontext([]) as told["begun"]:
                spec = parse(job["spec"], defaults=job.get("defaults", True))
                result = train(spec, run=folder / job["run"], resume=job.get("resume", False), device="cpu", watch=watch)
            told |= {"ending": result.ending, "metrics": result.metrics}
    except UserError as error:
        told |= {"error": f"{type(error).__name__}: {error}", "reported_by": error.reported_by}
    return told


class Listening(Silent):
    """Keeps what is said of numbers that are not finite."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        if "no longer finite" in line:
            self.lines.append(line)


def main(carry_out: Callable[[Path, dict[str, Any]], dict[str, Any]]) -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    told = [carry_out(folder, job) for job in json.loads((folder / name).read_text())]
    (folder / f"{name}.{os.environ['RANK']}.out").write_text(json.dumps(told))


if __name__ == "__main__":
    main(carry_out)
