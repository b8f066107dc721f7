"""The course of an examination: each worker looks at itself, they meet, rank 0 compares, they measure together, rank 0 reports.

A worker says at once what is wrong with its own host's name, since nobody may ever come; `join` says who does not, and which host cannot be
reached; whoever is lost later is named by the watch over peers. What takes too long all the same ends with what is known by then.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from carrywave.doctor import host, together
from carrywave.doctor.report import Finding, Report, of_error
from carrywave.errors import ContactLost, UserError
from carrywave.parallel.startup.addresses import choose_interface
from carrywave.parallel.startup.launcher_env import launched, worker_file
from carrywave.parallel.startup.process_identity import identity
from carrywave.parallel.startup.rendezvous import number, start_seconds
from carrywave.parallel.world import World, all_gather_json, from_rank_0, join, leave

SETTINGS = ("CARRYWAVE_TRANSPORT", "CARRYWAVE_KERNEL", "CARRYWAVE_CAPTURE", "CARRYWAVE_TIMEOUT_SECONDS", "OMP_NUM_THREADS")
LONGEST_SECONDS = 120.0  # besides the wait for others


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    device: str = "auto"
    run: str = "runs"
    meet: tuple[str, int] | None = None  # a meeting point to try, without a launcher


def examine(request: Request, deliver: Callable[[Report], None], say: Callable[[str], None]) -> int:
    """Examine this machine, or all machines of a launch; returns the exit code. Only workers that report call `deliver`, once."""
    rank, size, local_rank = (number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")) if launched() else (0, 1, 0)
    local_size = number("LOCAL_WORLD_SIZE") if launched() and "LOCAL_WORLD_SIZE" in os.environ else size
    findings: list[Finding] = []

    def give_up() -> None:
        remedy = "see whether a disk, a device or the network does not answer (NCCL_DEBUG=INFO, GLOO_SOCKET_IFNAME)"
        if rank == 0:
            fact = f"the examination did not end within {LONGEST_SECONDS:g} s after the workers had met"
            deliver(Report((*findings, Finding("wrong", "hang", fact, remedy))))
        sys.stdout.flush()
        os._exit(1)

    meeting = os.environ.get("MASTER_ADDR", "")
    if launched() and meeting[:1].isdigit():  # an address, as engines give it, says which interface others reach, whatever names lead to
        choose_interface(meeting)
    name = host.check_name(several_hosts=local_size < size if launched() else None)
    if name.level == "wrong":
        say(name.text)
    timer = threading.Timer(LONGEST_SECONDS + (start_seconds() if size > 1 else 0.0), give_up)
    timer.daemon = True
    timer.start()
    device, unusable = host.choose_device(request.device, worker_file().device(local_rank) if size > 1 else None)
    where = f"rank {rank} on {socket.gethostname()}"
    on_gpu = device.type == "cuda"
    if local_rank == 0:
        findings += [name, *host.of_host(workers=local_size, world=size, run=request.run)]
    findings += [] if request.meet is None else [host.check_meeting(*request.meet)]
    findings += [] if unusable is None else [unusable]
    findings += host.of_gpu(device, where) if on_gpu else []
    try:
        world = join(request.device) if size > 1 else World.alone(device)
        code = _together(world, findings, deliver)
        leave(world)
    except (UserError, ContactLost, RuntimeError) as error:
        told = error if isinstance(error, (UserError, ContactLost)) else RuntimeError(f"{where}: {error}")
        report = Report((*findings, of_error("workers", told)))
        if getattr(error, "reported_by", None) in (None, rank):
            deliver(report) if local_rank == 0 else say(report.findings[-1].text)
        code = 1
    timer.cancel()
    return code


def _together(world: World, findings: list[Finding], deliver: Callable[[Report], None]) -> int:
    """Compare and measure with the others; rank 0 adds to its findings, and reports."""
    process = identity(os.getpid())
    settings = {name: os.environ[name] for name in SETTINGS if os.environ.get(name)}
    own: dict[str, Any] = {"rank": world.rank, "host": socket.gethostname(), "device": str(world.device), "versions": host.versions()}
    own |= {"settings": settings, "home": f"{process['boot']} {process['net']} {process['host']}"}
    workers = all_gather_json(world, own)
    found = all_gather_json(world, [vars(finding) for finding in findings])
    homes = [worker["home"] for worker in workers]
    names = [f"rank {worker['rank']} on {worker['host']}" for worker in workers]
    findings[:] = [*together.check_alike(workers), *(Finding(**each) for several in found for each in several)]
    if len({torch.device(worker["device"]).type for worker in workers}) > 1:
        fact = "some workers have a GPU and some have none: everyone would wait for those, over gloo"
        findings.append(Finding("wrong", "devices", fact, "start workers only where there is a GPU, or pass --device cpu to all"))
    speeds = all_gather_json(world, together.step_ms(world))
    findings += together.check_speeds(speeds, names)
    measured: dict[str, Any] = {"speeds": [{"rank": rank, "step_ms": each} for rank, each in enumerate(speeds)]}
    if world.size > 1:
        links = [link for several in all_gather_json(world, together.links(world, homes)) for link in several]
        findings += together.check_links(links, names)
        measured["links"] = links
    report = Report(tuple(findings), [{key: value for key, value in worker.items() if key != "home"} for worker in workers], measured)
    if world.rank == 0:
        deliver(report)
    return from_rank_0(world, lambda: report.code)
