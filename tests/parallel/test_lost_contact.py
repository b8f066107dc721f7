"""Which errors tell of another worker, and which are this worker's own. With real processes: tests/distributed/test_contact.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from carrywave.errors import ContactLost, WorkerError
from carrywave.parallel import process_groups
from carrywave.parallel.liveness import device_faults, lost_contact
from carrywave.parallel.liveness.lost_contact import _Culprit
from carrywave.parallel.startup import process_identity

LAUNCH = "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:47012: Connection reset by peer"), True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"), True),
        (RuntimeError("Timeout waiting for key: here/1 after 200 ms"), True),
        (ContactLost("contact with rank 1 was lost"), True),
        (dist.DistNetworkError("Failed to recv, got 0 bytes"), True),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (ValueError("Connection closed by peer"), False),
        (RuntimeError("shape '[2]' is invalid"), False),
        (KeyboardInterrupt(), False),
        (ConnectionRefusedError(111, "Connection refused"), False),  # of a data base that the user reads from
        (RuntimeError("the data base answered: connection reset by peer"), False),
    ],
)
def test_lost_contact_is_told_from_a_failure_of_ones_own(error: BaseException, lost: bool) -> None:
    assert lost_contact.lost(error) == lost


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        (torch.AcceleratorError(LAUNCH), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False),
        (RuntimeError("shape '[2]' is invalid"), False),
        (ValueError("CUDA error: unspecified launch failure"), False),
    ],
)
def test_what_an_error_of_the_device_is(error: Exception, is_fault: bool) -> None:
    assert device_faults.is_fault(error) == is_fault


@pytest.fixture
def _three(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rank 0 of three on this host, of which rank 2's process can be said to be gone."""
    monkeypatch.setattr(lost_contact, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(lost_contact._Reported, "workers", [process_identity.identity(os.getpid()) for _ in range(3)])
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_three")
@pytest.mark.parametrize(
    ("told", "gone", "culprit"),
    [
        ({}, (), _Culprit()),  # nothing can be said
        ({1: ""}, (), _Culprit(2)),  # the only one that has not lost contact too
        ({1: "", 2: "ValueError: oops"}, (), _Culprit(2, "ValueError: oops")),
        ({2: "ValueError: oops"}, (1,), _Culprit(2, "ValueError: oops")),  # rank 1 ended because of it
        ({}, (2,), _Culprit(2)),
    ],
)
def test_who_ended_first(told: dict[int, str], gone: tuple[int, ...], culprit: _Culprit, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, why in told.items():
        dist.distributed_c10d._get_default_store().set(lost_contact._key(rank), why)
    looked = [0]

    def is_gone(worker: object) -> bool:
        looked[0] += 1
        return (looked[0] - 1) % 2 + 1 in gone  # asked of ranks 1 and 2 in turn

    monkeypatch.setattr(lost_contact, "is_gone", is_gone)
    assert lost_contact._look(certain=False) == culprit
    said = str(lost_contact.of(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2")))
    assert said.startswith("contact with " + ("another worker at 127.0.0.1" if culprit.rank is None else f"rank {culprit.rank} on "))
    assert (f"(its step failed with {culprit.why})" if culprit.why else "(the connection closed)") in said


@pytest.mark.usefixtures("_three")
def test_after_a_step_that_ended_halfway_nothing_more_is_sent() -> None:
    process_groups.limit(10.0)
    process_groups.check_unspoilt()
    lost_contact.announce_failure(ValueError("oops"))
    assert dist.distributed_c10d._get_default_store().get(lost_contact._key(0)) == b"ValueError: oops"
    with pytest.raises(WorkerError, match=r"ended halfway.*start all of them again"):
        process_groups.check_unspoilt()
    process_groups.limit(10.0)  # as another world does


@pytest.fixture
def _device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process uses device memory, and a message may take 10 s."""
    monkeypatch.setattr(device_faults._Exchanges, "in_use", True)
    monkeypatch.setattr(device_faults._Exchanges, "began_seconds", None)
    monkeypatch.setattr(process_groups, "seconds", lambda: 10.0)


@pytest.mark.usefixtures("_device_memory")
def test_a_device_error_tells_of_who_is_gone_and_is_looked_into_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        raise error

    for gone, rank in ((_Culprit(), None), (_Culprit(2), 2)):
        error = torch.AcceleratorError(LAUNCH)
        monkeypatch.setattr(lost_contact, "_look", lambda *, certain, gone=gone: gone if certain else _Culprit(1))
        with pytest.raises(RuntimeError) as raised:
            lost_contact.kept(step)()
        assert isinstance(raised.value, ContactLost) == (rank is not None)
        assert getattr(raised.value, "rank", None) == rank
        monkeypatch.setattr(lost_contact, "_look", lambda *, certain: _Culprit(1))
        assert lost_contact.lost(error) == (rank is not None)


@pytest.mark.usefixtures("_device_memory")
@pytest.mark.parametrize(
    ("text", "waited_seconds", "is_timeout"),
    [(LAUNCH, 9.8, True), (LAUNCH, 5.0, False), ("CUDA error: an illegal memory access was encountered", 20.0, False)],
)
def test_a_signal_that_does_not_come(text: str, waited_seconds: float, is_timeout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_faults._Exchanges, "began_seconds", time.monotonic() - waited_seconds)
    error = torch.AcceleratorError(text)
    assert lost_contact.lost(error) == is_timeout
    if is_timeout:
        assert str(lost_contact.of(error)).startswith("a message between devices did not come within 10 s")


ENDS = """
import atexit
from carrywave.parallel.liveness import lost_contact
lost_contact.use_device()
atexit.register(print, "torn down")
print("printed", end="")
raise ValueError("oops")
"""


def test_with_device_memory_an_error_that_nobody_catches_ends_the_process_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "printed")
    assert done.stderr.endswith("ValueError: oops\n")


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_who_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exiting process takes a while to let go of a GPU, and its neighbours see that before it has ended."""
    known = process_identity.identity(os.getppid())
    assert not process_identity.is_gone(known)
    assert process_identity.is_gone(known | {"born": "1"})  # the id is used again
    assert process_identity.is_gone(known | {"pid": 2**22 + 1})
    assert not process_identity.is_gone(known | {"pid": 2**22 + 1, "boot": "another"})
    words = process_identity.stat_fields(os.getppid())
    monkeypatch.setattr(process_identity, "stat_fields", lambda pid: [*words[:6], str(int(words[6]) | 0x4), *words[7:]])
    assert process_identity.is_gone(known)
