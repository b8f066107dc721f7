"""Averages of weights, and gradients apart from updates, in a user's own loop on several workers: what one device computes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import _warm
import carrywave as cw
from carrywave.step.sync.averaging import bounds, fragments_due

sys.path.insert(0, str(Path(__file__).parent))
from _loop_parts import SYNCED, batch, model, train

from _sync_definition import simulate

WORKER = Path(__file__).with_name("_loop_parts.py")
CASES = ("ema", "ema, tied", "averaged", "gradients", "sam", "profiled")
RANGES = {  # of the stages of "2 stages, micro-batches", besides those of every step
    0: "F0a F1a F0b F1b B1a B0a B1b B0b Wa Wb send-F0a send-F1a send-F0b send-F1b wait-B1a wait-B0a wait-B1b wait-B0b",
    1: "F0a F1a F0b F1b B1a B0a B1b B0b Wa Wb wait-F0a wait-F1a wait-F0b wait-F1b send-B1a send-B0a send-B1b send-B0b",
}
JOBS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "2 replicas": (2, {}, {}),
    "2 stages, micro-batches": (2, {"stages": 2, "micro_batches": 2, "chunk_steps": 4}, {}),
    "4 replicas": (4, {}, {}),
    "2 x 2": (4, {"stages": 2, "chunk_steps": 4}, {}),
}


def reported_by(asked: list[dict[str, Any]], workers: int, folder: Path) -> list[list[dict[str, Any]]]:
    """What each worker told of each job, by rank."""
    (folder / "jobs").write_text(json.dumps(asked))
    ended = _warm.start([sys.executable, str(WORKER), str(folder), "jobs"], workers)
    assert ended.code == 0, ended
    return [json.loads((folder / f"jobs.{rank}.out").read_text()) for rank in range(workers)]


def jobs(workers: int) -> list[dict[str, Any]]:
    found = []
    for name, (size, plan, keys) in JOBS.items():
        found += [{"name": name, "case": case, "plan": plan, "keys": keys, "device": "cpu"} for case in CASES if size == workers]
    return found


SYNC: dict[str, dict[str, Any]] = {
    "sync local": {"sync": "local", "sync_every": 2, "block_momentum": 0.5, "block_nesterov": True},
    "sync diloco": {"sync": "diloco", "sync_every": 4, "sync_fragments": 2, "outer_momentum": 0.6},
}


def simulated(keys: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """The loss and the weights of two replicas, one after the other in this process: plain steps, and `simulate`."""
    plain = {"lr": 0.02, "clip": 0.3, "optimizer": "adamw"}
    trainers = [cw.Trainer(model(tie=False), plain) for _ in range(2)]
    fragments = keys.get("sync_fragments", 1)

    def whole(parts: Sequence[Tensor], like: Iterable[Tensor]) -> list[Tensor]:
        taken = iter(parts)
        return [torch.cat([next(taken) for _ in range(fragments)]).view_as(each) for each in like]

    def parts(tensors: Iterable[Tensor]) -> list[Tensor]:
        cuts = [(each.detach().reshape(-1), fragment) for each in tensors for fragment in range(fragments)]
        return [flat[slice(*bounds(flat.numel(), fragment, fragments))].clone() for flat, fragment in cuts]

    @torch.enable_grad()
    def inner(weights: list[Tensor], replica: int, step: int) -> int:
        own = list(trainers[replica].model.parameters())
        with torch.no_grad():
            for parameter, value in zip(own, whole(weights, own), strict=True):
                parameter.copy_(value)
        part = batch(step - 1).take(2 * replica, 2 * replica + 2, pooled=False)
        trainers[replica].step(replace(part, part_of=None))
        for place, value in zip(weights, parts(own), strict=True):
            place.copy_(value)
        assert part.targets is not None
        return int((part.targets != -100).sum())

    def due(step: int, place: int) -> bool:
        return place % fragments in fragments_due(step, keys["sync_every"], fragments, last=step == SYNCED)

    momentum = keys.get("block_momentum", keys.get("outer_momentum", 0.0))
    names = [name for name, _ in trainers[0].model.named_parameters()]
    start = list(trainers[0].model.parameters())
    how = {"momentum": momentum, "nesterov": keys.get("block_nesterov", False)}
    found = whole(simulate(parts(start), inner, due, replicas=2, steps=SYNCED, mode=keys["sync"], **how), start)
    weights = dict(zip(names, found, strict=True))
    alone = model(tie=False)
    alone.load_state_dict(weights)
    return cw.Trainer(alone, plain).evaluate([batch(0)]), weights


@pytest.mark.parametrize("plan", [{}, pytest.param({"stages": 2, "chunk_steps": 2}, marks=pytest.mark.slow)], ids=["replicas", "2 x 2"])
def test_replicas_that_train_on_their_own(plan: dict[str, Any], tmp_path: Path) -> None:
    """`train.sync` in a loop of one's own, against its definition."""
    asked = [{"case": case, "plan": plan, "keys": keys, "device": "cpu"} for case, keys in SYNC.items()]
    told = reported_by(asked, 4 if plan else 2, tmp_path)
    for number, keys in enumerate(SYNC.values()):
        loss, weights = simulated(keys)
        for answers in told:
            assert "error" not in answers[number], answers[number]
            assert answers[number]["losses"] == pytest.approx([loss], rel=1e-9)  # float64
        for name, tensor in weights.items():
            # float64; Adam divides by the root of small squares.
            ours = torch.tensor(told[0][number]["tensors"][name], dtype=torch.float64)
            torch.testing.assert_close(ours, tensor, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "mapped"), [(2, False), (4, False), (2, True)], ids=["2", "4", "2 in shared memory"])
def test_parts_of_a_loop_compute_what_one_device_does(workers: int, mapped: bool, tmp_path: Path) -> None:
    asked = [job | {"mapped": mapped} for job in jobs(workers)]
    told = reported_by(asked, workers, tmp_path)
    alone = {case: train(case, {}, {}) for case in CASES}
    for number, job in enumerate(asked):
        where, wanted = f"{job['name']}: {job['case']}", alone[job["case"]]
        for rank in range(workers):
            found = told[rank][number]
            assert "error" not in found, (where, rank, found)
            assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-9), (where, rank)  # float64
            for name, values in found.get("gradients", {}).items():
                whole = torch.tensor(wanted["gradients"][name], dtype=torch.float64)
                own = torch.tensor(values, dtype=torch.float64)
                torch.testing.assert_close(
                    own, whole, rtol=1e-9, atol=1e-13, msg=lambda text, where=where, name=name: f"{where}: {name}: {text}"
                )
            if job["case"] == "profiled" and job["name"] == "2 stages, micro-batches":
                tasks = [name.replace("-", " ") for name in RANGES[rank].split()]
                assert found["ranges"] == sorted(["step", "sum of gradients", "update", *tasks])
        assert told[0][number]["tensors"].keys() == wanted["tensors"].keys()
        for name, values in wanted["tensors"].items():
            # float64, summed in another order; Adam divides by the root of small squares.
            ours = torch.tensor(told[0][number]["tensors"][name])
            torch.testing.assert_close(
                ours, torch.tensor(values), rtol=1e-8, atol=1e-10, msg=lambda text, where=where, name=name: f"{where}: {name}: {text}"
            )
