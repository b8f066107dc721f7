"""What an engine says about the hosts that train together, read from its variables: a table of four readers. Torch-free.

`elastic` makes of the answer what torch's elastic agent needs to know. A process that has RANK is a worker, whatever else is set. A task of
srun may also be a worker itself; `take_place` gives it the variables of one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from carrywave.errors import UserError, WorkerError
from carrywave.launch.hardware import cores
from carrywave.parallel.startup.launcher_env import deal_threads, launched

PORT, USUAL_PORT = "CARRYWAVE_PORT", 29500  # where hosts meet if their engine names no port
FIRST_PORT, PORTS = 16384, 16384  # of Slurm's jobs: below the range from which Linux takes ports for outgoing connections
STEPS_APART = 131  # between the ports of steps of one job; neighbouring jobs have neighbouring ports
SCONTROL_SECONDS = 20

Env = Mapping[str, str]


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job, which all meet at the address of the first one; a single host is one too."""

    number: int
    index: int  # of this one
    first: str  # host:port
    job: str  # tells it from others that meet there
    workers: int | None = None  # on this host, if the engine says so

    @property
    def meeting(self) -> tuple[str, int]:
        """Host and port at which all meet."""
        return host_and_port(self.first)


def hosts_of(env: Env) -> Hosts | None:
    """The hosts that an engine names; None for a machine on its own, and for a worker that a launcher has started."""
    if launched(env):
        return None
    for name, read in ENGINES.items():
        if not env.get(name, "").strip():
            continue
        try:
            hosts = read(env)
            if hosts is None:
                continue
            if not 0 <= hosts.index < hosts.number:
                raise ValueError(f"host {hosts.index} of {hosts.number}")
            _ = hosts.meeting
            return hosts
        except UserError:
            raise
        except KeyError as missing:
            raise WorkerError(f"{name} is set but {missing.args[0]} is not; the engine sets both: set it too, or unset {name}") from None
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise WorkerError(f"{name} and what belongs to it make no sense ({error}); correct or unset them") from error
    return None


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `host:port`; an address of IPv6 is in brackets."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise WorkerError(f"{address!r} is not host:port; write it like hostA:2222")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _tf_config(env: Env) -> Hosts | None:
    said = json.loads(env["TF_CONFIG"])
    cluster, task = said.get("cluster", {}), said.get("task", {})
    for role in {*cluster, task.get("type", "worker")} - {"chief", "worker"}:
        raise WorkerError(f"TF_CONFIG has a task of type {role}: workers hold the weights and evaluate; list only chief and worker")
    addresses = [(role, index, each) for role in ("chief", "worker") for index, each in enumerate(cluster.get(role, []))]
    if len(addresses) < 2:
        return None
    places = [(role, index) for role, index, _ in addresses]
    return Hosts(len(addresses), places.index((task["type"], int(task["index"]))), addresses[0][2], "tf-config")


def _slurm(env: Env) -> Hosts | None:
    if not _one_task_a_node(env):
        return None
    return Hosts(int(env["SLURM_STEP_NUM_NODES"]), int(env["SLURM_NODEID"]), f"{_first_node(env)}:{_port(env)}", _step(env))


def _kubeflow(env: Env) -> Hosts | None:
    nodes = env["PET_NNODES"].removeprefix("1:") if env["PET_NNODES"] == "1:1" else env["PET_NNODES"]
    if ":" in nodes:
        raise WorkerError(f"PET_NNODES={nodes[:40]} is a range; set a number, or start torchrun -m -- carrywave train, which reads it")
    each = env.get("PET_NPROC_PER_NODE", "")
    workers = int(each) if each not in ("", "auto", "cpu", "gpu") else None
    if int(nodes) == 1:
        return Hosts(1, 0, "localhost:1", "kubeflow", workers)
    return Hosts(int(nodes), int(env["PET_NODE_RANK"]), f"{env['PET_MASTER_ADDR']}:{env['PET_MASTER_PORT']}", "kubeflow", workers)


def _skypilot(env: Env) -> Hosts | None:
    addresses = env["SKYPILOT_NODE_IPS"].split()
    workers = int(env.get("SKYPILOT_NUM_GPUS_PER_NODE") or 0) or None
    first = f"{addresses[0]}:{env.get(PORT) or USUAL_PORT}"
    return Hosts(len(addresses), int(env["SKYPILOT_NODE_RANK"]), first, env.get("SKYPILOT_TASK_ID") or "skypilot", workers)


# By a variable that only this engine sets.
ENGINES: dict[str, Callable[[Env], Hosts | None]] = {
    "TF_CONFIG": _tf_config,
    "SLURM_STEP_ID": _slurm,
    "PET_NNODES": _kubeflow,
    "SKYPILOT_NODE_IPS": _skypilot,
}


def take_place(*, trains: bool) -> None:
    """Give a task of srun that is a worker the variables of one, as if torchrun had started it.

    One task on each of several nodes is a host where it trains; otherwise every task is a worker.
    """
    env = os.environ
    if launched() or int(env.get("SLURM_STEP_NUM_TASKS") or 1) < 2 or "SLURM_STEP_ID" not in env or (trains and _one_task_a_node(env)):
        return
    several = env["SLURM_STEP_NUM_NODES"] != "1"
    tasks, nodes = int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_STEP_NUM_NODES"])
    given = env.get("SLURM_CPUS_PER_TASK") or int(env.get("SLURM_CPUS_ON_NODE") or cores()) // -(-tasks // nodes)
    variables = {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "MASTER_ADDR": _first_node(env) if several else "127.0.0.1",
        "MASTER_PORT": str(_port(env)),
        "OMP_NUM_THREADS": str(max(1, min(cores(), int(given)))),
    }
    if "OMP_NUM_THREADS" not in env:
        deal_threads()
    env.update({name: env.get(name) or value for name, value in variables.items()})


def forgotten_srun(env: Env) -> str | None:
    """What to say to a user whose job has several nodes of which this command uses one; None if there is nothing to say."""
    nodes = env.get("SLURM_JOB_NUM_NODES", "1")
    if "SLURM_STEP_ID" in env or not nodes.isdecimal() or int(nodes) < 2:
        return None
    return f"this Slurm job has {nodes} nodes, but this command runs once, on the first node; put srun in front of it to use them all"


def _one_task_a_node(env: Env) -> bool:
    nodes = env.get("SLURM_STEP_NUM_NODES", "1")
    return nodes != "1" and nodes == env.get("SLURM_STEP_NUM_TASKS")


def _step(env: Env) -> str:
    return f"slurm-{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"


def _port(env: Env) -> int:
    return FIRST_PORT + (int(env["SLURM_JOB_ID"]) + STEPS_APART * int(env["SLURM_STEP_ID"])) % PORTS


def _first_node(env: Env) -> str:
    """The address of the first node, as Slurm knows it: its name need not be one of the network."""
    name = _scontrol("show", "hostnames", env["SLURM_STEP_NODELIST"]).split()[0]
    address = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", name))
    return name if address is None else address[1]


def _scontrol(*words: str) -> str:
    try:
        return subprocess.run(["scontrol", *words], capture_output=True, text=True, check=True, timeout=SCONTROL_SECONDS).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise WorkerError(f"scontrol {' '.join(words)} failed ({error}); make Slurm's commands available on the nodes") from error
