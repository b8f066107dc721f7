"""Who trains a run: one process at a time, by its lock, or where locks do not reach by its heartbeat."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from carrywave.errors import RunError
from carrywave.runs import owner
from carrywave.runs.owner import Owner

HELD = "is being trained by process {pid} on {host}; wait until it ends, stop it, or use another run=..."
HOST = os.uname().nodename
ELSEWHERE = Owner("other", 1, "token")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(owner, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(owner, "SILENT_SECONDS", 1.0)


def write(folder: Path, there: Owner) -> None:
    (folder / owner.FILE).write_text(json.dumps(asdict(there)))


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
    claim.check()
    with pytest.raises(RunError, match=HELD.format(pid=os.getpid(), host=HOST)):
        owner.take(tmp_path)  # also from within the same process
    claim.release()
    claim.release()
    assert list(tmp_path.iterdir()) == []
    owner.take(tmp_path).release()


def test_another_process_is_named_and_its_death_frees_the_run_at_once(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(RunError, match=HELD.format(pid=child.pid, host=HOST)):
            owner.take(tmp_path)
        with pytest.raises(RunError, match=f"process {child.pid} on {HOST}; use another run"):
            owner.refuse_held(tmp_path)
        os.kill(child.pid, signal.SIGSTOP)  # it could go on at any time
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped: a launcher may be slow to ask
    said: list[str] = []
    owner.take(tmp_path, said.append).release()
    assert said == []  # nothing was waited for


def test_a_silent_owner_elsewhere_is_waited_for_and_then_gone(tmp_path: Path) -> None:
    write(tmp_path, ELSEWHERE)
    said: list[str] = []
    owner.take(tmp_path, said.append).release()
    assert said == [f"{tmp_path} was last trained by process 1 on other; waiting up to 1 s for a heartbeat from it"]


def test_an_owner_elsewhere_that_counts_on_is_alive(tmp_path: Path) -> None:
    over = threading.Event()
    write(tmp_path, ELSEWHERE)

    def beat() -> None:
        beats = 0
        while not over.wait(0.02):
            beats += 1
            write(tmp_path, replace(ELSEWHERE, beats=beats))

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(RunError, match="is being trained by"):
        owner.take(tmp_path)
    over.set()
    thread.join()
    owner.take(tmp_path).release()


def test_who_was_asleep_while_another_took_the_run_ends(tmp_path: Path) -> None:
    claim = owner.take(tmp_path)
    write(tmp_path, ELSEWHERE)
    with pytest.raises(RunError, match="was taken over by process 1 on other because this process sent no heartbeat; this process stops"):
        claim.check()
    claim.release()
    assert owner.read(tmp_path) == ELSEWHERE  # its file stays


def test_a_folder_that_is_removed_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    claim = owner.take(folder)
    folder.rename(tmp_path / "moved")
    with pytest.raises(RunError, match=r"the folder of run .*run was removed during training; restart the run"):
        claim.check()
    claim.release()
    assert not folder.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 3}'])
def test_a_file_that_says_nothing_is_nobodys(text: str, tmp_path: Path) -> None:
    (tmp_path / owner.FILE).write_text(text)
    owner.take(tmp_path).release()


def test_one_of_many_at_the_same_instant_has_it(tmp_path: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        from carrywave.errors import RunError
        from carrywave.runs import owner
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            claim = owner.take(Path(sys.argv[1]))
            print("taken", flush=True)
        except RunError:
            print("refused", flush=True)
        sys.stdin.readline()
    """
    write(tmp_path, Owner(HOST, 1, "dead"))
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
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
