"""Shares of a GPU: the daemon behind them is ours alone, starts and ends with us, and what cannot be is said in a line.

A stand-in takes the daemon's place, with real processes: `_fake_mps.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import _fake_mps

from benchmarks.shares import gpu_probe, mps_guard
from benchmarks.shares import mps as module
from benchmarks.shares.mps import Shares, divided, shares
from carrywave.errors import WorkerError
from carrywave.launch import hardware
from carrywave.launch.exit_reports import Ended
from carrywave.launch.launcher import start

LONG_SECONDS = 60.0


@pytest.fixture(autouse=True)
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with three GPUs and the stand-in, which notes its process ids in a folder."""
    _fake_mps.install(tmp_path / "bin")
    folder = tmp_path / "pids"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_MPS_PIDS", str(folder))
    for name in ("CUDA_VISIBLE_DEVICES", "CARRYWAVE_SHARE_GPU", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "FAKE_MPS"):
        monkeypatch.delenv(name, raising=False)
    hardware.nvidia_smi.cache_clear()
    yield folder
    hardware.nvidia_smi.cache_clear()
    servers = [told["server"] for told in noted(folder).values()]
    assert not any(map(_fake_mps.alive, noted(folder)))
    until(lambda: not any(map(_fake_mps.alive, servers)))  # what is killed may take a moment to end


def noted(folder: Path) -> dict[int, dict[str, Any]]:
    """What each daemon noted of itself, by process id."""
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_workers_are_told_of_a_daemon_that_is_ours(pids: Path) -> None:
    with shares(4) as environment:
        [(daemon, told)] = noted(pids).items()
        folder = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
        assert _fake_mps.alive(daemon)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert told["CUDA_MPS_PIPE_DIRECTORY"] == told["CUDA_MPS_LOG_DIRECTORY"] == str(folder)
        assert told["CUDA_VISIBLE_DEVICES"] is None
        assert environment == {
            "CUDA_MPS_PIPE_DIRECTORY": str(folder),
            "CUDA_MPS_LOG_DIRECTORY": str(folder),
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
            "CARRYWAVE_SHARE_GPU": "4",
        }
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert not folder.exists()
    assert not _fake_mps.alive(daemon)


def test_a_part_may_be_named_and_the_daemon_has_the_whole(pids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    with shares(1, 50) as environment:
        assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
        assert [told["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for told in noted(pids).values()] == [None]


def test_gpus_are_named_so_that_daemon_and_workers_mean_the_same(pids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-x,0,9")  # CUDA ignores what comes from the first that is not there
    with shares(2) as environment:
        assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-c,GPU-x,GPU-a"
        assert [told["CUDA_VISIBLE_DEVICES"] for told in noted(pids).values()] == ["GPU-c,GPU-x,GPU-a"]


def test_two_at_once_do_not_meet(pids: Path) -> None:
    with shares(2) as one, shares(2) as other:
        assert one["CUDA_MPS_PIPE_DIRECTORY"] != other["CUDA_MPS_PIPE_DIRECTORY"]
        assert len(noted(pids)) == 2
    with shares(2):
        assert len(noted(pids)) == 3


def test_it_ends_with_an_exception(pids: Path) -> None:
    with pytest.raises(KeyError), shares(2):
        raise KeyError
    assert len(noted(pids)) == 1  # and the fixture sees that it is gone


def test_one_share_of_a_whole_gpu_starts_nothing(pids: Path) -> None:
    with divided(1) as environment:
        assert environment == {}
    with divided(2) as environment:
        assert environment["CARRYWAVE_SHARE_GPU"] == "2"
    assert len(noted(pids)) == 1


def hurry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give the guard less patience. It is a program of its own, so a copy of it runs instead."""
    text = Path(mps_guard.__file__).read_text()
    assert text.count("_SECONDS = 5.0") == 2
    hasty = tmp_path / "hasty.py"
    hasty.write_text(text.replace("_SECONDS = 5.0", "_SECONDS = 0.1"))
    monkeypatch.setattr(mps_guard, "__file__", str(hasty))


def test_a_daemon_that_does_not_quit_is_killed(pids: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hurry(monkeypatch, tmp_path)
    monkeypatch.setenv("FAKE_MPS", "deaf")
    with shares(2) as environment:
        pass
    assert not Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    assert len(noted(pids)) == 1


def test_sockets_have_short_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with shares(2) as environment:
        assert len(environment["CUDA_MPS_PIPE_DIRECTORY"]) <= 80


HOLDS = """
import os, sys, time
from pathlib import Path
from benchmarks.shares.mps import shares
with shares(2) as environment:
    Path(sys.argv[1]).write_text(environment["CUDA_MPS_PIPE_DIRECTORY"])
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_the_process_that_started_it(number: signal.Signals, tmp_path: Path, pids: Path) -> None:
    there = tmp_path / "there"
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(there)], stderr=subprocess.DEVNULL)
    until(lambda: there.exists() and there.read_text())
    [daemon] = noted(pids)
    assert _fake_mps.alive(daemon)
    process.send_signal(number)
    process.wait()
    until(lambda: not _fake_mps.alive(daemon) and not Path(there.read_text()).exists())


def test_signals_to_everybody_leave_the_daemon_to_those_who_still_save(tmp_path: Path, pids: Path) -> None:
    """As from a cluster that sends SIGTERM to every process of a job."""
    there = tmp_path / "there"
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(there)])
    until(lambda: there.exists() and there.read_text())
    [daemon] = noted(pids)
    guard = int(Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[1])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(guard, number)
    time.sleep(0.3)
    assert _fake_mps.alive(daemon)
    process.kill()
    process.wait()
    until(lambda: not _fake_mps.alive(guard))


# What cannot be


@pytest.mark.parametrize(
    ("count", "percent", "message"),
    [
        (0, None, "a GPU cannot be shared by 0 workers under MPS; use a number from 1 to 48"),
        (49, None, "a GPU cannot be shared by 49 workers under MPS; use a number from 1 to 48"),
        (2, 0, "a share of 0% of a GPU is not possible; use a whole percentage from 1 to 100"),
        (2, 101, "a share of 101% of a GPU is not possible; use a whole percentage from 1 to 100"),
    ],
)
def test_numbers_that_cannot_be(count: int, percent: int | None, message: str, pids: Path) -> None:
    assert refused(count, percent) == message
    assert noted(pids) == {}


def refused(count: int = 2, percent: int | None = None) -> str:
    with pytest.raises(WorkerError) as found, shares(count, percent):
        pass
    assert "\n" not in str(found.value)
    return str(found.value)


def test_a_daemon_of_somebody_else_is_left_alone(monkeypatch: pytest.MonkeyPatch, pids: Path) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/theirs")
    said = refused()
    assert said.startswith("CUDA_MPS_PIPE_DIRECTORY=/tmp/theirs belongs to an MPS daemon that carrywave did not start; unset it, or ")
    assert noted(pids) == {}


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refused() == (
        "shares of a GPU need an NVIDIA GPU, and nvidia-smi shows none; unset CARRYWAVE_SHARE_GPU, or set it to 1 to let workers take turns"
    )


def test_without_mps(tmp_path: Path) -> None:
    (tmp_path / "bin" / _fake_mps.NAME).unlink()
    said = refused()
    assert said.startswith("shares of a GPU need NVIDIA's MPS, but nvidia-cuda-mps-control is not installed; install it with the driver's ")


def test_a_daemon_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MPS", "refuses")
    monkeypatch.setattr(module, "START_SECONDS", 1e6)  # its end is seen, and not only awaited
    said = refused()
    assert said.startswith("NVIDIA's MPS did not start on this machine (An instance of this daemon is already running); check that ")


def test_a_daemon_that_does_not_answer_is_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.5)
    hurry(monkeypatch, tmp_path)
    monkeypatch.setenv("FAKE_MPS", "mute")
    assert refused().startswith("NVIDIA's MPS did not start on this machine (it said nothing); check that ")


# Through the launcher


def busy_for(times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """GPUs that refuse the first processes that ask for them; returns a file with a character for each that asked."""
    asked, probe = tmp_path / "asked", tmp_path / "probe.py"
    asked.touch()
    probe.write_text(
        "import os, sys\nfrom pathlib import Path\nassert 'CUDA_MPS_PIPE_DIRECTORY' in os.environ\n"
        f"asked = Path({str(asked)!r})\nasked.write_text(asked.read_text() + '.')\n"
        f"sys.exit({gpu_probe.BUSY} if len(asked.read_text()) <= {times} else 0)\n"
    )
    monkeypatch.setattr(gpu_probe, "__file__", str(probe))
    return asked


def test_workers_start_again_when_the_gpu_is_cleared(pids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = busy_for(2, tmp_path, monkeypatch)
    with Shares(2) as own:
        own.settle()
        assert asked.read_text() == "..."
        own.settle()
        assert asked.read_text() == "...."
    assert len(noted(pids)) == 1


def test_a_daemon_that_stays_busy_is_replaced_at_the_same_place(pids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy_for(10**6, tmp_path, monkeypatch)
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.2)
    with Shares(2) as own:
        [first] = noted(pids)
        own.settle()
        [second] = noted(pids).keys() - {first}
        assert (_fake_mps.alive(first), _fake_mps.alive(second)) == (False, True)
        assert noted(pids)[second]["CUDA_MPS_PIPE_DIRECTORY"] == own.environment["CUDA_MPS_PIPE_DIRECTORY"]
    assert not Path(own.environment["CUDA_MPS_PIPE_DIRECTORY"]).exists()


def test_without_a_driver_there_is_nothing_to_wait_for() -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("there is a driver")
    assert gpu_probe.main() == 0


TELLS = """
import json, os, sys
from pathlib import Path
told = json.loads(Path(os.environ["CARRYWAVE_WORKER"]).read_text())
rank, attempt = os.environ["RANK"], str(told["attempt"])
Path(sys.argv[1], f"{attempt}-{rank}.json").write_text(json.dumps(dict(os.environ) | told))
if rank == "1" and attempt == "0":
    os.kill(os.getpid(), 9)
"""


def test_without_shares_a_launch_starts_no_daemon(tmp_path: Path, pids: Path) -> None:
    assert start([sys.executable, "-c", "import os; assert 'CUDA_MPS_PIPE_DIRECTORY' not in os.environ"], 2) == Ended(0)
    assert noted(pids) == {}


def test_shares_count_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYWAVE_SHARE_GPU", "2")
    assert hardware.gpus() == ["1/2 of Fake"] * 6
    for turns in ("1", "0", ""):
        monkeypatch.setenv("CARRYWAVE_SHARE_GPU", turns)
        assert hardware.gpus() == ["Fake"] * 3
