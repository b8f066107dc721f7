"""Where workers meet to share memory, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from carrywave.errors import WorkerError
from carrywave.parallel import process_groups
from carrywave.parallel.memory import symmetric


@pytest.fixture
def world(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "meeting"), 1), rank=0, world_size=1)
    try:
        yield dist.group.WORLD  # type: ignore[misc]
    finally:
        dist.destroy_process_group()


def met(world: dist.ProcessGroup) -> str:
    """Where a worker waits for the others of its group."""
    symmetric._meeting(world)
    return symmetric._kept[-1][0].name


def test_every_buffer_has_a_meeting_of_its_own(world: dist.ProcessGroup) -> None:
    assert len({met(world) for _ in range(3)}) == 3


def test_after_a_failure_workers_meet_again_whether_they_have_waited_for_the_lost_buffer_or_not(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_groups._Made, "agreed", 0)
    monkeypatch.setattr(process_groups._Made, "spoils", 0)
    found = []
    for waited in (1, 2):  # one worker failed before it, the other waited for it in vain
        symmetric._made.clear()
        process_groups._Made.agreed = 0
        for _ in range(waited):
            before = met(world)
        process_groups.agree(lambda text: ["1", "1"])
        found.append(met(world))
        assert found[-1] != before
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("CUDA driver error: peer mapping resources exhausted\nsomewhere"), WorkerError),
        (torch.OutOfMemoryError("no room"), torch.OutOfMemoryError),
        (dist.DistNetworkError("connection reset by peer"), dist.DistNetworkError),
    ],
)
def test_memory_that_cannot_be_shared_is_told_with_a_way_out(
    error: Exception, kind: type[Exception], world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(symmetric, "SymmetricMemory", fail)
    with pytest.raises(kind) as told:
        symmetric.symmetric_memory(world, 1, torch.device("cpu"))
    if kind is WorkerError:
        said = "the workers' GPUs could not share memory (CUDA driver error: peer mapping resources exhausted)"
        assert str(told.value) == f"{said}; set CARRYWAVE_TRANSPORT=nccl, or gloo where workers share a GPU"
