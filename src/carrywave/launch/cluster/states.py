"""What the launchers of several hosts tell each other: each its `HostState`, the first one also the `Commands` for all. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pydantic import TypeAdapter

from carrywave.launch.exit_reports import Ended, WorkerEnds


@dataclass(frozen=True)
class HostState:
    """What a launcher tells of its host."""

    devices: int
    host: str = ""  # its own name
    address: str = ""  # from which it reaches the first host
    launch: str = ""  # the launch it took part in before it came here; empty if none
    before: int = -1  # the last attempt of that launch
    attempt: int = -1  # the attempt in which its workers run or ended
    ends: WorkerEnds | None = None  # how they ended; None while they run
    steps: int = 0  # by which training advanced in that attempt
    run: str = ""  # the run's folder, if known
    asked: int | None = None  # a signal that arrived while no worker was running
    read: bool = False  # it has read how the launch ended
    launcher: str = ""  # the launcher itself, by a name that no other has

    @property
    def ready(self) -> bool:
        """True if none of its workers is running."""
        return self.attempt < 0 or self.ends is not None


class SeenHost(NamedTuple):
    """A host as the first one sees it."""

    join: int  # how often its launcher has joined: another number is another launcher
    state: HostState
    silent_seconds: float = 0.0  # since its last sign of life


class Member(NamedTuple):
    """A host that takes part in an attempt."""

    node: int
    join: int
    devices: tuple[int, ...]  # the devices to use on it, by index


@dataclass(frozen=True)
class Commands:
    """What the first host's launcher tells all of them to do."""

    launch: str = ""
    attempt: int = -1
    members: tuple[Member, ...] = ()  # in the order of their ranks
    fewer: bool = False  # the attempt has fewer workers than the launch started with
    over_seconds: float | None = None  # set when the attempt has failed: how long workers may still take to end by themselves
    lines: tuple[str, ...] = ()  # all that was to be printed so far
    ended: Ended | None = None  # how the launch ended

    @property
    def size(self) -> int:
        """The number of workers on all hosts."""
        return sum(len(member.devices) for member in self.members)

    def member(self, node: int, join: int) -> Member | None:
        """The part of this launcher in the attempt; None if it has none."""
        return next((member for member in self.members if (member.node, member.join) == (node, join)), None)

    def first_rank(self, node: int) -> int:
        """The lowest rank on a host."""
        before = [member.node for member in self.members].index(node)
        return sum(len(member.devices) for member in self.members[:before])

    def node_of(self, rank: int) -> int:
        """The host of a rank."""
        return [member.node for member in self.members for _ in member.devices][rank]


STATE, COMMANDS = TypeAdapter(HostState), TypeAdapter(Commands)  # as JSON, in which they travel
