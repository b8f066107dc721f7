"""Process groups that several meshes share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from carrywave.parallel import process_groups
from carrywave.parallel.links.transport import GroupLinks, PeerLink
from carrywave.plan.schedule.messages import Channel

LINE = Channel("F", 0, 1)


@pytest.fixture
def _world(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "meeting"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        process_groups.leave()


def links() -> GroupLinks:
    return GroupLinks({LINE: PeerLink(process_groups.group([0], "shared"), 0)}, torch.device("cpu"), staged=False)


@pytest.mark.usefixtures("_world")
def test_whoever_shares_a_group_lets_go_of_it_when_one_closes() -> None:
    """Otherwise the connection would stay open, and a peer would wait in it."""
    first, second, gone = links(), links(), links()
    group = first.channels[LINE].group
    assert second.channels[LINE].group is group
    del gone
    gc.collect()
    assert not first.closed
    assert not second.closed
    for _ in range(2):
        first.close()
        assert first.closed
        assert second.closed
        assert not second.channels
    assert links().channels[LINE].group is not group


@pytest.mark.usefixtures("_world")
def test_links_over_other_groups_stay_open() -> None:
    first = links()
    second = GroupLinks({LINE: PeerLink(process_groups.group([0], "other"), 0)}, torch.device("cpu"), staged=False)
    first.close()
    assert not second.closed


@pytest.mark.usefixtures("_world")
def test_a_group_from_before_a_failure_is_destroyed_once_nobody_uses_it() -> None:
    """It had stayed, with its threads and connections, for as long as the process."""
    first = links()
    group = first.channels[LINE].group
    there = dist.distributed_c10d._world.pg_map
    process_groups.spoil()
    failures = process_groups.agreed() + 1
    process_groups.agree(lambda text: [str(failures)])
    assert links().channels[LINE].group is not group
    assert not first.closed  # a trainer from before may still use it
    assert group in there
    del first
    gc.collect()
    process_groups.agree(lambda text: [str(failures)])
    assert group not in there
