"""One process: which pairs connect and in which order, and what is issued as one batch. Real messages: tests/one_answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from carrywave.kernels.hopper import chip
from carrywave.parallel import process_groups
from carrywave.parallel.links import group_links
from carrywave.parallel.links.group_links import MOST_SENDS, GroupLinks, Peer, connect
from carrywave.parallel.world import World
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.messages import Channel, channels_of, with_messages
from carrywave.plan.schedule.schedule import wavefront

CPU = torch.device("cpu")
CHANNELS = channels_of(3, share_head=False)


class Groups:
    """Stands in for process groups: one is the ranks that it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def group(self, ranks: Any, use: str, backend: str | None = None, options: Any = None) -> Any:
        assert use == "messages"
        assert (backend == "nccl") == (options is not None)
        self.asked.append(tuple(ranks))
        return tuple(ranks)


class Work:
    """A batch under way, that completes when told."""

    def __init__(self) -> None:
        self.done = False
        self.waits = 0

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.waits += 1


class Device:
    """Notes what is issued: for each batch its group, and its messages as (what, peer)."""

    def __init__(self) -> None:
        self.batches: list[tuple[Any, list[tuple[str, int]]]] = []
        self.works: list[Work] = []
        self.tags: list[int] = []

    def batch_isend_irecv(self, operations: list[Any]) -> list[Work]:
        [group] = {each.group for each in operations}
        self.batches.append((group, [(each.op.__name__, each.peer) for each in operations]))
        self.tags += [each.tag for each in operations]
        self.works.append(Work())
        return [self.works[-1]]


class Operation:
    """As P2POp, which wants a real group."""

    def __init__(self, op: Any, tensor: torch.Tensor, peer: int, group: Any, tag: int) -> None:
        self.op, self.tensor, self.peer, self.group, self.tag = op, tensor, peer, group, tag


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    made = Groups()
    monkeypatch.setattr(process_groups, "group", made.group)
    monkeypatch.setattr(chip, "_kept_free", [0])  # what NCCL asks of the whole process is taken back
    return made


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(dist, "batch_isend_irecv", made.batch_isend_irecv)
    monkeypatch.setattr(dist, "P2POp", Operation)
    return made


def middle(*, in_order: bool = True) -> GroupLinks:
    """The links of stage 1 of 3; its replica starts at rank 3."""
    peers: Any = {0: Peer("left", 3), 2: Peer("right", 5)}  # type: ignore[arg-type]
    return GroupLinks(peers, CHANNELS, CPU, where=CPU, exclusive=in_order)


@pytest.mark.parametrize("rank", range(6))
def test_every_worker_creates_all_groups_in_one_order_and_greets_its_own(rank: int, groups: Groups, device: Device) -> None:
    links = connect(World(rank, 6, rank, 6, CPU, "nccl"), Plan(replicas=2, stages=3, share_head=True))
    assert groups.asked == [(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5)]
    own = [pair for pair in groups.asked if rank in pair]
    assert {pair.group for pair in links.peers.values()} == set(own)
    assert device.batches == [(pair, [("isend", sum(pair) - rank), ("irecv", sum(pair) - rank)]) for pair in own]
    assert [work.waits for work in device.works] == [1, 1]  # each has connected before the next is tried


@pytest.mark.parametrize(("backend", "kept_free"), [("gloo", [0, 0, 0]), ("nccl", [1, 2, 1])])
def test_kernels_leave_a_multiprocessor_for_every_pair_over_nccl(backend: str, kept_free: list[int]) -> None:
    program = with_messages(wavefront(3, 4))
    for stage, count in enumerate(kept_free):
        chip._kept_free[0] = 0
        links = connect(World(stage, 3, stage, 3, CPU, backend), Plan(stages=3))
        assert chip._kept_free[0] == count
        assert links.on_device == links.exclusive == (backend == "nccl")
        assert links.arranged(program) == (program.in_order if backend == "nccl" else program)


def test_batches_are_issued_in_order_and_end_with_a_receive(device: Device) -> None:
    links, word = middle(), torch.zeros(1)
    links.receive(Channel("F", 0, 1), (1,), torch.float32)
    links.receive(Channel("F", 0, 1), (1,), torch.float32)
    links.send(Channel("F", 1, 2), word)
    links.send(Channel("F", 1, 2), word)
    links.receive(Channel("B", 2, 1), (1,), torch.float32)
    links.send(Channel("B", 1, 0), word)
    links.send(Channel("F", 1, 2), word)
    assert device.batches == []
    links.flush()
    assert device.batches == [
        ("left", [("irecv", 3)]),
        ("left", [("irecv", 3)]),
        ("right", [("isend", 5), ("isend", 5), ("irecv", 5)]),
        ("left", [("isend", 3)]),
        ("right", [("isend", 5)]),
    ]
    links.flush()
    assert len(device.batches) == 5


def test_a_task_starts_a_new_batch_and_waits_for_its_own_alone(device: Device) -> None:
    links, word = middle(), torch.zeros(1)
    links.send(Channel("B", 1, 0), word)
    links.flush()
    links.send(Channel("B", 1, 0), word)
    later = links.receive(Channel("B", 2, 1), (1,), torch.float32)
    pending = links.receive(Channel("F", 0, 1), (1,), torch.float32)
    pending.wait()  # issues what has not been
    assert device.batches == [("left", [("isend", 3)]), ("left", [("isend", 3)]), ("right", [("irecv", 5)]), ("left", [("irecv", 3)])]
    assert [work.waits for work in device.works] == [0, 0, 0, 1]
    later.wait()
    assert [work.waits for work in device.works] == [0, 0, 1, 1]
    links.drain()
    assert [work.waits for work in device.works] == [1, 1, 1, 1]  # nothing is left, and nothing is waited for twice


def test_a_batch_keeps_its_tensors_until_it_has_completed(device: Device) -> None:
    links = middle()
    links.send(Channel("B", 1, 0), torch.zeros(1))
    links.send(Channel("F", 1, 2), torch.zeros(1))
    links.flush()
    device.works[1].done = True  # pairs complete in any order
    links.flush()
    assert [len(issued) for issued in links._under_way.values()] == [1, 0]
    device.works[0].done = True
    links.flush()
    assert [len(issued) for issued in links._under_way.values()] == [0, 0]


def test_over_gloo_each_message_goes_on_its_own_and_few_sends_are_in_flight(device: Device) -> None:
    """A receive is waited for only by who reads it: its message may come last of all."""
    links, word = middle(in_order=False), torch.zeros(1)
    links.receive(Channel("B", 2, 1), (1,), torch.float32)
    for _ in range(MOST_SENDS + 2):
        links.send(Channel("F", 1, 2), word)
        links.flush()
    assert device.batches == [("right", [("irecv", 5)]), *[("right", [("isend", 5)])] * (MOST_SENDS + 2)]
    assert device.tags == [CHANNELS.index(Channel("B", 2, 1)), *[CHANNELS.index(Channel("F", 1, 2))] * (MOST_SENDS + 2)]
    links.end()
    assert [work.waits for work in device.works] == [0, 1, 1, *[0] * MOST_SENDS]


def test_nccl_takes_order() -> None:
    assert group_links.takes_order("nccl")
    assert not group_links.takes_order("gloo")
