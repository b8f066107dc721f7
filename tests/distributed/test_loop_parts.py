"""Averages of weights, and gradients apart from updates, in a user's own loop on several workers: what one device computes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import _warm

sys.path.insert(0, str(Path(__file__).parent))
from _loop_parts import train

WORKER = Path(__file__).with_name("_loop_parts.py")
SPLIT = {"replicas": 2, "split_vocabulary": True}
PIECES = {"shard_optimizer": True}
CASES = ("ema", "ema, tied", "averaged", "gradients", "sam", "profiled")
RANGES = {  # of the stages of "2 stages, micro-batches", besides those of every step
    0: "F0a F1a F0b F1b B1a B0a B1b B0b Wa Wb send-F0a send-F1a send-F0b send-F1b wait-B1a wait-B0a wait-B1b wait-B0b",
    1: "F0a F1a F0b F1b B1a B0a B1b B0b Wa Wb wait-F0a wait-F1a wait-F0b wait-F1b send-B1a send-B0a send-B1b send-B0b",
}
JOBS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "2 replicas, divided optimizer": (2, {}, PIECES),
    "2 replicas, split vocabulary": (2, SPLIT, {}),
    "2 stages, micro-batches": (2, {"stages": 2, "micro_batches": 2, "chunk_steps": 4}, {}),
    "4 replicas": (4, {}, {}),
    "2 x 2": (4, {"stages": 2, "chunk_steps": 4}, {}),
    "2 x 2, divided optimizer": (4, {"stages": 2, "chunk_steps": 2}, PIECES),
}


def jobs(workers: int) -> list[dict[str, Any]]:
    found = []
    for name, (size, plan, keys) in JOBS.items():
        found += [{"name": name, "case": case, "plan": plan, "keys": keys, "device": "cpu"} for case in CASES if size == workers]
    return found


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_of_a_loop_compute_what_one_device_does(workers: int, tmp_path: Path) -> None:
    asked = jobs(workers)
    (tmp_path / "jobs").write_text(json.dumps(asked))
    ended = _warm.start([sys.executable, str(WORKER), str(tmp_path), "jobs"], workers)
    assert ended.code == 0, ended
    told = [json.loads((tmp_path / f"jobs.{rank}.out").read_text()) for rank in range(workers)]
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
                if own.shape != whole.shape:  # the rows of a split vocabulary
                    own, whole = own, whole[rank * len(own) : (rank + 1) * len(own)]
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
