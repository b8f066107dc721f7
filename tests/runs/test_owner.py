"""Who trains a run: one process at a time, found out by looking for it, or where it cannot be seen by its signs of life."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from carrywave.errors import RunError
from carrywave.launch import launch_record
from carrywave.parallel.startup.launcher_env import WORKER, WorkerFile
from carrywave.runs import owner
from carrywave.runs.owner import Owner

HELD = "is being trained by process {pid} on {host}; wait until it ends, stop it, or use another run=..."


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(owner, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(owner, "SILENT_SECONDS", 1.0)
    for name in (WORKER, "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def write(folder: Path, there: Owner) -> None:
    (folder / owner.FILE).write_bytes(there.encode())


def elsewhere() -> Owner:
    return replace(owner.this_process(), host="other", machine="m", boot="b", space="s", pid=1, born="7")


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that owns the run."""
    script = """
        import sys, time
        from pathlib import Path
        from carrywave.runs import owner
        owner.take(Path(sys.argv[1]))
        print("taken", flush=True)
        time.sleep(600)
    """
    started = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], stdout=subprocess.PIPE)
    assert started.stdout is not None
    assert started.stdout.readline() == b"taken\n"
    yield started
    started.kill()
    started.wait()
    started.stdout.close()


def test_it_is_taken_and_let_go_of(tmp_path: Path) -> None:
    claim = owner.take(tmp_path)
    there = owner.read(tmp_path)
    assert there is not None
    assert (there.pid, there.host) == (os.getpid(), os.uname().nodename)
    claim.look()
    with pytest.raises(RunError, match=HELD.format(pid=os.getpid(), host=there.host)):
        owner.take(tmp_path)  # also from within the same process
    claim.release()
    claim.release()
    assert list(tmp_path.iterdir()) == []
    owner.take(tmp_path).release()


def test_another_process_is_named_and_its_death_frees_the_run_at_once(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    host = os.uname().nodename
    with pytest.raises(RunError, match=HELD.format(pid=child.pid, host=host)):
        owner.take(tmp_path)
    os.kill(child.pid, signal.SIGSTOP)  # it could go on at any time
    with pytest.raises(RunError, match="is being trained"):
        owner.take(tmp_path)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped: a launcher may be slow to ask
    said: list[str] = []
    owner.take(tmp_path, said.append).release()
    assert said == []  # nothing was waited for


def test_a_number_that_another_process_has_by_now(tmp_path: Path) -> None:
    write(tmp_path, replace(owner.this_process(), pid=os.getppid(), born="1"))
    owner.take(tmp_path).release()


def test_a_host_that_was_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(owner.this_process(), machine="m")
    monkeypatch.setattr(owner, "this_process", lambda: replace(own, token="new"))
    write(tmp_path, replace(own, boot="before the power failed"))
    said: list[str] = []
    owner.take(tmp_path, said.append).release()
    assert said == []


def test_a_silent_owner_elsewhere_is_waited_for_and_then_gone(tmp_path: Path) -> None:
    write(tmp_path, elsewhere())
    said: list[str] = []
    owner.take(tmp_path, said.append).release()
    assert said == [f"{tmp_path} was last trained by process 1 on other; waiting up to 1 s for a heartbeat from it"]


def test_an_owner_elsewhere_that_counts_on_is_alive(tmp_path: Path) -> None:
    there, over = elsewhere(), threading.Event()
    write(tmp_path, there)

    def beat() -> None:
        beats = 0
        while not over.wait(0.02):
            beats += 1
            write(tmp_path, replace(there, beats=beats))

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(RunError, match="is being trained by process 1 on other"):
        owner.take(tmp_path)
    over.set()
    thread.join()


def test_workers_that_were_started_again_go_on_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER, WorkerFile(launch="this", attempt=1).write(tmp_path / "worker.json")[WORKER])
    said: list[str] = []
    write(tmp_path, replace(elsewhere(), launch=("carrywave this",), call=launch_record.call(), attempt=0))
    owner.take(tmp_path, said.append).release()
    assert said == []
    write(tmp_path, replace(elsewhere(), launch=("carrywave another",), call=launch_record.call(), attempt=0))
    owner.take(tmp_path, said.append).release()
    assert len(said) == 1


def test_it_beats(tmp_path: Path) -> None:
    claim = owner.take(tmp_path)
    deadline = time.monotonic() + 60
    while ((there := owner.read(tmp_path)) is None or there.beats < 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert there is not None
    assert there.beats >= 2
    claim.release()


def test_who_was_asleep_while_another_took_the_run_ends(tmp_path: Path) -> None:
    claim = owner.take(tmp_path)
    write(tmp_path, elsewhere())
    with pytest.raises(RunError, match="was taken over by process 1 on other because this process sent no heartbeat; this process stops"):
        claim.look()
    claim.release()
    there = owner.read(tmp_path)
    assert there is not None
    assert there.host == "other"  # its file stays


def test_a_folder_that_is_removed_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    claim = owner.take(folder)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.raises(RunError, match=r"the folder of run .*run was removed during training; restart the run"):
        claim.look()
    claim.release()
    assert not folder.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 3}', json.dumps({"pid": "x"})])
def test_a_file_that_says_nothing_is_nobodys(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "WRITTEN_SECONDS", 0.05)
    (tmp_path / owner.FILE).write_text(text)
    owner.take(tmp_path).release()


def test_one_of_many_at_the_same_instant_has_it(tmp_path: Path) -> None:
    """Four processes, once where nobody has the run and once where a dead one had it."""
    script = """
        import sys, time
        from pathlib import Path
        from carrywave.errors import RunError
        from carrywave.runs import owner
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            owner.take(Path(sys.argv[1]))
            print("taken", flush=True)
        except RunError:
            print("refused", flush=True)
        sys.stdin.readline()
    """
    for stale in (False, True):
        folder = tmp_path / str(stale)
        folder.mkdir()
        if stale:
            write(folder, replace(owner.this_process(), pid=os.getppid(), born="1"))
        command = [sys.executable, "-c", textwrap.dedent(script), str(folder)]
        each = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(4)]
        told = []
        for line in ("go\n", "end\n"):
            for one in each:
                assert one.stdout is not None
                told.append(one.stdout.readline())
            for one in each:
                assert one.stdin is not None
                one.stdin.write(line)
        for one in each:
            one.communicate()
        assert sorted(told[4:]) == ["refused\n"] * 3 + ["taken\n"]
