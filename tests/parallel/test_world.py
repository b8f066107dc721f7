"""One process: what the launcher's variables may hold, and what is refused. With several processes: tests/distributed/test_world.py."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from carrywave.errors import ContactLost, DataError, ResourceError, SpecError, WorkerError
from carrywave.parallel import world
from carrywave.parallel.devices import check_gpus, pick_device
from carrywave.parallel.liveness.lost_contact import lost
from carrywave.parallel.startup import door, environment
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


def test_cuda_without_a_number_is_the_current_one_for_good(gpus: list[int]) -> None:
    found = [pick_device("cuda"), pick_device("auto"), World.alone(torch.device("cuda")).device]
    gpus[0] = 0
    assert found == [torch.device("cuda", 1)] * 3
    assert pick_device("cuda", local_rank=3) == torch.device("cuda", 1)  # the launcher's word


def test_the_number_of_a_gpu_counts(gpus: list[int]) -> None:
    assert pick_device("cuda:0", local_rank=1) == torch.device("cuda", 0)
    with pytest.raises(SpecError, match="device cuda:2 not found: this host has 2 GPUs, from cuda:0; use one of them"):
        pick_device("cuda:2")
    for name in ("cuda:", "cuda:x", "cpu:0"):
        with pytest.raises(SpecError, match=f"unknown device '{name}'; use auto, cpu, cuda or cuda:INDEX"):
            pick_device(name)


def test_a_device_that_is_not_known_is_refused() -> None:
    with pytest.raises(SpecError, match="unknown device 'tpu'; use auto, cpu, cuda or cuda:INDEX"):
        pick_device("tpu")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": 0}, "RANK is set but WORLD_SIZE is not; start the workers with torchrun"),
        ({"WORLD_SIZE": 2}, "WORLD_SIZE is set but RANK is not"),
        ({"RANK": 0, "WORLD_SIZE": 2}, "RANK is set but LOCAL_RANK is not; .* SLURM_LOCALID"),
        ({"RANK": "one", "WORLD_SIZE": 2, "LOCAL_RANK": 0}, "RANK=one is not a whole number >= 0"),
        ({"RANK": "٣", "WORLD_SIZE": 4, "LOCAL_RANK": 0}, "RANK=٣ is not a whole number >= 0"),
        ({"RANK": "9" * 5000, "WORLD_SIZE": 2, "LOCAL_RANK": 0}, "RANK=9{57}… is not a whole number >= 0"),
        ({"RANK": -1, "WORLD_SIZE": 2, "LOCAL_RANK": 0}, "RANK=-1 is not a whole number >= 0"),
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
        (
            {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "a" * 300, "MASTER_PORT": 29500},
            "host a{57}… not found",
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


ONE = {"spec": "{}", "run": "one"}


def come(monkeypatch: pytest.MonkeyPatch, job: dict[str, str], **variables: object) -> None:
    """Rank 1 comes to a port where rank 0 of the job ONE has put up its card, and is turned away."""
    port = free_port()
    store = open_store("127.0.0.1", port, True, 5.0)
    door.put_up(store, door.WORKERS, {"size": "2", **ONE})
    own: dict[str, object] = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    launcher(monkeypatch, CARRYWAVE_START_SECONDS=60, **(own | variables))
    with pytest.raises(WorkerError) as raised:
        join("cpu", job)
    assert str(raised.value).startswith(f"another job (run one) uses port {port} on 127.0.0.1"), raised.value
    assert "choose another port" in str(raised.value)


@pytest.mark.parametrize("job", [ONE | {"run": "two"}, ONE | {"spec": "other"}, {}])
def test_a_worker_of_another_job_is_turned_away(job: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    come(monkeypatch, job)


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": 3},
        {"TORCHELASTIC_RUN_ID": "mine"},
        {"CARRYWAVE_JOB": "slurm 7.0"},
        {"CARRYWAVE_SECRET": "x"},
    ],
)
def test_so_is_one_that_another_launcher_or_engine_started(variables: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    come(monkeypatch, ONE, **variables)


def test_so_is_one_of_another_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    come(monkeypatch, ONE, **WorkerFile(launch="a").write(tmp_path / "worker.json"))


@pytest.mark.parametrize("before", [{"times": 1}, {"attempt": 1}])
def test_the_next_run_of_a_script_is_no_other_job(before: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the first after a restart, if the script has left out what was done; rank 1 may be there before rank 0 has put up its card."""
    port = free_port()
    store = open_store("127.0.0.1", port, True, 5.0)
    door.put_up(store, door.WORKERS, {"size": "2", **ONE})
    monkeypatch.setattr(world._Joined, "times", before.get("times", 0))
    own: dict[str, object] = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    launcher(monkeypatch, CARRYWAVE_START_SECONDS=0.5, TORCHELASTIC_RESTART_COUNT=before.get("attempt", 0), **own)
    with pytest.raises(WorkerError, match="rank 0 of 2 did not show up"):
        join("cpu", ONE | {"run": "two"})


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
    with pytest.raises(ContactLost, match=r"rank 1 of 2 is already there, or was: another process of this job; restart all workers"):
        join("cpu")


def test_of_many_that_stay_away_some_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launcher(monkeypatch, RANK=0, WORLD_SIZE=99_999_999, LOCAL_RANK=0, **in_file(tmp_path), CARRYWAVE_START_SECONDS=0.1)
    with pytest.raises(WorkerError, match=r"^ranks 1, 2, 3, 4, 5, 6, 7, 8 and others of 99999999 did not show up"):
        join("cpu")


def test_a_busy_port_is_named(listener: int) -> None:
    with pytest.raises(WorkerError, match=f"port {listener} on 127.0.0.1 is in use by another program; use a free one"):
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


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:47012: Connection reset by peer"),
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2"),
        RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"),
        RuntimeError("Timeout waiting for key: here/1 after 200 ms"),
        ContactLost("contact with rank 1 was lost"),
        dist.DistNetworkError("Failed to recv, got 0 bytes"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
    ],
)
def test_lost_contact_is_known(error: Exception) -> None:
    assert lost(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Connection closed by peer"),
        RuntimeError("shape '[2]' is invalid"),
        KeyboardInterrupt(),
        OSError(28, "No space left"),
        ConnectionRefusedError(111, "Connection refused"),  # of a data base that the user reads from
        BrokenPipeError(32, "Broken pipe"),
        RuntimeError("the data base answered: connection reset by peer"),
        TimeoutError("timed out after 5 s"),
    ],
)
def test_a_failure_of_our_own_is_no_lost_contact(error: BaseException) -> None:
    assert not lost(error)


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


def test_a_limit_of_open_files_that_is_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, raised = [(24, 24)], []
    monkeypatch.setattr(environment.resource, "getrlimit", lambda _: limits[0])
    monkeypatch.setattr(environment.resource, "setrlimit", lambda _, to: raised.append(to))
    with pytest.raises(ResourceError, match=r"may have 24 open files, but one of 2 workers needs 48; raise the limit \(ulimit -n 1024\)"):
        environment.check_descriptors(2)
    limits[0] = (24, 4096)
    environment.check_descriptors(2)
    assert raised == [(48, 4096)]
