"""Variables that cannot be are refused in one line, before a library complains of them in its own way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from carrywave.cli.workers import around
from carrywave.errors import WorkerError
from carrywave.launch import script_workers
from carrywave.parallel.startup import environment, launcher_env
from carrywave.parallel.startup.launcher_env import WorkerFile, check_not_of_mpi, worker_file
from carrywave.parallel.startup.rendezvous import check_hosts

OWN = "unset it: carrywave sets it for the workers that it starts"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("OMP_NUM_THREADS", "many", "OMP_NUM_THREADS=many is not a number of threads from 1 to 4096; correct or unset it"),
        ("OMP_NUM_THREADS", "0", "OMP_NUM_THREADS=0 is not a number of threads"),
        ("OMP_NUM_THREADS", "4,", "OMP_NUM_THREADS=4, is not a number of threads"),
        ("MKL_NUM_THREADS", "9" * 100, f"MKL_NUM_THREADS={'9' * 57}… is not a number of threads"),
        ("TORCH_CPP_LOG_LEVEL", "loud", "TORCH_CPP_LOG_LEVEL=loud is not one of INFO, WARNING, ERROR or FATAL; "),
        ("TORCH_DISTRIBUTED_DEBUG", "yes", "TORCH_DISTRIBUTED_DEBUG=yes is not one of OFF, INFO or DETAIL; "),
        (
            "CARRYWAVE_SHARE_GPU",
            "yes",
            "CARRYWAVE_SHARE_GPU=yes is not a number of workers from 0 to 48; use 1 to let workers take turns on",
        ),
        ("CARRYWAVE_SHARE_GPU", "-1", "CARRYWAVE_SHARE_GPU=-1 is not a number of workers from 0 to 48; "),
        ("CARRYWAVE_SHARE_GPU", "49", "CARRYWAVE_SHARE_GPU=49 is not a number of workers from 0 to 48; "),
        ("CARRYWAVE_WORKER", "/no/such", f"CARRYWAVE_WORKER=/no/such is not a file that carrywave has written; {OWN}"),
        ("CARRYWAVE_WORKER", "/dev/null", f"CARRYWAVE_WORKER=/dev/null is not a file that carrywave has written; {OWN}"),
    ],
)
def test_what_cannot_be(name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(WorkerError) as refused:
        environment.check()
    assert str(refused.value).startswith(message)


def test_what_can_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (("OMP_NUM_THREADS", "4, 2"), ("MKL_NUM_THREADS", ""), ("TORCH_CPP_LOG_LEVEL", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CARRYWAVE_SHARE_GPU", "48")
    told = WorkerFile(launch="one", attempt=2, store=tmp_path / "store", devices=(0, 2))
    monkeypatch.setenv("CARRYWAVE_WORKER", told.write(tmp_path / "worker.json")["CARRYWAVE_WORKER"])
    environment.check()
    assert worker_file() == told
    assert [worker_file().device(rank) for rank in range(3)] == [0, 2, 2]


def test_every_command_refuses_them_before_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    ended = subprocess.run([sys.executable, "-m", "carrywave", "schema"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith("carrywave: OMP_NUM_THREADS=many is not a number of threads")
    assert ended.stderr.count("\n") == 1


def place(host: str, interface: str) -> dict[str, object]:
    return {"host": host, "boot": host, "net": "net", "interface": interface}


def test_a_host_whose_name_leads_others_to_themselves_is_refused() -> None:
    check_hosts([place("a", "lo"), place("a", "lo")])
    check_hosts([place("a", "eth0"), place("b", "eth0")])
    with pytest.raises(WorkerError, match="other hosts cannot reach rank 1: its host b resolves to loopback; use its address in place of"):
        check_hosts([place("a", "eth0"), place("b", "lo")])


QUIET = """
import datetime, sys
import torch
from torch.distributed import TCPStore
from carrywave.parallel.startup import native_logs

with native_logs.silent():
    try:
        TCPStore("127.0.0.1", 1, None, False, datetime.timedelta(seconds=0.1), wait_for_workers=False)
    except RuntimeError:
        print("raised")
"""


@pytest.mark.parametrize("loud", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quiet", "as the user asks"])
def test_what_torch_logs_of_connections_is_not_shown(loud: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    if loud:
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "WARNING")
    ended = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "raised\n"
    assert ("c10d" in ended.stderr) == loud


def test_processes_of_mpi_do_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            check_not_of_mpi()
            patch.setenv(name, "4")
            with pytest.raises(
                WorkerError, match=rf"MPI started 4 processes \({name}\), and each would train alone.*start it with torchrun"
            ):
                check_not_of_mpi()
            with pytest.raises(WorkerError, match="MPI started 4"):
                script_workers.begin()
            with pytest.raises(WorkerError, match="MPI started 4"):
                around()
            patch.setenv("RANK", "0")  # told by whoever called mpirun
            check_not_of_mpi()


def test_a_worker_ends_with_the_agent_that_it_had_at_its_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The agent may be gone, and the worker another's, before it joins the others."""
    for name in (launcher_env.WORKER, launcher_env.TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launcher_env, "_AT_START", (os.getpid(), 4711))
    assert launcher_env.parent_process() is None
    monkeypatch.setenv(launcher_env.TORCHRUN, "none")
    assert launcher_env.parent_process() == 4711
    monkeypatch.setattr(launcher_env, "_AT_START", (os.getpid(), 1))
    for command, parent in (("/sbin/init\0splash\0", 0), ("/usr/bin/python3.11\0/usr/bin/torchrun\0", 1)):
        (tmp_path / "cmdline").write_text(command)
        monkeypatch.setattr(launcher_env, "FIRST_PROCESS", str(tmp_path / "cmdline"))
        assert launcher_env.parent_process() == parent
    monkeypatch.setattr(launcher_env, "_AT_START", (os.getpid() + 1, 4711))  # of a process that has forked
    assert launcher_env.parent_process() == os.getppid()
    monkeypatch.setenv(launcher_env.WORKER, WorkerFile(parent=12).write(tmp_path / "worker.json")[launcher_env.WORKER])
    assert launcher_env.parent_process() == 12
