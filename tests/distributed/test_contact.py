"""Several processes: who is said to have gone, what trainers leave behind, and when workers of unlike devices look at what was computed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carrywave.parallel.startup.launcher_env import WorkerFile

Write = Callable[[str, str], str]


def workers(program: str, folder: Path, size: int, own: Callable[[int], dict[str, str]] = lambda rank: {}) -> list[tuple[int, str]]:
    """Run a program in so many processes that another launcher might have started: the exit code and stderr of each."""
    shared = {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    shared |= WorkerFile(one_host=True, store=folder / "store").write(folder / "worker.json")
    started = [
        subprocess.Popen(
            [sys.executable, program],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | own(rank),
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        for rank in range(size)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in started]
        return [(process.returncode, text) for process, text in zip(started, errors, strict=True)]
    finally:
        for process in started:
            process.kill()


def told(folder: Path, size: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


OWN_LOOP = """
    import json, os
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch import nn
    import carrywave as cw
    from carrywave.errors import ContactLost, WorkerError

    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    batch = cw.Batch.of(torch.ones(4, 6, 3), torch.ones(4, 6, 2))
    fails = False

    def loss(out, targets):
        if fails:
            raise ValueError("in the loss")
        return (out - targets).square().sum(), torch.tensor(float(targets.numel()))

    said = {"groups": []}
    for _ in range(5):
        trainer = cw.Trainer(model, {"lr": 0.1, "optimizer": "sgd"}, loss=loss, device="cpu")
        trainer.step(batch)
        said["groups"].append(sorted(dist.distributed_c10d._world.pg_names.values()))
    fails = rank == 1
    try:
        trainer.step(batch)
    except ContactLost as error:
        del trainer
        said |= {"lost": str(error), "rank": error.rank, "is": isinstance(error, RuntimeError)}
        Path(f"{rank}.json").write_text(json.dumps(said))
        raise
    except ValueError:
        try:
            trainer.step(batch)
        except WorkerError as error:
            Path(f"{rank}.json").write_text(json.dumps(said | {"again": str(error)}))
        raise
"""


@pytest.mark.slow
def test_trainers_leave_nothing_behind_and_who_failed_is_named_with_the_error(write: Write, tmp_path: Path) -> None:
    ended = workers(write("own.py", OWN_LOOP), tmp_path, 3)
    assert [code for code, _ in ended] == [1, 1, 1]
    for words in told(tmp_path, 3):
        assert all(each == words["groups"][0] for each in words["groups"])  # five trainers, the groups of one
    assert "ValueError: in the loss" in ended[1][1]
    assert "ended halfway" in told(tmp_path, 3)[1]["again"]  # nothing more is sent
    for rank in (0, 2):
        words, text = told(tmp_path, 3)[rank], ended[rank][1]
        assert words["rank"] == 1
        assert words["is"]
        assert words["lost"].startswith("contact with rank 1 on ")
        assert words["lost"].endswith("(its step failed with ValueError: in the loss); see that worker's output, then restart all workers")
        assert words["lost"] in text.splitlines()[-1]
