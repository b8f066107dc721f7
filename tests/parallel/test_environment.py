"""What the environment says of workers: what cannot be is refused in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from carrywave.cli.workers import around
from carrywave.errors import WorkerError
from carrywave.launch import script_workers
from carrywave.parallel.startup import environment, launcher_env
from carrywave.parallel.startup.launcher_env import WorkerFile, check_not_of_mpi, worker_file
from carrywave.parallel.startup.rendezvous import check_hosts


@pytest.mark.parametrize("value", ["yes", "-1", "49", "٣"])
def test_a_gpu_is_divided_among_a_number_of_workers(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYWAVE_SHARE_GPU", "48")
    assert environment.shares_of_a_gpu() == 48
    monkeypatch.setenv("CARRYWAVE_SHARE_GPU", value)
    with pytest.raises(WorkerError, match=f"CARRYWAVE_SHARE_GPU={value} is not a number of workers from 0 to 48; use 1 to"):
        environment.shares_of_a_gpu()


def test_what_our_launcher_tells_its_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = WorkerFile(launch="one", attempt=2, store=tmp_path / "store", devices=(0, 2))
    monkeypatch.setenv("CARRYWAVE_WORKER", told.write(tmp_path / "worker.json")["CARRYWAVE_WORKER"])
    assert worker_file() == told
    assert [worker_file().device(rank) for rank in range(3)] == [0, 2, 2]
    for other in ("/no/such", "/dev/null"):
        monkeypatch.setenv("CARRYWAVE_WORKER", other)
        with pytest.raises(WorkerError, match=f"CARRYWAVE_WORKER={other} is not a file that carrywave has written; unset it"):
            worker_file()


def place(host: str, interface: str) -> dict[str, object]:
    return {"host": host, "boot": host, "net": "net", "interface": interface}


def test_a_host_whose_name_leads_others_to_themselves_is_refused() -> None:
    check_hosts([place("a", "lo"), place("a", "lo")])
    check_hosts([place("a", "eth0"), place("b", "eth0")])
    with pytest.raises(WorkerError, match="other hosts cannot reach rank 1: its host b resolves to loopback; use its address in place of"):
        check_hosts([place("a", "eth0"), place("b", "lo")])


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
    monkeypatch.setattr(launcher_env, "_AT_START", (os.getpid() + 1, 4711))  # of a process that has forked
    assert launcher_env.parent_process() == os.getppid()
    monkeypatch.setenv(launcher_env.WORKER, WorkerFile(parent=12).write(tmp_path / "worker.json")[launcher_env.WORKER])
    assert launcher_env.parent_process() == 12
