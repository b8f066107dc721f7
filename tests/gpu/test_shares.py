"""Shares of the GPU that is there: what each sees of it, what comes of the daemon behind them, and whole runs on two of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import carrywave
from benchmarks.shares.mps import TOOL, shares

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which(TOOL) is None, reason=f"{TOOL} is not here"),
]

SEES = "import torch; print(torch.cuda.get_device_properties(0).multi_processor_count, float(torch.ones(8, device='cuda').sum()))"
STAYS = """
import torch
x = torch.ones(8, device="cuda").sum()
print(x.item(), flush=True)
input()
print((x + torch.ones((), device="cuda")).item())
"""


@pytest.fixture(autouse=True)
def _as_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARRYWAVE_SHARE_GPU", raising=False)
    paths = [str(Path(carrywave.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def child(program: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def daemons(folder: str) -> set[int]:
    """The process ids of the daemon with this folder, and of the servers that it says it has."""
    pids = {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if _is_daemon(path, folder)}
    if not pids:
        return pids
    pipes = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": folder}
    told = subprocess.run([TOOL], input="get_server_list\n", env=pipes, capture_output=True, text=True, check=True)
    return pids | {int(word) for word in told.stdout.split()}


def _is_daemon(environ: Path, folder: str) -> bool:
    try:
        program = environ.with_name("cmdline").read_bytes().partition(b"\0")[0]
        return TOOL.encode() in program and folder.encode() in environ.read_bytes()
    except OSError:
        return False  # gone by now, or not ours to read


def alive(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        with suppress(OSError):
            if "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                found.add(pid)
    return found


@pytest.mark.parametrize(("count", "percent"), [(2, None), (4, None), (1, 50)])
def test_each_sees_its_part_of_the_multiprocessors(count: int, percent: int | None) -> None:
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    part = whole * (percent or 100 // count) // 100
    with shares(count, percent) as environment:
        crew = [child(SEES, environment) for _ in range(count)]
        for seen, total in (process.communicate()[0].split() for process in crew):
            assert part - 2 <= int(seen) <= part  # they come in pairs
            assert float(total) == 8
        pids = daemons(environment["CUDA_MPS_PIPE_DIRECTORY"])
        assert len(alive(pids)) == 2  # the daemon and its server
    assert alive(pids) == set()
    assert not Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).exists()


def test_a_worker_that_is_killed_does_not_hurt_the_others_or_those_that_follow() -> None:
    with shares(2) as environment:
        one, other = (child(STAYS, environment) for _ in range(2))
        for process in (one, other):
            assert process.stdout is not None
            assert process.stdout.readline() == "8.0\n"
        one.send_signal(signal.SIGKILL)
        one.communicate()
        assert other.communicate("\n")[0] == "9.0\n"
        assert child(STAYS, environment).communicate("\n")[0] == "8.0\n9.0\n"


HOLDS = """
import os, subprocess, sys, time
from benchmarks.shares.mps import shares
with shares(2) as environment:
    subprocess.run([sys.executable, "-c", "import torch; torch.ones(1, device='cuda')"], env=os.environ | environment, check=True)
    print(environment["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
    time.sleep(600)
"""


def test_the_daemon_and_its_server_end_with_a_process_that_is_killed() -> None:
    process = child(HOLDS, {})
    assert process.stdout is not None
    folder = process.stdout.readline().strip()
    pids = daemons(folder)
    assert len(alive(pids)) == 2
    process.kill()
    process.communicate()
    while Path(folder).exists() or alive(pids):
        time.sleep(0.05)  # the test's own time limit ends this


@pytest.mark.parametrize("plan", ["plan.stages=2", "plan.replicas=2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_on_two_shares(plan: str, precision: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 40)
    words = ["data.train=text.txt", "data.tokens=char", "model.hidden=64", "model.layers=2", "batch.lanes=8", "batch.steps=32"]
    words += ["train.epochs=2", f"train.precision={precision}", plan, "--run", "run", "--device", "cuda"]
    command = [sys.executable, "-m", "carrywave", "train", *words, "--devices", "2"]
    with shares(2) as shared:
        environment = os.environ | shared
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=500, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
