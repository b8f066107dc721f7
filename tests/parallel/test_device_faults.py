"""CUDA errors: which tell of another worker, and which are this worker's own."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from carrywave.errors import ContactLost, WorkerError
from carrywave.parallel import process_groups
from carrywave.parallel.links.device_links import DeviceLinks, Message
from carrywave.parallel.liveness import device_faults, lost_contact
from carrywave.parallel.startup import process_identity
from carrywave.plan.schedule.messages import channels_of, with_messages
from carrywave.plan.schedule.schedule import wavefront

LAUNCH = torch.AcceleratorError("CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported")


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process uses device memory, and a message may take 10 s."""
    monkeypatch.setattr(device_faults._Exchanges, "in_use", True)
    monkeypatch.setattr(device_faults._Exchanges, "began_seconds", None)
    monkeypatch.setattr(process_groups, "seconds", lambda: 10.0)


def fresh(error: Exception) -> Exception:
    return type(error)(*error.args)


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        (LAUNCH, True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("CUDA_ERROR_LAUNCH_FAILED"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False),
        (RuntimeError("shape '[2]' is invalid"), False),
        (ValueError("CUDA error: unspecified launch failure"), False),
    ],
)
def test_what_an_error_of_the_device_is(error: Exception, is_fault: bool) -> None:
    assert device_faults.is_fault(error) == is_fault


def test_without_shared_memory_a_device_error_tells_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_faults._Exchanges, "in_use", False)
    monkeypatch.setattr(device_faults._Exchanges, "began_seconds", -1e9)
    assert not lost_contact.lost(fresh(LAUNCH))
    device_faults.leave_if_in_use(3)  # which would end this process


@pytest.mark.usefixtures("used")
def test_a_device_error_while_everybody_lives_is_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_contact, "_gone_ranks", lambda *, certain: [])
    device_faults.begin()
    error = fresh(LAUNCH)
    assert not lost_contact.lost(error)
    monkeypatch.setattr(lost_contact, "_gone_ranks", lambda *, certain: [1])
    assert not lost_contact.lost(error)  # it is not looked into twice


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize(("gone", "rank", "who"), [([2], 2, "rank 2"), ([1, 2], None, "another worker")])
def test_a_device_error_tells_of_who_is_gone(gone: list[int], rank: int | None, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_contact, "_gone_ranks", lambda *, certain: gone if certain else [])

    @lost_contact.kept
    def step() -> None:
        raise fresh(LAUNCH)

    with pytest.raises(ContactLost) as found:
        step()
    assert found.value.rank == rank
    assert str(found.value).startswith(f"contact with {who} was lost at ")
    assert str(found.value).endswith(" (CUDA error: unspecified launch failure); see that worker's output, then restart all workers")


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize(
    ("text", "waited_seconds", "is_timeout"),
    [
        ("CUDA error: unspecified launch failure", 9.8, True),
        ("CUDA error: unspecified launch failure", 5.0, False),
        ("CUDA error: an illegal memory access was encountered", 20.0, False),
    ],
)
def test_a_signal_that_does_not_come(text: str, waited_seconds: float, is_timeout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_contact, "_gone_ranks", lambda *, certain: [])
    monkeypatch.setattr(device_faults._Exchanges, "began_seconds", time.monotonic() - waited_seconds)
    error = torch.AcceleratorError(text)
    assert lost_contact.lost(error) == is_timeout
    if is_timeout:
        assert str(lost_contact.of(error)).startswith("a message between devices did not come within 10 s")


ENDS = """
import atexit, sys
from carrywave.parallel.liveness import lost_contact
lost_contact.use_device()
atexit.register(print, "torn down")
print("printed", end="")
raise ValueError("oops")
"""


def test_an_error_that_nobody_catches_ends_the_process_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "printed")
    assert done.stderr.endswith("ValueError: oops\n")


def test_an_exiting_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a while to let go of a GPU, and its neighbours see that before it has ended."""
    known = process_identity.identity(os.getppid())
    assert not process_identity.is_gone(known)
    read = process_identity.stat_fields

    def exiting(pid: int) -> list[str]:
        words = read(pid)
        return [*words[:6], str(int(words[6]) | 0x4), *words[7:]] if pid == known["pid"] else words

    monkeypatch.setattr(process_identity, "stat_fields", exiting)
    assert process_identity.is_gone(known)


class _Memory:
    """Freeing it would wait for the device."""

    rank, workers, size = 0, 2, 1 << 30
    freed = False

    def signal(self, rank: int, number: int) -> None:
        pass

    def __del__(self) -> None:
        type(self).freed = True


def test_links_that_are_closed_free_nothing() -> None:
    links = DeviceLinks(0, lambda pair, size: _Memory())  # type: ignore[arg-type,return-value]
    links._memory((0, 1), 1)
    for _ in range(2):
        links.close()
        assert links.memories == {}
        assert not _Memory.freed


def test_links_that_are_closed_make_no_new_memory() -> None:
    """The neighbour, which may have closed nothing, would not come to make it."""
    made: list[int] = []
    links = DeviceLinks(0, lambda pair, size: made.append(size) or _Memory())  # type: ignore[arg-type,func-returns-value,return-value]
    program = with_messages(wavefront(2, 1))
    messages = {line: [Message(0, 4)] for line in channels_of(2, share_head=False)}
    links.begin(program, messages)
    assert made == [1 << 20]
    links.close()
    with pytest.raises(WorkerError, match="broken off by a step that failed; create a new Trainer on all workers"):
        links.begin(program, messages)
    assert made == [1 << 20]
