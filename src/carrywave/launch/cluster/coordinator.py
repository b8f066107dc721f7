"""Decides for the launchers of several hosts, on the first one: when an attempt begins, with whom, when it has failed, what follows.

A `Coordinator` sees the states of all hosts and answers with commands. It has no clock, no connection and no process: all of these are
given to it. Between attempts it waits until every host is there and none of its workers is running. A host whose launcher falls silent or
was started again ends the attempt as a dead worker does; it has a limited time to come back, after which the run goes on without it if so
many workers may be missing. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from carrywave.launch.cluster.states import Commands, HostState, Member, SeenHost
from carrywave.launch.engines.hosts import Hosts
from carrywave.launch.exit_reports import FAULT, INTERRUPTED, MISTAKE, RESOURCE, STOPPED, Ended, WorkerEnds, together
from carrywave.launch.restart_policy import Place, RestartPolicy, where_from
from carrywave.launch.supervisor import DEATH_SECONDS, FAULT_SECONDS, GRACE_SECONDS


class Coordinator:
    """The first host's view of a launch on several hosts."""

    def __init__(
        self,
        hosts: Hosts,
        launch: str,
        *,
        restarts: int,
        least: int | None,
        start_seconds: float,
        silent_seconds: float,
        now: float,
        newest_step: Callable[[], int | None],
    ) -> None:
        self.commands = Commands(launch)
        self._newest_step = newest_step  # of the run's snapshots, if there is one
        self._hosts, self._restarts, self._least = hosts, restarts, least
        self._start_seconds, self._silent_seconds = start_seconds, silent_seconds
        self._deadline = now + start_seconds
        self._policy: RestartPolicy | None = None  # from the first attempt on
        self._without: set[int] = set()  # hosts that the run goes on without
        self._running = False
        self._ends: dict[int, HostState] = {}  # of the current attempt's hosts: those whose workers have ended,
        self._lost: dict[int, str] = {}  # and those whose launcher is gone, with what is known about it

    def look(self, seen: Mapping[int, SeenHost], now: float) -> Commands:
        """The commands, after a look at the hosts that have shown up."""
        if self.commands.ended is None:
            if self._running:
                self._watch(seen)
                if all(member.node in self._ends or member.node in self._lost for member in self.commands.members):
                    self._judge(now)
            else:
                self._gather(seen, now)
        return self.commands

    def _gather(self, seen: Mapping[int, SeenHost], now: float) -> None:
        """Begin the next attempt once everybody is there, or whoever is still missing has had time enough."""
        asked = next((each.state.asked for each in seen.values() if each.state.asked is not None), None)
        if asked is not None:
            self._finish(Ended(128 + asked))
            return
        self._take_back(seen)
        wanted = [node for node in range(len(self._hosts.names)) if node not in self._without]
        present = [node for node in wanted if node in seen and seen[node].state.ready and not self._is_silent(seen[node])]
        if present == wanted:
            self._begin({node: seen[node] for node in present})
        elif now > self._deadline:
            self._go_on_without({node: seen[node] for node in present}, [node for node in wanted if node not in present])

    def _go_on_without(self, present: dict[int, SeenHost], missing: list[int]) -> None:
        named = ", ".join(self._hosts.who(node) for node in missing)
        within = f"within {self._start_seconds:g} s"
        longer = "to wait longer, set CARRYWAVE_START_SECONDS"
        policy = self._policy
        if policy is None:
            count = sum(each.state.devices for each in present.values())
            if self._least is None or count < self._least:
                self._finish(Ended(MISTAKE, f"{named} did not show up {within}; start it there too ({longer})", "WorkerError"))
                return
            message = f"{named} did not show up {within}; continuing with {count} worker{'s' * (count != 1)} on {self._count(present)}"
        else:
            left = [place for place in policy.places if place.node in present]
            if len(left) < policy.least or not left:
                remedy = f"start every host again with --resume ({longer}; to go on with fewer workers, set --min-devices)"
                self._finish(Ended(FAULT, f"{named} did not come back {within}; {remedy}", died=True))
                return
            workers = f"{len(left)} of {policy.devices} workers on {self._count(present)}"
            message = f"{named} did not come back {within}; continuing with {workers} {where_from(self._newest_step())}"
        self._without |= set(missing)
        self._say(message)
        self._begin(present)

    def _take_back(self, seen: Mapping[int, SeenHost]) -> None:
        """Count on hosts again that the run went on without, if they have come back by now."""
        for node in sorted(self._without):
            if node in seen and seen[node].state.ready and not self._is_silent(seen[node]):
                self._without.remove(node)
                if self._policy is not None:
                    self._policy.take_back(Place(node, device) for device in range(seen[node].state.devices))

    def _count(self, present: Mapping[int, SeenHost]) -> str:
        return f"{len(present)} of {len(self._hosts.names)} hosts"

    def _begin(self, present: Mapping[int, SeenHost]) -> None:
        if self._policy is None:
            places = [Place(node, device) for node, each in present.items() for device in range(each.state.devices)]
            if self._least is not None and self._least > len(places):
                message = f"--min-devices {self._least} is more than the {len(places)} workers of all hosts; use at most {len(places)}"
                self._finish(Ended(MISTAKE, message, "PlanError"))
                return
            self._policy = RestartPolicy(places, self._restarts, self._least)
            self._continue_earlier(present)
        policy = self._policy
        # A host may come back with fewer devices than it had.
        left = [place for place in policy.places if place.node in present and place.device < present[place.node].state.devices]
        if len(left) < max(policy.least, 1):
            count = f"{len(left)} of {policy.devices}"
            remedy = "start every host again with --resume, or set --min-devices to go on with fewer"
            self._finish(Ended(FAULT, f"the hosts have only {count} workers left; {remedy}", died=True))
            return
        if len(left) < len(policy.places):
            policy.keep(left)
        nodes = dict.fromkeys(place.node for place in left)
        members = tuple(Member(node, present[node].join, tuple(place.device for place in left if place.node == node)) for node in nodes)
        self.commands = replace(self.commands, attempt=self.commands.attempt + 1, members=members, fewer=policy.fewer, over_seconds=None)
        self._ends, self._lost, self._running = {}, {}, True

    def _continue_earlier(self, present: Mapping[int, SeenHost]) -> None:
        """Take up the launch of hosts that were already running, if this host's launcher is the one that was started again."""
        earlier = [each.state for each in present.values() if each.state.launch]
        if earlier:
            newest = max(earlier, key=lambda state: state.before)
            self.commands = replace(self.commands, launch=newest.launch, attempt=newest.before)

    def _watch(self, seen: Mapping[int, SeenHost]) -> None:
        """Note which hosts have ended the attempt, and call it off everywhere if it has failed on one."""
        for node, join, _ in self.commands.members:
            if node in self._ends or node in self._lost:
                continue
            present = seen.get(node)
            if present is None or present.join != join:
                self._lost[node] = "was started again"
            elif present.state.attempt == self.commands.attempt and present.state.ends is not None:
                self._ends[node] = present.state
            elif self._is_silent(present):
                self._lost[node] = f"gave no sign of life for {present.silent_seconds:.0f} s"
        graces = [grace for state in self._ends.values() if state.ends is not None and (grace := _grace(state.ends)) is not None]
        if self._lost:
            graces.append(DEATH_SECONDS)
        if graces and (self.commands.over_seconds is None or min(graces) < self.commands.over_seconds):
            self.commands = replace(self.commands, over_seconds=min(graces))

    def _judge(self, now: float) -> None:
        """Decide what follows an attempt that has ended everywhere."""
        policy = self._policy
        assert policy is not None
        self._running = False
        all_ends = together(state.ends for state in self._ends.values() if state.ends is not None)
        ended = all_ends.ended(self.commands.size)
        # Workers whose launcher is gone stop in order, and the others with them; but nobody has asked for that. Others may have been
        # called off before they could tell anything. If all that are left have finished, so has the run.
        left = sum(len(member.devices) for member in self.commands.members if member.node not in self._lost)
        finished = ended.code == 0 and left == len(all_ends.codes) > 0
        unasked = ended.code in (0, STOPPED) and all_ends.asked is None
        if self._lost and not finished and (unasked or ended.lost):
            node, what = next(iter(self._lost.items()))
            ended = Ended(FAULT, f"{self._hosts.who(node)} {what}", died=True, rank=None)
        if not ended.died or all_ends.asked is not None:
            self._finish(ended)
            return
        steps = max((state.steps for state in self._ends.values()), default=0)
        again = policy.after(ended, steps, self._newest_step())
        if again is None:
            advice = self._advice(ended) if ended.lost or self._lost else ""
            self._finish(replace(ended, message=ended.message.partition(";")[0] + advice if advice else ended.message + policy.given_up))
            return
        if self._lost:
            named = ", ".join(self._hosts.who(node) for node in self._lost)
            again += f", as soon as {named} is back, within {self._start_seconds:g} s"
        self._say(again)
        # Workers that are still there are of no use to the next attempt.
        self.commands = replace(self.commands, over_seconds=0.0)
        self._deadline = now + self._start_seconds

    def _advice(self, ended: Ended) -> str:
        nodes = list(self._lost) or ([self.commands.node_of(ended.peer)] if ended.peer is not None else range(1, len(self._hosts.names)))
        return look_at(self._hosts, list(nodes))

    def _is_silent(self, host: SeenHost) -> bool:
        return host.silent_seconds > self._silent_seconds

    def _say(self, line: str) -> None:
        self.commands = replace(self.commands, lines=(*self.commands.lines, line))

    def _finish(self, ended: Ended) -> None:
        self.commands = replace(self.commands, ended=ended, over_seconds=0.0)


def look_at(hosts: Hosts, nodes: list[int]) -> str:
    """What to do when contact with hosts was lost for good."""
    named = ", ".join(hosts.who(node) for node in nodes)
    return (
        f"; check {named}: if it has ended, its output says why; if not, make sure that the hosts can reach each other; "
        "then start every host again with --resume"
    )


def _grace(ends: WorkerEnds) -> float | None:
    """How long the workers of other hosts may take to end by themselves; None if nothing has failed: others may still be saving."""
    codes = {rank: code for rank, code in ends.codes.items() if code not in (0, STOPPED, INTERRUPTED) or rank in ends.causes}
    if ends.asked is not None and codes:
        return GRACE_SECONDS
    if ends.silent or any(code < 0 and rank not in ends.causes for rank, code in codes.items()):
        return DEATH_SECONDS
    if any(cause.kind == "user" for cause in ends.causes.values()) or not {MISTAKE, RESOURCE}.isdisjoint(codes.values()):
        return GRACE_SECONDS
    return FAULT_SECONDS if codes else None
