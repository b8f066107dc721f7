"""Workers that die, stop or hang: they are started again, go on by themselves, and end with what an undisturbed run ends with."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from carrywave.launch.exit_reports import Ended
from carrywave.launch.launcher import Patience, start
from carrywave.runs.watcher import Silent
from carrywave.spec.load import load
from carrywave.train.fit import train as train_here

Write = Callable[[str, str], str]
Run = Callable[..., subprocess.CompletedProcess[str]]
DIES = str(Path(__file__).with_name("_dies.py"))

# Workers without torch: what is decided, and what is said.

PROLOGUE = """
import os, signal, sys, time
from pathlib import Path
from carrywave.launch import launch_record
from carrywave.launch import exit_reports
from carrywave.parallel.liveness import failure_file
from carrywave.parallel.startup.launcher_env import worker_file
rank, attempt, place = int(os.environ["RANK"]), worker_file().attempt, worker_file().device(int(os.environ["LOCAL_RANK"]))
here = Path(os.environ["HERE"])

def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
    time.sleep(60)

def snapshot(number):
    folder = here / "run" / "snapshots"
    folder.mkdir(parents=True, exist_ok=True)
    exit_reports.report_run(here / "run")
    (folder / "last").write_text(f"step-{number:08d}\\n")

def fail(kind, code, message):
    failure_file.leave(failure_file.folder(), kind, code, message, ValueError(message), with_trace=kind == "fault")
    sys.exit(code)
"""


class Launched:
    def __init__(self, ended: Ended, said: list[str]) -> None:
        self.ended, self.said = ended, said


@pytest.fixture
def launch(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launched]:
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("CARRYWAVE_HEARTBEAT_SECONDS", "1.5")

    def run(text: str, devices: int = 2, restarts: int = 2, min_devices: int | None = None) -> Launched:
        said: list[str] = []
        command = [sys.executable, write("worker.py", PROLOGUE + text)]
        return Launched(start(command, devices, Patience(restarts, min_devices), say=said.append), said)

    return run


def test_a_worker_that_dies_is_replaced(launch: Callable[..., Launched], tmp_path: Path) -> None:
    done = launch("if attempt == 0:\n    rank and die()\n    time.sleep(60)\nprint('attempt', attempt, 'rank', rank)")
    assert done.ended == Ended(0)
    assert done.said == ["worker 1 of 2 was killed (signal 9, SIGKILL); restarting from the beginning (restart 1 of 2)"]


@pytest.mark.slow
def test_what_workers_print_is_kept(launch: Callable[..., Launched], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = """
rank or snapshot(3)
print("out", rank, attempt, flush=True)
print("err", rank, attempt, file=sys.stderr, flush=True)
rank and fail("fault", 1, "oops")
time.sleep(60)
"""
    done = launch(text)
    logs = tmp_path / "run" / "logs"
    assert done.ended.logs == logs / "attempt-1"
    for attempt in range(2):
        [log] = (logs / f"attempt-{attempt}").iterdir()  # rank 0 writes to the screen
        assert log.name == "rank-1.log"
        assert log.read_text().startswith(f"out 1 {attempt}\nerr 1 {attempt}\n")
        assert "ValueError: oops" in log.read_text()
    out, err = capfd.readouterr()
    assert (out.splitlines(), err.splitlines()) == (["out 0 0", "out 0 1"], ["err 0 0", "err 0 1"])


def test_asked_to_stop_while_starting_again(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a snapshot, so that this is an end in good order, though no step was taken since."""
    monkeypatch.setenv("HERE", str(tmp_path))
    wait = "    while not (here / 'run/snapshots/last').is_file():\n        time.sleep(0.01)\n"
    text = f"if attempt == 0:\n    rank or snapshot(5)\n{wait}    die()\n" + "(here / f'there-{rank}').touch()\ntime.sleep(60)"
    command = [sys.executable, write("worker.py", PROLOGUE + text)]
    parent = f"from carrywave.launch.launcher import Patience, start\nimport sys\nsys.exit(start({command!r}, 2, Patience(3)).code)\n"
    process = subprocess.Popen([sys.executable, write("parent.py", parent)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("there-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 75
    assert err.count("\n") == 1
    assert "restarting from step 5 (restart 1 of 3)" in err


# OpaqueModel runs.

FROM = r"from (the beginning|step \d+)"

TEXT = "the carry is passed along, and work moves through layers and time as a wave. " * 40
SPEC = [
    "data.train=text.txt",
    "data.tokens=char",
    "model.hidden=16",
    "model.layers=2",
    "model.dropout=0.3",
    "batch.lanes=4",
    "batch.steps=16",
]
SPEC += [
    "train.epochs=2",
    "train.max_steps=60",
    "train.snapshot_every=5",
    "train.log_every=4",
    "train.precision=fp64",
    "train.optimizer=adam",
]


def train(
    folder: Path, run: str, *words: str, devices: int = 2, die: dict[str, list[object]] | None = None, **how: int
) -> tuple[Ended, list[str]]:
    """A run whose workers may harm themselves, and what is said meanwhile."""
    said: list[str] = []
    command = [sys.executable, DIES, "train", *SPEC, *words, "--device", "cpu", "--run", run]
    environment = {"DIE": json.dumps(die or {})}
    return start(command, devices, Patience(how.get("restarts", 3), how.get("min_devices")), environment=environment, say=said.append), said


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(run: Path) -> dict[str, bytes]:
    """What must be equal, byte for byte: the best weights, the rows, and all of the last snapshot."""
    last = run / "snapshots" / (run / "snapshots" / "last").read_text().strip()
    files = [run / "weights.safetensors", run / "metrics.jsonl", last.with_name(f"{last.name}.safetensors")]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


@pytest.mark.slow
def test_killed_stages_do_not_change_the_answer(folder: Path) -> None:
    plan = ["plan.stages=2", "plan.chunk_steps=4"]
    assert train(folder, "calm", *plan)[0] == Ended(0)
    ended, said = train(folder, "killed", *plan, die={"0": [0, 8, "SIGKILL"], "1": [1, 11, "SIGSTOP"], "2": [1, 13, "SIGSEGV"]})
    assert ended == Ended(0)
    assert [line.partition(";")[0].rpartition("signal")[2] for line in said[::2]] == [" 9, SIGKILL)", " 11, SIGSEGV)"]
    assert "worker 1 of 2 gave no sign of life" in said[1]
    assert contents(folder / "killed") == contents(folder / "calm")


@pytest.mark.slow
def test_one_worker_is_watched_where_that_is_asked_for(folder: Path, python: Run) -> None:
    words = [DIES, "train", *SPEC, "--device", "cpu", "--run", "run"]
    ended = python(*words, "--restarts", "2", DIE='{"0": [0, 8, "SIGKILL"]}')
    assert ended.returncode == 0, ended.stderr
    said = rf"carrywave: worker 0 of 1 was killed \(signal 9, SIGKILL\); restarting {FROM} \(restart 1 of 2\)\n"
    assert re.fullmatch(said, ended.stderr)
    assert python(*words[:-1], "calm", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0").returncode == 0
    assert contents(folder / "run") == contents(folder / "calm")


@pytest.mark.slow
def test_an_error_is_one_line_and_a_log(folder: Path, python: Run) -> None:
    words = [DIES, "train", *SPEC, "--device", "cpu", "--run", "run", "--devices", "2", "--json", "rows.json"]
    ended = python(*words, DIE='{"0": [1, 8, "ValueError"], "1": [1, 3, "ValueError"]}')
    assert ended.returncode == 1
    first, second = ended.stderr.splitlines()
    assert re.fullmatch(rf"carrywave: worker 1: ValueError: oops; restarting {FROM} \(restart 1 of 3\)", first)
    assert second == "carrywave: worker 1: ValueError: oops; it failed again at the same point; full logs: run/logs/attempt-1"
    assert "raise ValueError" in (folder / "run" / "logs" / "attempt-1" / "rank-1.log").read_text()
    again = python(*words)
    assert again.returncode == 2  # another launch: the folder is not its own
    assert "run already exists and is not empty; use --resume to continue it" in again.stderr


@pytest.mark.slow
def test_a_script_is_started_again(folder: Path, python: Run, write: Write) -> None:
    text = """
    import os, signal
    import carrywave as cw
    from carrywave.launch import launch_record
    from carrywave.step.trainer import Trainer

    if os.environ.get("RANK") == "1" and launch_record.attempt() == 0:
        Trainer.update = lambda self, *batches: os.kill(os.getpid(), signal.SIGKILL)
    run = cw.fit({"hidden": 8}, None, task="language", data={"train": "text.txt", "tokens": "char"}, devices=2, device="cpu",
                 batch={"lanes": 4, "steps": 8}, train={"max_steps": 4})
    print(run.run, run.ending)
    """
    ended = python(write("script.py", text))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["runs/language-1 done"]
    assert "worker 1 of 2 was killed (signal 9, SIGKILL); restarting from the beginning (restart 1 of 3)" in ended.stderr
    assert [path.name for path in (folder / "runs").iterdir()] == ["language-1"]


# Signals.

LONG = [*[word for word in SPEC if "max_steps" not in word and "epochs" not in word], "train.epochs=100000", "train.evaluate_every=1000000"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--", "carrywave"]


def running(words: list[str], folder: Path) -> subprocess.Popen[str]:
    """A run that has written a snapshot."""
    command = [sys.executable, *words, "train", *LONG, "--device", "cpu", "--run", "run"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not (folder / "run" / "snapshots" / "last").is_file() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("plan", [[], ["--devices", "2"], ["--devices", "2", "plan.stages=2"]], ids=["serial", "replicas", "stages"])
def test_a_signal_stops_in_good_order(number: signal.Signals, plan: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LONG", [*LONG, *plan])
    process = running(["-m", "carrywave"], folder)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (75, "")
    step = int(out.rpartition("terminated at step ")[2].partition(";")[0])
    assert (folder / "run" / "snapshots" / "last").read_text().startswith(f"step-{step:08d}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_torchrun_passes_a_signal_on_or_its_workers_notice(number: signal.Signals, folder: Path) -> None:
    """Killed, it takes with it the store in which the workers would wait for the snapshot."""
    process = running(TORCHRUN, folder)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert "carrywave:" not in err
    step = int(out.rpartition("terminated at step ")[2].partition(";")[0])
    assert (folder / "run" / "snapshots" / "last").read_text().startswith(f"step-{step:08d}")


class Late(Silent):
    """Hears of the request when everything is written, as a worker does that learns by itself that its launcher is gone."""

    def end(self, line: str) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_request_that_comes_last_changes_nothing(folder: Path) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the run was left to whoever handles the signal otherwise"))
    try:
        spec = load(None, [*SPEC, "train.max_steps=2"])
        assert train_here(spec, run=folder / "run", device="cpu", watch=Late()).ending == "done"
    finally:
        signal.signal(signal.SIGTERM, before)


def workers_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids by rank, of all that a process has started, itself or through others."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = dict(word.split("=", 1) for word in (folder / "environ").read_text().split("\0") if "=" in word)
        except (OSError, ValueError, IndexError):
            continue
        if parent == process.pid and "RANK" in words:
            found[int(words["RANK"])] = int(folder.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_torchrun_restarts_and_the_run_goes_on(rank: int, number: signal.Signals, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setenv("CARRYWAVE_HEARTBEAT_SECONDS", "5")
    process = running([*TORCHRUN[:4], "--max-restarts=2", *TORCHRUN[4:]], folder)
    before = workers_of(process)
    os.kill(before[rank], number)
    deadline = time.monotonic() + 300
    while workers_of(process).get(rank) in (before[rank], None) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    last = folder / "run" / "snapshots" / "last"
    at = last.read_text()
    while last.read_text() == at and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    out, err = process.communicate(timeout=300)
    assert "resuming from step" in out
    assert "terminated at step" in out
    assert ("gave no sign of life" in err) == (number == signal.SIGSTOP)


@pytest.mark.slow
def test_under_torchrun_an_error_has_a_log(folder: Path, python: Run) -> None:
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--",
        DIES,
        "train",
        *SPEC,
        "--device",
        "cpu",
        "--run",
        "run",
    ]
    ended = python(*words, DIE='{"0": [1, 8, "ValueError"]}')
    ours = [line for line in ended.stderr.splitlines() if line.startswith("carrywave:")]
    assert "carrywave: rank 1: ValueError: oops; full log: run/logs/attempt-0/rank-1.log" in ours
    assert "raise ValueError" not in ended.stderr
    assert "raise ValueError" in (folder / "run" / "logs" / "attempt-0" / "rank-1.log").read_text()


# The closed door.

LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")  # 127.0.0.1, ::1, and the one in the other


def listening(pid: int) -> list[str]:
    """Addresses, in the kernel's notation, on which a process listens."""
    handles = Path(f"/proc/{pid}/fd")
    own = {os.readlink(handle) for handle in handles.iterdir() if handle.is_symlink()}
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] in ("0A", "07") and f"socket:[{words[9]}]" in own:  # listening; of udp, open to all
                found.append(words[1].split(":")[0])
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("plan", [[], ["plan.stages=2"]], ids=["replicas", "stages"])
def test_a_local_run_listens_on_loopback_alone(plan: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LONG", [*LONG, *plan, "--devices", "2"])
    process = running(["-m", "carrywave"], folder)
    workers = workers_of(process)
    assert sorted(workers) == [0, 1]
    try:
        for pid in workers.values():
            addresses = listening(pid)
            assert addresses  # gloo listens for its peers
            assert set(addresses) <= set(LOOPBACK)
        assert listening(process.pid) == []
    finally:
        process.terminate()
        process.communicate(timeout=300)
