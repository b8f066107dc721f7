"""What the first of several hosts decides, seen from outside: hosts that show up, fail, fall silent, come back or stay away."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from carrywave.launch.cluster.coordinator import Coordinator
from carrywave.launch.cluster.states import COMMANDS, STATE, Commands, HostState, Member, SeenHost
from carrywave.launch.engines.hosts import Hosts
from carrywave.launch.exit_reports import Ended, WorkerEnds
from carrywave.parallel.liveness.failure_file import Cause

LIMITS = {"start_seconds": 60.0, "silent_seconds": 10.0, "now": 0.0}
HOSTS = Hosts(("a:1", "b:1"), ("worker 0", "worker 1"), 0)


class Scene:
    """Two hosts, whose launchers do what they are ordered."""

    def __init__(self, *, devices: tuple[int, int] = (2, 1), restarts: int = 3, least: int | None = None) -> None:
        self.coordinator = Coordinator(HOSTS, "launch", restarts=restarts, least=least, **LIMITS, newest_step=lambda: self.step)
        self.now = 0.0
        self.step: int | None = None  # of the newest snapshot
        self.seen = {node: SeenHost(1, HostState(count)) for node, count in enumerate(devices)}

    @property
    def commands(self) -> Commands:
        return self.coordinator.commands

    def look(self, seconds: float = 0.1) -> Commands:
        self.now += seconds
        return self.coordinator.look(self.seen, self.now)

    def tell(self, node: int, **changes: object) -> None:
        self.seen[node] = self.seen[node]._replace(state=replace(self.seen[node].state, **changes))

    def begin(self) -> Commands:
        """The hosts start the attempt that they were ordered to start."""
        commands = self.look()
        for member in commands.members:
            self.tell(member.node, attempt=commands.attempt, ends=None)
        return commands

    def end(self, node: int, codes: dict[int, int], *causes: Cause, asked: int | None = None, steps: int = 5) -> Commands:
        self.tell(node, ends=WorkerEnds(codes, {cause.rank: cause for cause in causes}, asked), steps=steps)
        return self.look()

    def fall_silent(self, node: int) -> Commands:
        self.seen[node] = self.seen[node]._replace(silent_seconds=11.0)
        return self.look()

    def come_back(self, node: int, devices: int = 1, **state: object) -> Commands:
        self.seen[node] = SeenHost(self.seen[node].join + 1, HostState(devices, **state))  # type: ignore[arg-type]
        return self.look()


def lost(rank: int, peer: int | None = None) -> Cause:
    return Cause(rank, "lost", 1, f"contact with rank {peer} was lost at 12:00:00 (closed); restart all workers", peer=peer)


def test_ranks_follow_the_hosts() -> None:
    scene = Scene()
    commands = scene.look()
    assert (commands.attempt, commands.size, commands.fewer) == (0, 3, False)
    assert commands.members == (Member(0, 1, (0, 1)), Member(1, 1, (0,)))
    assert [commands.first_rank(node) for node in range(2)] == [0, 2]
    assert [commands.node_of(rank) for rank in range(3)] == [0, 0, 1]
    assert commands.member(1, 1) == Member(1, 1, (0,))
    assert commands.member(1, 2) is None  # a launcher that was started again has no part in it


def test_an_attempt_begins_when_all_are_there_and_a_host_that_stays_away_is_named() -> None:
    scene = Scene()
    late = scene.seen.pop(1)
    assert scene.look(59).attempt == -1
    ended = scene.look(2).ended
    assert ended == Ended(
        2, "worker 1 (b:1) did not show up within 60 s; start it there too (to wait longer, set CARRYWAVE_START_SECONDS)", "WorkerError"
    )
    scene = Scene()
    del scene.seen[1]
    scene.look(59)
    scene.seen[1] = late
    assert scene.look().attempt == 0


def test_a_run_that_ends_well() -> None:
    scene = Scene()
    scene.begin()
    assert scene.end(0, {0: 0, 1: 0}).ended is None
    assert scene.commands.over_seconds is None  # the others may still be saving
    assert scene.end(1, {2: 0}).ended == Ended(0)


def test_a_death_on_one_host_ends_the_attempt_on_all_and_all_restart() -> None:
    scene = Scene()
    scene.begin()
    commands = scene.end(1, {2: -9})
    assert commands.over_seconds == pytest.approx(0.2)  # nobody has anything to add
    assert (commands.attempt, commands.ended) == (0, None)
    scene.step = 40
    commands = scene.end(0, {})  # called off
    assert commands.lines == ("worker 2 of 3 was killed (signal 9, SIGKILL); restarting from step 40 (restart 1 of 3)",)
    commands = scene.begin()
    assert (commands.attempt, commands.over_seconds, commands.size) == (1, None, 3)
    scene.end(0, {0: 0, 1: 0})
    assert scene.end(1, {2: 0}).ended == Ended(0)


def test_the_first_cause_is_told_wherever_it_was() -> None:
    scene = Scene(restarts=0)
    scene.begin()
    scene.end(0, {0: 1, 1: 1}, lost(0), lost(1, peer=2))
    ended = scene.end(1, {2: -11}).ended
    assert ended is not None
    assert (ended.code, ended.message) == (1, "worker 2 of 3 was killed (signal 11, SIGSEGV)")


def test_a_mistake_is_final_and_gives_the_others_time() -> None:
    scene = Scene()
    scene.begin()
    said = Cause(0, "user", 2, "no such file; name one", "DataError", shared=True)
    assert scene.end(0, {0: 2, 1: 2}, said).over_seconds == 5.0
    assert scene.end(1, {2: 2}).ended == Ended(2, "no such file; name one", "DataError")


def test_restarts_without_progress_are_limited() -> None:
    scene = Scene(restarts=2)
    for _ in range(2):
        scene.begin()
        scene.end(0, {0: -9, 1: 0})
        assert scene.end(1, {}).ended is None
    scene.begin()
    scene.end(0, {0: -9, 1: 0})
    ended = scene.end(1, {}).ended
    assert ended is not None
    assert ended.code == 1
    assert ended.message.endswith("; gave up after 2 restarts without progress")


def test_a_stop_on_request_is_final() -> None:
    scene = Scene()
    scene.begin()
    scene.end(0, {0: 75, 1: 75}, asked=signal.SIGTERM)
    assert scene.end(1, {2: 75}).ended == Ended(75)
    scene = Scene()
    scene.begin()
    assert scene.end(1, {2: -15}, asked=signal.SIGTERM).over_seconds == 5.0  # before the first step: the others lose contact
    assert scene.end(0, {}).ended == Ended(143)


def test_a_signal_between_attempts_ends_all() -> None:
    scene = Scene()
    scene.begin()
    scene.end(0, {0: -9, 1: 0})
    del scene.seen[1]
    scene.seen[1] = SeenHost(2, HostState(1, asked=signal.SIGTERM))
    scene.look()
    assert scene.look().ended == Ended(143)


@pytest.mark.parametrize("codes", [{}, {0: 75, 1: 75}])
def test_a_launcher_that_is_gone_ends_the_attempt_and_may_come_back(codes: dict[int, int]) -> None:
    """Workers without a launcher stop in order, with the others; or the others are called off first."""
    scene = Scene()
    scene.begin()
    scene.step = 8
    scene.fall_silent(1)
    commands = scene.end(0, codes)
    again = "restarting from step 8 (restart 1 of 3), as soon as worker 1 (b:1) is back, within 60 s"
    assert commands.lines == (f"worker 1 (b:1) gave no sign of life for 11 s; {again}",)
    assert scene.look(30).attempt == 0
    commands = scene.come_back(1)
    assert (commands.attempt, commands.ended) == (1, None)
    assert commands.member(1, 2) is not None


def test_a_launcher_that_was_started_again_at_once_is_noticed() -> None:
    scene = Scene()
    scene.begin()
    commands = scene.come_back(1)
    assert commands.over_seconds == pytest.approx(0.2)
    commands = scene.end(0, {})
    assert "worker 1 (b:1) was started again; restarting from the beginning" in commands.lines[0]
    assert scene.look().attempt == 1


def test_a_host_that_does_not_come_back_ends_the_run() -> None:
    scene = Scene()
    scene.begin()
    scene.fall_silent(1)
    scene.end(0, {})
    ended = scene.look(61).ended
    assert ended is not None
    assert ended.code == 1
    assert ended.message.startswith("worker 1 (b:1) did not come back within 60 s; start every host again with --resume")


def test_the_run_goes_on_without_a_host_where_that_is_allowed() -> None:
    scene = Scene(least=2)
    scene.begin()
    scene.fall_silent(1)
    scene.step = 16
    scene.end(0, {})
    commands = scene.look(61)
    assert commands.lines[-1] == (
        "worker 1 (b:1) did not come back within 60 s; continuing with 2 of 3 workers on 1 of 2 hosts from step 16"
    )
    assert (commands.attempt, commands.members, commands.fewer) == (1, (Member(0, 1, (0, 1)),), True)
    scene.begin()
    assert scene.come_back(1).attempt == 1  # too late: it waits, and the attempt goes on
    assert scene.commands.over_seconds is None
    assert scene.end(0, {0: 0, 1: 0}).ended == Ended(0)


def test_a_host_that_came_back_late_takes_part_after_the_next_restart() -> None:
    scene = Scene(least=2)
    scene.begin()
    scene.fall_silent(1)
    scene.end(0, {})
    scene.look(61)
    scene.begin()
    scene.come_back(1)
    scene.end(0, {0: -9, 1: 0})
    commands = scene.look()
    assert (commands.attempt, commands.members, commands.fewer) == (2, (Member(0, 1, (0, 1)), Member(1, 2, (0,))), False)


def test_too_few_workers_are_not_allowed() -> None:
    scene = Scene(least=3)
    scene.begin()
    scene.fall_silent(1)
    scene.end(0, {})
    assert scene.look(61).ended is not None
    ended = Scene(least=4).look().ended
    assert ended is not None
    assert ended.message == "--min-devices 4 is more than the 3 workers of all hosts; use at most 3"


def test_a_run_that_everybody_else_has_finished_is_finished() -> None:
    scene = Scene()
    scene.begin()
    scene.fall_silent(1)
    assert scene.end(0, {0: 0, 1: 0}).ended == Ended(0)


def test_a_device_that_dies_at_every_start_is_left_out() -> None:
    scene = Scene(least=2)
    for _ in range(2):
        scene.begin()
        scene.end(1, {2: -9}, steps=0)
        scene.end(0, {}, steps=0)
    assert scene.commands.lines[-1].endswith("continuing with 2 of 3 workers from the beginning")
    assert scene.look().members == (Member(0, 1, (0, 1)),)


def test_a_first_host_that_was_started_again_takes_up_the_launch() -> None:
    """The others kept its name, and the number of the last attempt."""
    scene = Scene()
    scene.tell(1, launch="earlier", before=4)
    commands = scene.look()
    assert (commands.launch, commands.attempt) == ("earlier", 5)


def test_what_is_told_travels_as_text() -> None:
    state = HostState(
        2, "node1", "10.0.0.2", "x", 3, 4, WorkerEnds({2: -9}, {3: lost(3, 2)}, 15, frozenset({3}), {2: "hung"}), 7, "/run", 15, True
    )
    assert STATE.validate_json(STATE.dump_json(state)) == state
    commands = Commands("x", 2, (Member(0, 1, (0, 1)), Member(1, 2, (1,))), True, 0.2, ("a", "b"), Ended(2, "no; do", "DataError", rank=1))
    assert COMMANDS.validate_json(COMMANDS.dump_json(commands)) == commands
    assert COMMANDS.validate_json(COMMANDS.dump_json(Commands())) == Commands()
