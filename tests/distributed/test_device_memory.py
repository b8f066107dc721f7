"""Several processes whose messages are in memory that they share: what comes of a neighbour that dies, fails or does not answer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from carrywave.launch import supervisor
from carrywave.launch.exit_reports import Ended
from carrywave.launch.launcher import Patience, start
from carrywave.parallel.startup.launcher_env import WorkerFile

Write = Callable[[str, str], str]

HERE = Path(__file__).parent
PROGRAM = HERE / "_device_memory.py"
SPEC = [
    *("data.train=text.txt", "data.tokens=char", "model.hidden=8", "model.layers=2", "model.dropout=0.3", "batch.lanes=4", "batch.steps=8"),
    *("train.max_steps=30", "train.snapshot_every=5", "train.log_every=5", "plan.stages=2", "plan.chunk_steps=4"),
]
IN_TRAINING = 120  # a signal that is raised after the first snapshot: there are about 14 in a step


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("the carry is passed along, and work moves through layers and time as a wave. " * 40)
    monkeypatch.chdir(tmp_path)


def train(run: str, harm: str = "{}", *, restarts: int = 0, **environment: str) -> tuple[Ended, list[str]]:
    """How a run of two stages ended, and what was said of restarts."""
    said: list[str] = []
    command = [sys.executable, str(PROGRAM), "train", *SPEC, "--device", "cpu", "--run", run]
    ended = start(command, 2, Patience(restarts), environment={"HARM": harm, **environment}, say=said.append)
    return ended, said


def log(run: str, rank: int) -> str:
    return Path(run, "logs", "attempt-0", f"rank-{rank}.log").read_text()


@pytest.mark.slow
def test_a_run_goes_on_after_a_worker_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbour says whom it lost, if it is given the time, and not that its device failed."""
    monkeypatch.setattr(supervisor, "DEATH_SECONDS", 60.0)
    ended, said = train("run", f'{{"0": [1, {IN_TRAINING}, "SIGKILL"]}}', restarts=1)
    assert (ended.code, ended.message) == (0, "")
    assert [re.sub(r"step \d+", "step N", line) for line in said] == [
        "worker 1 of 2 was killed (signal 9, SIGKILL); restarting from step N (restart 1 of 1)"
    ]
    how = r"\(CUDA error: unspecified launch failure\)"
    assert re.search(
        rf"contact with rank 1 on \S+ was lost at [\d:]+ {how}; see that worker's output, then restart all workers", log("run", 0)
    )
    assert train("calm") == (Ended(0), [])
    assert Path("run/weights.safetensors").read_bytes() == Path("calm/weights.safetensors").read_bytes()
    assert Path("run/metrics.jsonl").read_bytes() == Path("calm/metrics.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("exit", 7, "worker 1 of 2 exited with code 7; see its output for the reason"),
        ("ValueError", 1, "worker 1: ValueError: oops"),
        ("CUDA error", 1, "worker 1: AcceleratorError: CUDA error: an illegal memory access was encountered\n"),
        ("SIGABRT", 1, "worker 1 of 2 was killed (signal 6, SIGABRT)"),
    ],
    ids=["exit", "raise", "device", "abort"],
)
def test_the_one_that_failed_is_the_cause(how: str, code: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEATH_SECONDS", "FAULT_SECONDS", "GRACE_SECONDS"):
        monkeypatch.setattr(supervisor, name, 60.0)
    ended, _ = train("run", f'{{"0": [1, {IN_TRAINING}, "{how}"]}}')
    assert ended.code == code
    assert ended.message.startswith(message)
    assert bool(ended.trace) == (how in ("ValueError", "CUDA error"))
    assert "contact with rank 1 on " in log("run", 0)


@pytest.mark.slow
def test_a_message_that_does_not_come_though_everybody_lives() -> None:
    ended, _ = train("run", f'{{"0": [1, {IN_TRAINING}, "sleep"]}}', PATIENCE_SECONDS="4", CARRYWAVE_TIMEOUT_SECONDS="4")
    assert (ended.code, ended.died, ended.trace) == (1, True, "")
    assert re.fullmatch(
        r"a message between devices did not come within 4 s, until [\d:]+, though no worker of this host has ended; restart all workers, "
        r"and if one may take that long, set CARRYWAVE_TIMEOUT_SECONDS",
        ended.message,
    )


OWN_LOOP = """
    import atexit, os, sys
    import torch
    from torch import nn
    import carrywave as cw
    sys.path.insert(0, {here!r})
    import _device_memory

    _device_memory.install()
    torch.manual_seed(0)

    class Head(nn.Linear):
        def loss(self, x, targets):
            return (self(x) - targets).square().sum(), torch.tensor(float(targets.numel()))

    model = cw.Model(nn.Linear(3, 4), cw.LSTM(4, 4, num_layers=2), Head(4, 2))
    trainer = cw.Trainer(model, {{"lr": 0.1}}, plan={{"stages": 2}}, device="cpu")
    batch = cw.Batch.of(torch.ones(4, 6, 3), torch.ones(4, 6, 2))
    atexit.register(print, "torn down", file=sys.stderr)
    for step in range(3):
        trainer.step(batch)
    if os.environ["RANK"] == "1":
        _device_memory.harm("SIGKILL")
    raise _device_memory.device_error("an illegal memory access was encountered")  # as float(loss) does
"""


@pytest.mark.slow
def test_an_error_outside_of_a_step_is_explained_in_a_loop_of_ones_own(write: Write, tmp_path: Path) -> None:
    shared = {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    shared |= WorkerFile(one_host=True, store=tmp_path / "store").write(tmp_path / "worker.json")
    command = [sys.executable, write("own.py", OWN_LOOP.format(here=str(HERE)))]
    own = [os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    workers = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for environment in own]
    errors = [worker.communicate(timeout=120)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [1, -9], errors
    lines = errors[0].splitlines()
    assert any(line.endswith("AcceleratorError: CUDA error: an illegal memory access was encountered") for line in lines)
    found = r"carrywave: rank 0: contact with rank 1 on \S+ was lost at .*; see that worker's output, then restart all workers"
    assert re.fullmatch(found, lines[-1])
