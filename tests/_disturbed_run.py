"""Runs a real `carrywave train` command, injects faults into its workers at random moments, and reports the outcome.

Faults are timed by progress, not by the clock, so that all of them hit the run on any machine. A `step` fault strikes a few milliseconds
after a randomly drawn optimizer step, a `save` fault then also waits until a snapshot is being written, and a `restart` fault strikes after
the workers were restarted and before they train. Needs /proc.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import carrywave
from _ledger import FOLDER
from carrywave.errors import RunError
from carrywave.parallel.startup.environment import SHARE_GPU
from carrywave.parallel.startup.launcher_env import WORKER, WorkerFile

Moment = Literal["step", "save", "restart"]
# Drawn uniformly. Saves are aimed at explicitly, because a draft of a snapshot exists only briefly.
MOMENTS: tuple[Moment, ...] = ("step", "step", "save", "restart")
STEP_SECONDS = 0.03  # maximum delay of a fault after its step
RESTART_SECONDS = 3.0  # and after a restart of the workers
LATEST = 0.75  # fraction of the steps after which no fault is aimed, so that the last one does not miss the run
POLL_SECONDS = 0.001
LONGEST_SECONDS = 1800
ROWS = 24  # of the data; tokens per row:
SHORTEST, LONGEST = 20, 90
PROGRAM = (str(Path(__file__).with_name("_ledger.py")),)
SPEC = (
    "data.train=rows.jsonl",
    "data.valid=rows.jsonl",
    "model.hidden=8",
    "model.layers=2",
    "model.dropout=0.3",
    "batch.lanes=8",
    "batch.steps=4",
    "train.optimizer=adam",
    "train.snapshot_every=8",
    "train.log_every=5",
)


@dataclass(frozen=True)
class RunSetup:
    """The configuration of a run."""

    name: str
    devices: int
    words: tuple[str, ...] = ()
    steps: int = 150
    shares: int = 0  # of one GPU, for as many workers at most; 0: on the CPU


REPLICAS = RunSetup("2 replicas", 2)
STAGES = RunSetup("2 stages", 2, ("plan.stages=2", "plan.chunk_steps=2"))
KILLS = {REPLICAS: 20, STAGES: 20, RunSetup("4 replicas", 4): 5}  # of each in the table of benchmarks/faults.py


@dataclass
class Fault:
    """A fault injected into a worker and its consequences, timed by one monotonic clock."""

    moment: Moment
    rank: int
    at_step: int
    seconds: float
    noticed_seconds: float | None = None  # until the launcher reported it
    again_seconds: float | None = None  # until the next step was completed; None if another fault came first
    in_a_save: bool = False  # a snapshot was being written, as opposed to a draft left behind by a dead worker


@dataclass
class Outcome:
    """The outcome of a run."""

    code: int
    lines: list[str]  # stderr
    faults: list[Fault] = field(default_factory=list)
    out: str = ""

    @property
    def restarts(self) -> int:
        """How often the launcher reported restarting its workers."""
        return sum("restarting from" in line or "continuing with" in line for line in self.lines)


def write_data(folder: Path) -> None:
    """Write rows of different lengths in which every token occurs exactly once."""
    draw = random.Random(1)
    at = 0
    rows = []
    for _ in range(ROWS):
        count = draw.randrange(SHORTEST, LONGEST)
        rows.append(json.dumps({"tokens": list(range(at, at + count))}))
        at += count
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")


def command_words(setup: RunSetup, run: str) -> list[str]:
    """What follows `carrywave` on the command line."""
    device = "cuda" if setup.shares else "cpu"
    given = [*SPEC, f"train.max_steps={setup.steps}", "train.epochs=1000000", *setup.words]
    return ["train", *given, "--devices", str(setup.devices), "--device", device, "--run", run]


class Running:
    """A running training command: its workers, timestamped stderr lines, and ledger."""

    def __init__(self, folder: Path, run: str, setup: RunSetup, *words: str, program: Sequence[str] = PROGRAM) -> None:
        self.run = folder / run
        self.ledger = folder / f"{run}-ledger"
        self.ledger.mkdir(exist_ok=True)
        self.lines: list[tuple[float, str]] = []
        source = str(Path(carrywave.__file__).parents[1])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        shared = {SHARE_GPU: str(setup.shares)} if setup.shares else {}
        self.out = folder / f"{run}.out"
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *program, *command_words(setup, run), *words],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, FOLDER: str(self.ledger), **shared},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.lines.append((time.monotonic(), line.rstrip("\n")))

    def workers(self) -> dict[int, tuple[int, int]]:
        """(pid, attempt) of each live worker, by rank."""
        workers: dict[int, tuple[int, int]] = {}
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        except OSError:
            return {}
        for child in children:
            try:
                words = dict(word.split("=", 1) for word in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in word)
                state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, ValueError):
                continue
            if "RANK" in words and state != "Z":
                given = WorkerFile.model_validate_json(Path(words[WORKER]).read_bytes())
                workers[int(words["RANK"])] = (int(child), given.attempt)
        return workers

    def step(self, attempt: int) -> int:
        """The latest step completed by rank 0 in this attempt; 0 if there is none."""
        path = self.ledger / "0.jsonl"
        if not path.exists() or not path.stat().st_size:
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            newest = json.loads(file.read().rpartition(b"\n")[0].rpartition(b"\n")[2])
        return int(newest["step"]) if newest["attempt"] == attempt else 0

    def draft(self) -> bool:
        """True if there is a draft of a snapshot."""
        return any((self.run / "snapshots").glob(".*.tmp"))

    def alive(self) -> bool:
        """True while the process runs."""
        return self.process.poll() is None

    def wait(self) -> Outcome:
        """Wait for the run to end and return its outcome."""
        try:
            code = self.process.wait(LONGEST_SECONDS)
        finally:
            self.end()
        return Outcome(code, [line for _, line in self.lines], out=self.out.read_text())

    def end(self) -> None:
        """Kill the command and its workers if they are still running."""
        if self.process.poll() is None:
            workers = self.workers()
            self.process.kill()
            for pid, _ in workers.values():
                os.kill(pid, signal.SIGKILL)
            self.process.wait()
        self._reader.join()


def calm(folder: Path, setup: RunSetup) -> Outcome:
    """Run without faults."""
    return Running(folder, "calm", setup).wait()


def disturbed(
    folder: Path,
    setup: RunSetup,
    faults: int,
    *,
    seed: int,
    run: str = "disturbed",
    number: signal.Signals = signal.SIGKILL,
    moments: Sequence[Moment] = MOMENTS,
    program: Sequence[str] = PROGRAM,
) -> Outcome:
    """Run with this many faults, one after another. The launcher, which restarts the workers, is never a target."""
    draw = random.Random(seed)
    running = Running(folder, run, setup, "--restarts", str(faults + 1), program=program)
    aims = sorted(draw.randrange(1, int(LATEST * setup.steps)) for _ in range(faults))
    done: list[Fault] = []
    try:
        for aim in aims:
            moment = draw.choice(moments) if done else "step"  # the workers are restarted only after a first fault
            done.append(harm(running, setup.devices, len(done), draw, aim, moment, number))
        outcome = running.wait()
    finally:
        running.end()
    _add_times(running, done)
    outcome.faults = done
    return outcome


def _until(running: Running, what: str) -> Iterator[None]:
    deadline = time.monotonic() + LONGEST_SECONDS
    while running.alive():
        if time.monotonic() > deadline:
            break
        yield
        time.sleep(POLL_SECONDS)
    last = "; ".join(line for _, line in running.lines[-2:])
    raise RunError(f"the run ended or hung before {what} ({last}); see {running.run / 'logs'}")


def harm(
    running: Running,
    devices: int,
    attempt: int,
    draw: random.Random,
    aim: int,
    moment: Moment,
    number: signal.Signals,
    *,
    rank: int | None = None,
) -> Fault:
    """Wait for all workers of this attempt and for the chosen moment, then signal one of them, at random unless `rank` is given."""
    for _ in _until(running, f"attempt {attempt} began"):
        workers = running.workers()
        if len(workers) == devices and all(at == attempt for _, at in workers.values()):
            break
    rank = draw.randrange(devices) if rank is None else rank
    if moment == "restart":
        until = time.monotonic() + draw.uniform(0.0, RESTART_SECONDS)
        for _ in _until(running, "the chosen moment"):
            if time.monotonic() > until or running.step(attempt):
                break
    else:
        for _ in _until(running, f"step {aim}"):
            if running.step(attempt) >= aim:
                break
        time.sleep(draw.uniform(0.0, STEP_SECONDS))
    if moment == "save":
        for _ in _until(running, "a snapshot began"):
            if running.draft():
                break
    fault = Fault(moment, rank, running.step(attempt), time.monotonic(), in_a_save=moment != "restart" and running.draft())
    try:
        os.kill(workers[rank][0], number)
    except ProcessLookupError:
        raise RunError(f"worker {rank} ended before it could be signalled; give the run more steps") from None
    return fault


def _add_times(running: Running, faults: list[Fault]) -> None:
    """Record when each fault was noticed and when the next step was completed, unless another fault came first."""
    reported = [seconds for seconds, line in running.lines if "restarting from" in line]
    steps = [row["seconds"] for row in rows_of(running.ledger / "0.jsonl")]
    for number, fault in enumerate(faults):
        until = faults[number + 1].seconds if number + 1 < len(faults) else float("inf")
        noticed = [seconds for seconds in reported if fault.seconds < seconds < until]
        # A step already in progress may still complete after the fault, so count from when the fault was noticed.
        again = [seconds for seconds in steps if noticed and noticed[0] < seconds < until]
        fault.noticed_seconds = noticed[0] - fault.seconds if noticed else None
        fault.again_seconds = again[0] - fault.seconds if again else None


def rows_of(path: Path) -> list[Any]:
    """The rows of one worker's ledger, in the order written."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained_on(ledger: Path, stages: int) -> dict[int, Counter[tuple[int, int]]]:
    """How often each step (sequence, place) of the data was trained on, by epoch. Of steps repeated after a restart, only the last counts.

    The stages of a replica work on the same lanes, so their ledgers must agree.
    """
    counts: dict[int, Counter[tuple[int, int]]] = {}
    for path in sorted(ledger.glob("*.jsonl")):
        kept: dict[int, Any] = {}
        for row in rows_of(path):
            for later in [step for step in kept if step >= row["step"]]:
                del kept[later]
            kept[row["step"]] = row
        if sorted(kept) != list(range(1, len(kept) + 1)):
            raise RunError(f"{path} does not record every step; the ledger cannot be used")
        for row in kept.values():
            for epoch, lanes in row["windows"]:
                for _, sequence, offset, length in lanes:
                    counts.setdefault(epoch, Counter()).update((sequence, place) for place in range(offset, offset + length))
    for counter in counts.values():
        for place, times in counter.items():
            if times % stages:
                raise RunError(f"step {place} of the data was seen {times} times by {stages} stages; the stages do not agree")
            counter[place] = times // stages
    return counts


def each_once(ledger: Path, stages: int) -> bool:
    """True if every step of the data was trained on exactly once in each complete epoch, and at most once in the last."""
    epochs = trained_on(ledger, stages)
    whole = set(epochs[0])
    finished = all(set(epochs[epoch]) == whole for epoch in range(len(epochs) - 1))
    return finished and all(times == 1 for counter in epochs.values() for times in counter.values())


def contents(run: Path) -> dict[str, bytes]:
    """The files that must match byte for byte: the best weights, the metrics, and all tensors of the last snapshot."""
    last = run / "snapshots" / (run / "snapshots" / "last").read_text().strip()
    files = [run / "weights.safetensors", run / "metrics.jsonl", last.with_name(f"{last.name}.safetensors")]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}
