"""Starts one worker per device of this host, restarts them when one dies, and reports one exit code and one cause.

Workers of a single host rendezvous through a file and communicate over loopback: nothing listens where another machine could reach it. With
several hosts they rendezvous at the address the user gave, and `cluster.host_launcher` starts them in step with the other hosts.

A worker that dies (killed, crashed, stopped, lost) ends the attempt; the next attempt resumes from the last snapshot by itself. User errors
and orderly exits are final. So are repeated deaths: `restart_policy` counts them.

torch's elastic agent is not used: it terminates all workers as soon as one exits with anything but 0, so an orderly stop (75, 130) would
cut off the others' snapshot; its rendezvous unpickles data and listens on all interfaces; and it cannot continue with fewer workers on a
host.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from carrywave.errors import WorkerError, option
from carrywave.launch import launch_record
from carrywave.launch.engines.hosts import Hosts
from carrywave.launch.exit_reports import Ended
from carrywave.launch.hardware import visible
from carrywave.launch.restart_policy import Place, RestartPolicy
from carrywave.launch.shares.mps import Shares
from carrywave.launch.supervisor import AttemptOutcome, Signals, WorkerGroup, asked_to_stop, supervise, with_logs
from carrywave.launch.work_folder import work_folder
from carrywave.parallel.startup.environment import SHARE_GPU
from carrywave.parallel.startup.launcher_env import FitCall, WorkerFile, worker_file

if TYPE_CHECKING:
    from carrywave.launch.cluster.host_launcher import HostLauncher


def is_worker() -> bool:
    """True if `start` started this process."""
    return bool(worker_file().launch)


def start(
    command: Sequence[str],
    devices: int,
    *,
    hosts: Hosts | None = None,
    environment: Mapping[str, str] | None = None,
    fit: FitCall | None = None,
    restarts: int = 0,
    min_devices: int | None = None,
    shares: int = 1,
    direct_output: bool = False,
    resumes: Path | None = None,
    say: Callable[[str], None] | None = None,
    attend: Callable[[WorkerGroup, Path, Signals], AttemptOutcome] = supervise,
) -> Ended:
    """Run `command` in `devices` workers on this host and wait for them to end. They learn their rank from the environment.

    If one dies, all are restarted, up to `restarts` times without progress; with `min_devices` below `devices`, also with fewer workers.
    With several hosts, those of all hosts are, and `min_devices` counts the workers of all of them. With `shares` above 1 each GPU is
    divided among so many workers. With `direct_output`, rank 0 writes to our standard output itself. `fit` is the call of a script
    that they are for. `resumes` is the run that the
    workers go on with, if that is known before they say so. `attend` runs one attempt, if not on this host then elsewhere.
    """
    say = say or _say
    if shares > 1:
        say(_of_shares(devices, shares))
    name = uuid.uuid4().hex
    elsewhere: HostLauncher | None = None
    if hosts is not None:
        from carrywave.launch.cluster.host_launcher import HostJob, HostLauncher
        from carrywave.parallel.startup.rendezvous import start_seconds

        # Meets the other hosts.
        job = HostJob(command, devices, hosts, environment or {}, restarts, min_devices, start_seconds(), name, resumes)
        elsewhere = HostLauncher(job, say)
    parts = Shares(shares) if shares > 1 else nullcontext(None)
    with work_folder() as place, Signals() as signals, parts as divided:
        of_shares = {} if divided is None else divided.environment
        settle: Callable[[], None] = (lambda: None) if divided is None else divided.settle
        if elsewhere is not None:
            return elsewhere.run_until_the_end(place, signals, of_shares, settle)
        shared = {**of_shares, **(environment or {})}
        policy = RestartPolicy((Place(0, device) for device in range(devices)), restarts, min_devices)
        number = 0
        run: Path | None = None
        while True:
            folder = place / f"attempt-{number}"
            file = WorkerFile(launch=name, attempt=number, fewer=policy.fewer, one_host=True, store=folder / "store", fit=fit)
            crew = _crew(command, [each.device for each in policy.places], file, shared, direct_output)
            outcome = attend(crew, folder, signals)
            # A worker that dies early has not reported its run; the previous attempt did.
            outcome = replace(outcome, run=outcome.run or run)
            run = outcome.run
            ended = with_logs(outcome, signals)
            if signals.asked is not None:
                ended = asked_to_stop(ended, run or resumes)
            if ended.died and signals.asked is None and signals.noted:
                # The signal arrived when no worker was left to receive it.
                signals.asked = signals.noted.pop()
                return asked_to_stop(Ended(128 + signals.asked), run or resumes)
            finished = signals.asked is not None or not ended.died
            again = None if finished else policy.after(outcome.ended, outcome.steps, launch_record.last_step(run or resumes))
            if again is None:
                return replace(ended, message=ended.message + policy.given_up) if ended.died else ended
            say(again)
            settle()
            number += 1


def _of_shares(devices: int, shares: int) -> str:
    """What to say of workers that share GPUs; raises if there are too many of them."""
    gpus = len(visible())
    most = shares * gpus
    if gpus and devices > most:
        raise WorkerError(
            f"{devices} workers have only {most} shares of {gpus} GPU{'s' * (gpus > 1)}; use {option('devices', most)}, or set "
            f"{SHARE_GPU}={-(-devices // gpus)}"
        )
    workers = f"{devices} worker{'s' * (devices > 1)}"
    return f"{workers} on 1/{shares} of a GPU each, to try it out: one worker on the whole GPU is faster"


def _say(line: str) -> None:
    # A live display that was killed leaves the cursor hidden.
    with suppress(OSError):  # nobody reads it any more: the workers continue
        shown = "\x1b[?25h" if sys.stderr.isatty() else ""
        print(f"{shown}carrywave: {line}", file=sys.stderr, flush=True)


def _crew(command: Sequence[str], devices: Sequence[int], file: WorkerFile, shared: Mapping[str, str], direct: bool) -> WorkerGroup:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    interfaces = {name: loopback for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ}
    return WorkerGroup.of(command, devices, file, {**shared, **interfaces}, first=0, size=len(devices), direct=direct)
