"""Reads what srun tells its tasks: with one task a node, tasks are hosts that start a worker per device; otherwise each task is a worker.

Ranks follow the nodes (all tasks of the first node, then those of the second), whatever srun's `--distribution`: neighbouring ranks
exchange the most. Workers meet on the first node, at a port derived from the job, so that two jobs on a node do not meet. Torch-free.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

from carrywave.errors import WorkerError
from carrywave.launch.engines.hosts import SLURM, Hosts, with_port
from carrywave.launch.hardware import cores
from carrywave.parallel.startup.addresses import interface_of
from carrywave.parallel.startup.launcher_env import JOB, deal_threads, launched

FIRST_PORT, PORTS = 16384, 16384  # below the range from which Linux takes ports for outgoing connections
STEPS_APART = 131  # between the ports of steps of one job; neighbouring jobs have neighbouring ports
MOST_NODES = 65536  # more than Slurm can have in a list
SCONTROL_SECONDS = 20


@dataclass(frozen=True)
class Task:
    """This process among the tasks that one srun started."""

    nodes: tuple[str, ...]
    tasks: tuple[int, ...]  # on each node
    node: int  # the index of this node
    local: int  # the index of this task on its node
    port: int
    job: str  # its id and that of the step

    @property
    def rank(self) -> int:
        """Its number, counted node by node."""
        return sum(self.tasks[: self.node]) + self.local


def task(environment: Mapping[str, str]) -> Task | None:
    """This process as a task of srun; None outside of srun, or if it started no other task."""
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return None  # a batch script, a login shell, or no Slurm at all
    size = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size == 1:
        return None
    listed = _given(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = expand(listed)
    tasks = _tasks_per_node(_given(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    node, local = _number(environment, "SLURM_NODEID"), _number(environment, "SLURM_LOCALID")
    if len(nodes) != len(tasks) or sum(tasks) != size or node >= len(nodes) or local >= tasks[node]:
        raise WorkerError(
            f"Slurm's variables contradict each other: {size} tasks, {tasks} on the nodes {listed}, and this one is task {local} of "
            f"node {node}; start the workers with srun, and leave the variables SLURM_* as they are"
        )
    job, step = _number(environment, "SLURM_JOB_ID", "SLURM_JOBID"), _number(environment, "SLURM_STEP_ID")
    return Task(tuple(nodes), tuple(tasks), node, local, FIRST_PORT + (job + STEPS_APART * step) % PORTS, f"{job}.{step}")


def is_host(environment: Mapping[str, str]) -> bool:
    """True if srun started one task on each of several nodes: each is a host that starts workers, and none of them itself."""
    own_task = task(environment)
    return own_task is not None and set(own_task.tasks) == {1}


def read(environment: Mapping[str, str], address_of: Callable[[str], str] | None = None) -> Hosts | None:
    """The nodes as hosts, each of which starts a worker for each of its devices; None unless srun started one task on each of several."""
    own_task = task(environment)
    if own_task is None or not is_host(environment):
        return None
    address_of = address_of or _address_of
    port = _own_port(environment, own_task)
    # Only the first node's address and this node's own are used; a large cluster has many others.
    known = {node: address_of(own_task.nodes[node]) for node in {0, own_task.node}}
    if address := environment.get("MASTER_ADDR"):
        known[0] = address
    addresses = tuple(with_port(known.get(node, name), port) for node, name in enumerate(own_task.nodes))
    return Hosts(addresses, tuple(f"node {name}" for name in own_task.nodes), own_task.node, SLURM, job=own_task.job)


def worker(environment: Mapping[str, str], address_of: Callable[[str], str] | None = None) -> dict[str, str]:
    """The launcher's variables for this task as a worker (RANK and the like); empty outside of srun, or if it is the only task.

    What the user has set stays: MASTER_ADDR, MASTER_PORT, the interface and the number of threads.
    """
    own_task = task(environment)
    if own_task is None:
        return {}
    here = own_task.tasks[own_task.node]
    variables = {
        "RANK": str(own_task.rank),
        "WORLD_SIZE": str(sum(own_task.tasks)),
        "LOCAL_RANK": str(own_task.local),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_PORT": str(_own_port(environment, own_task)),
        JOB: f"slurm {own_task.job}",
    }
    if len(own_task.nodes) == 1:
        # As in a launch on one host: nothing listens where another machine could reach it.
        variables |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    else:
        address_of = address_of or _address_of
        variables["MASTER_ADDR"] = address_of(own_task.nodes[0])
        if interface := interface_of(address_of(own_task.nodes[own_task.node])):
            variables["GLOO_SOCKET_IFNAME"] = interface
    if "OMP_NUM_THREADS" not in environment:
        variables["OMP_NUM_THREADS"] = str(_threads(environment, here))
    return {name: environment.get(name) or value for name, value in variables.items()}


def take_place(*, trains: bool) -> None:
    """Under srun, take this task's place among the workers: from here on it looks as if torchrun had started it.

    With `trains`, a task that is a host of a training run is none of them: it starts workers, which are.
    """
    if launched() or (trains and is_host(os.environ)):
        return
    variables = worker(os.environ)
    if variables and "OMP_NUM_THREADS" not in os.environ:
        deal_threads()
    os.environ.update(variables)


def doubt(environment: Mapping[str, str]) -> str | None:
    """What to say to a user whose job has several tasks of which this process uses one; None if there is nothing to say."""
    if "SLURM_JOB_ID" not in environment or "SLURM_STEP_ID" in environment:
        return None
    counts = {name: environment.get(name, "") for name in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS")}
    several = {name: count for name, count in counts.items() if count.isdecimal() and int(count) > 1}
    if not several:
        return None
    what = f"{several['SLURM_JOB_NUM_NODES']} nodes" if "SLURM_JOB_NUM_NODES" in several else f"{several['SLURM_NTASKS']} tasks"
    return f"this Slurm job has {what}, but this command runs once, on the first node; put srun in front of it to use them all"


def expand(listed: str) -> list[str]:
    """The names in a list of nodes as Slurm writes it: `n[1-3,07],m01` is n1, n2, n3, n07, m01."""
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|.", listed):
        if item == ",":
            continue
        parts = re.split(r"\[([^\[\]]*)\]", item)
        # Outside and inside of brackets take turns.
        choices = [_numbers(part, listed) if inside % 2 else [part] for inside, part in enumerate(parts)]
        size = 1
        for choice in choices:
            size *= len(choice)
        if item in "[]" or len(names) + size > MOST_NODES:
            raise _unreadable(listed)
        names += ["".join(chosen) for chosen in product(*choices)]
    if not names:
        raise _unreadable(listed)
    return names


def _numbers(text: str, listed: str) -> list[str]:
    """The numbers in one pair of brackets, with their leading zeros: `1-3,07`."""
    found: list[str] = []
    for item in text.split(","):
        first, dash, last = item.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or len(last) > 9 or not 0 <= int(last) - int(first) < MOST_NODES:
            raise _unreadable(listed)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _unreadable(listed: str) -> WorkerError:
    shown = listed if len(listed) <= 60 else f"{listed[:57]}…"
    return WorkerError(f"{shown!r} is not a list of Slurm nodes such as n[1-3,7]; start the workers with srun, which sets it")


def _tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", item)
        if match is None or len(counts) + int(match[2] or 1) > MOST_NODES:
            raise WorkerError(f"SLURM_TASKS_PER_NODE={text[:60]} is not a list such as 2(x3),1; start the workers with srun, which sets it")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _given(environment: Mapping[str, str], *names: str) -> str:
    """The first of these variables that is set: those of a step, or the older names."""
    for name in names:
        if environment.get(name):
            return environment[name]
    raise WorkerError(f"SLURM_STEP_ID is set but {names[0]} is not; start the workers with srun, or unset SLURM_STEP_ID")


def _number(environment: Mapping[str, str], *names: str) -> int:
    text = _given(environment, *names)
    if not text.isascii() or not text.isdecimal() or len(text) > 10:
        raise WorkerError(f"{names[0]}={text[:60]} is not a whole number >= 0; start the workers with srun, which sets it")
    return int(text)


def _own_port(environment: Mapping[str, str], task: Task) -> int:
    """The user's MASTER_PORT if there is one: another program may have the usual port."""
    return _number(environment, "MASTER_PORT") if environment.get("MASTER_PORT") else task.port


def _threads(environment: Mapping[str, str], here: int) -> int:
    """Threads of a task: the cores it asked for, or its share of those that the step has on this node, if it is not bound to fewer."""
    if environment.get("SLURM_CPUS_PER_TASK"):
        return max(1, _number(environment, "SLURM_CPUS_PER_TASK"))
    on_node = _number(environment, "SLURM_CPUS_ON_NODE") if environment.get("SLURM_CPUS_ON_NODE") else cores()
    return max(1, min(cores(), on_node // here))


def _address_of(name: str) -> str:
    """An address at which this host can reach a node: its name, or what Slurm knows if that is no name of the network."""
    try:
        socket.getaddrinfo(name, None)
        return name
    except (OSError, UnicodeError):
        pass
    try:
        asked = subprocess.run(
            ["scontrol", "show", "node", name],
            capture_output=True,
            text=True,
            check=False,
            timeout=SCONTROL_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return name  # whoever connects says that the host was not found
    known = re.search(r"\bNodeAddr=(\S+)", asked.stdout)
    return name if known is None else known[1]
