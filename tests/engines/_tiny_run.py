"""A small run in float64, and what it is compared by."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SPEC = """\
task: language
data: {train: text.txt, valid: text.txt, tokens: char}
model: {hidden: 8, layers: 2}
batch: {lanes: 4, steps: 16}
train: {epochs: 3, precision: fp64, snapshot_every: 15, seed: 3}
"""
TWO = ["plan.replicas=2"]
WAIT_SECONDS = 600  # a machine may be busy with other things
COMPARED = ("metrics.jsonl", "weights.safetensors")


def write(folder: Path) -> None:
    """The spec and its data."""
    words = random.Random(1).choices(["the", "carry", "moves", "a", "wave", "of", "time"], k=600)
    (folder / "text.txt").write_text(" ".join(words))
    (folder / "small.yaml").write_text(SPEC)


def environment(**variables: str) -> dict[str, str]:
    """That of this process without what belongs to a launcher, with one thread a worker: the reference has one too."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RAY_", "PYTEST"))}
    source = Path(__file__).parents[2] / "src"
    waits = {"CARRYWAVE_START_SECONDS": "240", "CARRYWAVE_HEARTBEAT_SECONDS": "0"}  # a busy machine, and workers that are held
    return kept | waits | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{source}:{kept.get('PYTHONPATH', '')}"} | variables


def command(*words: str, run: str) -> list[str]:
    return [sys.executable, "-m", "carrywave", "train", "small.yaml", *words, "--run", run, "--device", "cpu"]


def train(folder: Path, *words: str, run: str) -> None:
    ended = subprocess.run(command(*words, run=run), cwd=folder, env=environment(), capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert ended.returncode == 0, ended.stderr


def files(run: Path) -> list[bytes]:
    return [(run / name).read_bytes() for name in COMPARED]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def last_step(run: Path) -> int:
    """The step of a run's last snapshot, or 0."""
    try:
        found = re.match(r"step-(\d+)", (run / "snapshots" / "last").read_text())
    except OSError:
        return 0
    return 0 if found is None else int(found[1])


def wait_until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not true():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.05)


def workers(run: str, by: str = "RANK") -> dict[int, int]:
    """The processes that train this run, by rank: those that were started with this variable, and with the run in their command."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                variables = dict(each.partition(b"=")[::2] for each in (entry / "environ").read_bytes().split(b"\0"))
            except OSError:
                continue  # it has ended
            if run.encode() in words and by.encode() in variables:
                found[int(variables[by.encode()])] = int(entry.name)
    return found


@contextmanager
def held(run: str, until: signal.Signals, by: str = "RANK") -> Iterator[None]:
    """Hold the workers of a run until a signal has reached each of them, by however slow a way: the run must not end before."""
    pids = list(workers(run, by).values())
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
        wait_until(lambda: all(_pending(pid, until) for pid in pids), "the signal has come")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _pending(pid: int, number: int) -> bool:
    """True if this signal waits for a stopped process to go on."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("ShdPnd:")[2].split()[0], 16) >> (number - 1) & 1)
