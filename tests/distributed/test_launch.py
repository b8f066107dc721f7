"""Workers that this package starts: who they are, how signals reach them, and how they end as one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import _warm
from carrywave.launch import supervisor
from carrywave.launch.exit_reports import Ended
from carrywave.launch.launcher import Patience, start

Write = Callable[[str, str], str]
Run = Callable[..., subprocess.CompletedProcess[str]]

# Workers without torch: these tests are about processes. Where contact is lost, it takes torch.


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made, to see that they go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def worker(text: str, write: Write) -> list[str]:
    lines = ["import os, signal, sys, time", "from pathlib import Path", "rank = int(os.environ['RANK'])", *text.splitlines()]
    return [sys.executable, write("worker.py", "\n".join(lines) + "\n")]


def test_workers_learn_who_they_are(write: Write, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    monkeypatch.setenv("OTHER", "kept")
    text = f"import json; Path({str(tmp_path)!r}, f'{{rank}}.json').write_text(json.dumps(dict(os.environ)))"
    assert start(worker(text, write), 2, environment={"MORE": "told"}) == Ended(0)
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert [told[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == [str(rank), str(rank), "2", "2"]
        assert [told[name] for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "OTHER", "MORE")] == ["7", "mine", "kept", "told"]
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("sys.exit(0)", Ended(0)),
        ("sys.exit(75)", Ended(75)),
        ("sys.exit(130)", Ended(130)),
        ("sys.exit(74 * rank)", Ended(74, "worker 1 of 2 exited with code 74; see its output for the reason")),
        ("sys.exit(3 * rank)", Ended(3, "worker 1 of 2 exited with code 3; see its output for the reason")),
        ("rank and os.kill(os.getpid(), signal.SIGSEGV)", Ended(1, "worker 1 of 2 was killed (signal 11, SIGSEGV)")),
    ],
)
def test_exit_codes_pass_through(text: str, end: Ended, write: Write) -> None:
    assert start(worker(text, write), 2) == end


def test_a_worker_that_does_not_end_by_itself_is_ended(write: Write, monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.2)
    text = "rank or signal.signal(signal.SIGTERM, signal.SIG_IGN)\nrank and sys.exit(3)\ntime.sleep(600)"
    assert start(worker(text, write), 2).code == 3
    assert list(temporary.iterdir()) == []


def test_the_others_are_left_to_write_their_snapshot(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.1)
    text = f"rank and sys.exit(75)\ntime.sleep(1)\nPath({str(tmp_path)!r}, 'snapshot').touch()\nsys.exit(75)"
    assert start(worker(text, write), 2) == Ended(75)
    assert (tmp_path / "snapshot").exists()


def started(write: Write, tmp_path: Path, worker_text: str) -> subprocess.Popen[str]:
    """A process that starts two workers and says how they ended, once both have said that they are there.

    It minds every signal, whatever the tests run under: nohup ignores SIGHUP, and a shell SIGINT of what it puts into the background.
    """
    command = worker(worker_text, write)
    mind = "import signal, sys\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    run = f"from carrywave.launch.launcher import start\nend = start({command!r}, 2)\nprint(end.message)\nsys.exit(end.code)\n"
    parent = write("parent.py", mind + run)
    process = subprocess.Popen([sys.executable, parent], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("there-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


STOPS = """
got = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, lambda number, frame: got.append(number))
Path(f"there-{rank}").touch()
while not got:
    time.sleep(0.01)
time.sleep(0.5 * (1 - rank))
Path(f"got-{rank}").write_text(str(got))
sys.exit(130 if signal.SIGINT in got else 75)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 75)])
def test_a_signal_is_passed_on_once_and_their_end_awaited(number: signal.Signals, code: int, write: Write, tmp_path: Path) -> None:
    process = started(write, tmp_path, STOPS)
    process.send_signal(number)
    if number != signal.SIGINT:
        process.send_signal(number)  # its echo
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "\n")
    assert [(tmp_path / f"got-{rank}").read_text() for rank in range(2)] == [str([int(number)])] * 2


ORPHAN = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from carrywave.parallel import world
here, agent = Path(sys.argv[1]), os.getpid()
if os.fork() == 0:
    signal.signal(signal.SIGTERM, lambda *_: ((here / "ended").touch(), os._exit(0)))
    world.time = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 100))
    world.join("cpu")
    (here / "there").touch()
    time.sleep(60)
    os._exit(1)
while not (here / "there").exists():
    time.sleep(0.01)
os.kill(agent, signal.SIGKILL)
"""


def test_workers_of_torchrun_end_with_its_agent(write: Write, tmp_path: Path) -> None:
    """Nobody else would end them: they would train on, and keep the run from whoever starts it again."""
    one = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    agent = _warm.Warm([sys.executable, write("agent.py", ORPHAN), str(tmp_path)], env={**os.environ, **one})
    assert agent.wait(60) == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while not (tmp_path / "ended").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (tmp_path / "ended").exists()


def test_a_second_signal_ends_them_there_and_then(write: Write, tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGINT, lambda *_: Path(f'got-{rank}').touch())\nPath(f'there-{rank}').touch()\nwhile True: time.sleep(1)"
    process = started(write, tmp_path, text)
    process.send_signal(signal.SIGINT)
    while len(list(tmp_path.glob("got-*"))) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "stopped immediately; progress since the last snapshot is lost\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_worker_before_the_first_step_asks_all_to_stop(number: signal.Signals, write: Write, tmp_path: Path) -> None:
    text = f"rank and os.kill(os.getpid(), {int(number)})\nsignal.signal({int(number)}, lambda *_: sys.exit(75))\ntime.sleep(60)"
    said: list[str] = []
    assert start(worker(text, write), 2, Patience(3), say=said.append).code == 128 + number
    assert said == []  # nobody is started again
    (tmp_path / "run" / "snapshots").mkdir(parents=True)
    (tmp_path / "run" / "snapshots" / "last").write_text("step-00000200\n")
    assert start(worker(text, write), 2, Patience(3), resumes=tmp_path / "run", say=said.append) == Ended(
        75, f"stopped by {number.name} before the first step; the run is unchanged, at step 200"
    )


def test_a_run_that_is_resumed_restarts_from_where_it_is(write: Write, tmp_path: Path) -> None:
    (tmp_path / "run" / "snapshots").mkdir(parents=True)
    (tmp_path / "run" / "snapshots" / "last").write_text("step-00000200\n")
    said: list[str] = []
    text = "'\"attempt\":0' in Path(os.environ['CARRYWAVE_WORKER']).read_text() and rank and os.kill(os.getpid(), signal.SIGKILL)"
    assert start(worker(text, write), 2, Patience(3), resumes=tmp_path / "run", say=said.append) == Ended(0)
    assert [line.partition("; ")[2] for line in said] == ["restarting from step 200 (restart 1 of 3)"]


def test_a_signal_before_the_first_step_ends_them(write: Write, tmp_path: Path) -> None:
    process = started(write, tmp_path, "Path(f'there-{rank}').touch()\ntime.sleep(600)")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "\n")


FAILS = """
import typer
from carrywave.cli.exits import with_exit_codes
from carrywave.errors import DataError
from carrywave.parallel.world import all_gather_text, join, raise_on_all

@with_exit_codes
def main(how):
    world = join("cpu")
    all_gather_text(world, "")
    if how == "orphaned" and rank == world.size - 1:
        os.kill(os.getppid(), signal.SIGKILL)
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "fault":
            raise ValueError("oops")
        if how == "mistake":
            raise DataError("train.txt is empty; write something into it")
    if how == "together":
        with raise_on_all(world):
            if rank == 1:
                raise DataError("train.txt is empty; write something into it")
    if how == "orphaned":
        Path(f"there-{rank}").touch()
        signal.signal(signal.SIGTERM, lambda *_: (Path(f"stopped-{rank}").touch(), sys.exit(75)))
        time.sleep(60)
    all_gather_text(world, "")

try:
    main(sys.argv[1])
except typer.Exit as end:
    sys.exit(end.exit_code)
"""


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("killed", 1, "worker 1 of 2 was killed (signal 9, SIGKILL); if memory ran out, use fewer workers or a smaller batch"),
        pytest.param("fault", 1, "worker 1: ValueError: oops", marks=pytest.mark.slow),
        pytest.param("mistake", 2, "worker 1: train.txt is empty; write something into it", marks=pytest.mark.slow),
        ("together", 2, "rank 1: train.txt is empty; write something into it"),
    ],
)
def test_one_cause(how: str, code: int, message: str, write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    end = start([*worker(FAILS, write), how], 2)
    assert (end.code, end.message) == (code, message)
    assert ("raise ValueError" in end.trace) == (how == "fault")
    out, err = capfd.readouterr()
    assert "carrywave" not in out + err  # the workers leave the telling to the process that started them
    assert "Traceback" not in out + err


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_workers_stop_in_good_order_when_the_process_that_started_them_is_gone(count: int, write: Write, tmp_path: Path) -> None:
    command = [*worker(FAILS, write), "orphaned"]
    parent = write("parent.py", f"from carrywave.launch.launcher import start\nstart({command!r}, {count})\n")
    assert subprocess.run([sys.executable, parent], cwd=tmp_path, timeout=60).returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("stopped-*"))) < count and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(list(tmp_path.glob("stopped-*"))) == count


# A script that runs again in its workers.

SCRIPT = """
import os, sys
from carrywave.errors import DataError
from carrywave.launch import script_workers
from carrywave.launch.launcher import Patience

def say(line):
    os.write(1, (line + "\\n").encode())  # at once: several processes write

def fit(name, devices=1):
    told = script_workers.begin()
    if told is not None:
        return told
    with script_workers.working():
        result = {"name": name, "words": sys.argv[1:]}
        if devices > 1 and not script_workers.is_script_worker():
            return script_workers.relaunch(devices, Patience())
        say(f"work {name} {os.environ.get('RANK', 'alone')}")
        if name == "bad":
            raise DataError("no; do")
        if script_workers.is_script_worker():
            script_workers.finish(result)
        script_workers.remember(result)
        return result

if __name__ == "__main__":
    first = fit("first")
    second = fit("second", devices=2)
    for devices in (1, 2):
        try:
            fit("bad", devices)
        except DataError as error:
            say(f"refused {error}")
    third = fit("third", devices=2)
    say(f"after {first['name']} {second['name']} {third['name']} {third['words']}")
"""


@pytest.mark.parametrize("how", [["script.py"], ["-X", "utf8", "-m", "script"]], ids=["file", "module"])
def test_a_script_runs_again_in_its_workers(how: list[str], write: Write, python: Run) -> None:
    write("script.py", SCRIPT)
    ended = python(*how, "some", "--words")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    work = ["first alone", "second 0", "bad alone", "bad 0", "third 0"]  # what other workers print is not shown
    # Twice in the process that was started; then in rank 0 of the second bad call once, in that of the last call twice.
    refused = ["refused no; do"] * (2 + 1 + 2)
    assert sorted(lines[:-1]) == sorted([f"work {words}" for words in work] + refused)
    assert lines[-1] == "after first second third ['some', '--words']"
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("how", [["-c", "import again_here"], ["-"]], ids=["-c", "stdin"])
def test_what_is_not_in_a_file_cannot_run_again(how: list[str], write: Write, tmp_path: Path) -> None:
    write("again_here.py", "from carrywave.launch.script_workers import script_command\nscript_command()\n")
    ended = subprocess.run([sys.executable, *how], cwd=tmp_path, input="import again_here\n", capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "put the code into a file and run it with python, or start it with torchrun" in ended.stderr


# The command line.

BAD_TF_CONFIG = '{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "ps", "index": 0}}'


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        ("train --devices 0", {}, "--devices is 0; use a number >= 1"),
        ("train --devices 3 plan.stages=2", {}, "plan.stages=2 does not divide 3 workers; use --devices 2 or a multiple of it"),
        ("train --devices 2 plan.replicas=2 plan.stages=2", {}, "plan.replicas=2 x plan.stages=2 needs 4 workers, got 2; use --devices 4"),
        ("train --devices 2 --device cpu --restarts -1", {}, "--restarts is -1; use a number >= 0"),
        ("train --devices 2 --device cpu --min-devices 3", {}, "--min-devices 3 is not between 1 and 2, the number of devices"),
        ("train --device cpu", {"TF_CONFIG": BAD_TF_CONFIG}, "TF_CONFIG has a task of type ps: workers hold the weights and evaluate"),
        ("evaluate run --devices 2", {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "--devices is 2, but the launcher started 1"),
    ],
)
def test_what_cannot_be_is_one_line(words: str, variables: dict[str, str], message: str, python: Run, tmp_path: Path) -> None:
    ended = python("-m", "carrywave", *words.split(), **variables)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith(f"carrywave: {message}")
    assert list(tmp_path.iterdir()) == []
