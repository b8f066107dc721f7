"""One process: what the launcher's variables may hold, and what is refused. With several processes: tests/distributed/test_world.py."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from carrywave.errors import ContactLost, DataError, SpecError, WorkerError
from carrywave.parallel import world
from carrywave.parallel.devices import check_gpus, pick_device
from carrywave.parallel.startup.launcher_env import WorkerFile
from carrywave.parallel.startup.rendezvous import open_store
from carrywave.parallel.world import World, all_gather_text, check_agreement, join, leave, raise_on_all, report_once

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CARRYWAVE_WORKER",
    "CARRYWAVE_START_SECONDS",
)
ALONE = World.alone(torch.device("cpu"))


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(world._Joined, "store", None)
    monkeypatch.setattr(world._Joined, "times", 0)


@pytest.fixture
def listener() -> Iterator[int]:
    """The port of a program that is no store."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def launcher(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def in_file(folder: Path) -> dict[str, str]:
    """As our own launcher tells workers of one host, which meet in a file."""
    return WorkerFile(one_host=True, store=folder / "store").write(folder / "worker.json")


def test_without_a_launcher_a_process_is_alone() -> None:
    found = join("cpu")
    assert found == ALONE
    assert (found.rank, found.size, found.backend) == (0, 1, "")
    assert all_gather_text(found, "me") == ["me"]
    check_agreement(found, {"version": "1"})
    leave(found)
    assert not dist.is_initialized()


def test_alone_a_mistake_is_raised_as_it_is() -> None:
    mistake = DataError("no")
    with pytest.raises(DataError) as raised, raise_on_all(ALONE):
        raise mistake
    assert raised.value is mistake
    assert mistake.reported_by is None


def test_a_launched_world_of_one_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher(monkeypatch, RANK=0, WORLD_SIZE=1, LOCAL_RANK=0)
    assert join("cpu") == ALONE
    assert not dist.is_initialized()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A host of two GPUs, as torch tells of it; the current one is to be set."""
    current = [1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    return current


def test_a_device_by_its_name(gpus: list[int]) -> None:
    """Without a number it is the current one for good, or the one that a launcher's word gives."""
    found = [pick_device("cuda"), pick_device("auto"), World.alone(torch.device("cuda")).device]
    gpus[0] = 0
    assert found == [torch.device("cuda", 1)] * 3
    assert pick_device("cuda", local_rank=3) == torch.device("cuda", 1)
    assert pick_device("cuda:0", local_rank=1) == torch.device("cuda", 0)
    for name, message in (("cuda:2", "this host has 2 GPUs"), *((name, "use auto, cpu") for name in ("cuda:", "cuda:x", "cpu:0", "tpu"))):
        with pytest.raises(SpecError, match=f"{name}.*{message}"):
            pick_device(name)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": 0}, "RANK is set but WORLD_SIZE is not; start the workers with torchrun"),
        ({"WORLD_SIZE": 2}, "WORLD_SIZE is set but RANK is not"),
        ({"RANK": 0, "WORLD_SIZE": 2}, "RANK is set but LOCAL_RANK is not; .* SLURM_LOCALID"),
        ({"RANK": "one", "WORLD_SIZE": 2, "LOCAL_RANK": 0}, "RANK=one is not a whole number >= 0"),
        ({"RANK": "٣", "WORLD_SIZE": 4, "LOCAL_RANK": 0}, "RANK=٣ is not a whole number >= 0"),
        ({"RANK": 2, "WORLD_SIZE": 2, "LOCAL_RANK": 0}, "RANK=2 is out of range for WORLD_SIZE=2"),
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0}, "RANK is set but MASTER_ADDR is not"),
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}, "RANK is set but MASTER_PORT is not"),
        (
            {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 70000},
            "MASTER_PORT=70000 is not a port",
        ),
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "CARRYWAVE_START_SECONDS": "soon"}, "CARRYWAVE_START_SECONDS=soon is not a number"),
        (
            {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": 29500},
            "host no.such.host.invalid not found",
        ),
    ],
)
def test_garbled_variables_are_refused(monkeypatch: pytest.MonkeyPatch, variables: dict[str, object], message: str) -> None:
    launcher(monkeypatch, **variables)
    with pytest.raises(WorkerError, match=message):
        join("cpu")


def test_workers_that_stay_away_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launcher(monkeypatch, RANK=1, WORLD_SIZE=4, LOCAL_RANK=1, **in_file(tmp_path), CARRYWAVE_START_SECONDS=0.2)
    with pytest.raises(WorkerError, match=r"^ranks 0, 2 and 3 of 4 did not show up within 0.2 s; start every worker") as raised:
        join("cpu")
    assert raised.value.reported_by == 1  # the first of those that are there


def test_a_rank_0_that_stays_away_is_named(monkeypatch: pytest.MonkeyPatch, listener: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]
    launcher(monkeypatch, RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=free, CARRYWAVE_START_SECONDS=0.2)
    with pytest.raises(WorkerError, match=f"nothing answered at 127.0.0.1:{free} within 0.2 s; start rank 0 there"):
        join("cpu")


def free_port() -> int:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        return int(other.getsockname()[1])


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
def test_an_address_that_is_a_number_is_the_only_one_listened_at() -> None:
    port = free_port()
    store = open_store("127.0.0.1", port, True, 5.0)
    store.set("word", "there")
    lines = [line.split()[1:4:2] for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    assert [address for address, state in lines if state == "0A" and address.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    assert open_store("127.0.0.1", port, False, 5.0).get("word") == b"there"


def test_an_address_that_only_others_can_use_does_not_keep_the_first_waiting() -> None:
    """Behind a service's address, say; where it is a mistake, those that stay away are named."""
    store = open_store("192.0.2.1", free_port(), True, 5.0)
    store.set("word", "there")
    assert store.get("word") == b"there"


@pytest.mark.parametrize(("kept", "attempt"), [("True", "2"), ("False", "0")])
def test_restarted_workers_meet_anew_in_a_store_that_torchrun_keeps(kept: str, attempt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A static rendezvous (`--master-addr`) keeps its store, although the variable is set."""
    launcher(monkeypatch, TORCHELASTIC_RESTART_COUNT=2, TORCHELASTIC_USE_AGENT_STORE=kept, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
    assert world._attempt() == attempt


def test_a_rank_that_is_there_twice_is_no_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that was restarted before the others noticed: a launcher may try again."""
    launcher(monkeypatch, RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, **in_file(tmp_path), CARRYWAVE_START_SECONDS=0.1)
    monkeypatch.setattr(world._Joined, "times", 0)
    with pytest.raises(WorkerError, match="rank 0 of 2 did not show up"):
        join("cpu")
    monkeypatch.setattr(world._Joined, "times", 0)
    with pytest.raises(ContactLost, match=r"rank 1 of 2 is already there, or was: .*; restart all workers"):
        join("cpu")


def test_workers_of_another_number_are_of_another_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two jobs at one port. Those of the same number are told apart by what they are asked for (`train.fit.agree`)."""
    launcher(monkeypatch, RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, **in_file(tmp_path), CARRYWAVE_START_SECONDS=0.1)
    with pytest.raises(WorkerError, match="rank 1 of 2 did not show up"):
        join("cpu")
    monkeypatch.setattr(world._Joined, "times", 0)
    launcher(monkeypatch, RANK=1, WORLD_SIZE=3)
    with pytest.raises(WorkerError, match=r"rank 0 is one of 2 workers, and this one of 3; .*another job at another port"):
        join("cpu")


def test_a_busy_port_is_named(listener: int) -> None:
    with pytest.raises(WorkerError, match=f"port {listener} on 127.0.0.1 is in use by another program.*use a free one"):
        open_store("127.0.0.1", listener, True, 1.0)


def test_a_program_that_is_no_store_is_not_waited_for(listener: int) -> None:
    with pytest.raises(WorkerError, match=f"a program other than rank 0 answered at 127.0.0.1:{listener}"):
        open_store("127.0.0.1", listener, False, 0.3)


def test_a_group_that_is_there_is_used_and_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        found = join("cpu")
        assert (found.rank, found.size, found.device.type) == (0, 1, "cpu")
        leave(found)
        assert dist.is_initialized()
        launcher(monkeypatch, RANK=1, WORLD_SIZE=2, LOCAL_RANK=1)
        with pytest.raises(WorkerError, match="the process group has rank 0 of 1, but RANK=1 and WORLD_SIZE=2"):
            join("cpu")
    finally:
        dist.destroy_process_group()


def test_one_rank_tells() -> None:
    told: list[int] = []
    error = WorkerError("no")
    error.reported_by = 0
    for rank in range(3):
        report_once(error, rank, lambda: told.append(1))
    assert told == [1]


def there(*workers: tuple[str, str]) -> list[dict[str, str]]:
    return [{"host": host, "gpu": gpu} for host, gpu in workers]


def test_workers_of_one_gpu_are_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    check_gpus(there(("a", "1"), ("a", "2"), ("b", "1")))  # a host may see one GPU each: what counts is which one it is
    check_gpus(there(("a", ""), ("a", "")))
    with pytest.raises(WorkerError, match="3 workers of host b have only 2 GPUs; start one worker per GPU") as found:
        check_gpus(there(("a", "1"), ("b", "2"), ("b", "3"), ("b", "2")))
    assert found.value.reported_by == 0
    monkeypatch.setenv("CARRYWAVE_SHARE_GPU", "0")
    with pytest.raises(WorkerError, match="2 workers of host a have only 1 GPU"):
        check_gpus(there(("a", "1"), ("a", "1")))
    for allowed in ("1", "2"):
        monkeypatch.setenv("CARRYWAVE_SHARE_GPU", allowed)
        check_gpus(there(("a", "1"), ("a", "1")))
