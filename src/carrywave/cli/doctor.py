"""`carrywave doctor`: examines this machine or, under a launcher, all of them, and shows what was found.

Without a launcher it starts a worker for each GPU, or two on the CPU, as training would, so that what lies between them is examined too.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from carrywave.cli.exits import end_as, leaving_at_once
from carrywave.cli.options import Device, DeviceOption, note
from carrywave.errors import PlanError, UserError, WorkerError
from carrywave.launch.hardware import cores, gpus
from carrywave.launch.hosts import host_and_port, hosts_of, take_place
from carrywave.launch.launcher import start
from carrywave.launch.script_workers import script_command
from carrywave.parallel.startup.launcher_env import is_first, launched
from carrywave.runs import output_file
from carrywave.runs.watcher import printable

VERDICT = "CARRYWAVE_DOCTOR_VERDICT"  # the folder where workers that this command started leave their exit codes
ON_A_CPU = 2  # workers started there: enough for a link


def doctor(
    device: DeviceOption = Device.auto,
    devices: Annotated[int | None, typer.Option(metavar="N", help="Workers to start. Default: one for each GPU, or 2 on the CPU.")] = None,
    run: Annotated[str, typer.Option(metavar="DIR", help="Folder of runs, whose disk is examined.")] = "runs",
    meet: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Without a launcher: the address of rank 0, to be tried.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the report to FILE as JSON; -: print it.")
    ] = None,
) -> None:
    """Examine this machine or, under a launcher, the whole cluster: say what is wrong and what to do. Exit code 0 if all is well."""
    output_file.check(Path(json_file) if json_file not in (None, "-") else None)
    meeting = None if meet is None else _host_and_port(meet)
    if devices is not None and devices < 1:
        raise PlanError(f"--devices is {devices}; use a number >= 1")
    take_place(trains=True)
    if not launched():
        _start(device.value, devices)
    elif devices is not None and VERDICT not in os.environ and str(devices) != os.environ.get("WORLD_SIZE"):
        raise PlanError(f"--devices is {devices}, but the launcher started {os.environ.get('WORLD_SIZE')} workers; remove --devices")
    with leaving_at_once():
        from carrywave.doctor.examination import Request, examine
        from carrywave.doctor.report import Report

    def deliver(report: Report) -> None:
        _show(report, json_file)

    _leave(examine(Request(device.value, run, meeting), deliver, note))


def _start(device: str, devices: int | None) -> None:
    """Start workers and exit with their verdict; return if this process is to do the work alone."""
    where = hosts_of(os.environ)
    several = where is not None and where.number > 1
    count = devices or (None if where is None else where.workers) or (0 if device == "cpu" else len(gpus())) or min(ON_A_CPU, cores())
    if count == 1 and not several:
        return
    with tempfile.TemporaryDirectory(prefix="carrywave-doctor-") as folder:
        if where is not None and several:
            from carrywave.launch.elastic import start_on_hosts

            ended = start_on_hosts(script_command(), count, where, 0, note, {VERDICT: folder})
        else:
            ended = start(script_command(), count, environment={VERDICT: folder}, say=note)
        codes = [int(path.read_text("ascii")) for path in Path(folder).iterdir()]
    end_as(ended)
    raise typer.Exit(max(codes, default=1))


def _leave(code: int) -> None:
    """Exit with the verdict; a worker that this command started leaves it in a file, since any other exit code would count as a fault."""
    folder = os.environ.get(VERDICT)
    if folder is None:
        raise typer.Exit(code)
    (Path(folder) / os.environ.get("RANK", "0")).write_text(str(code), "ascii")


def _host_and_port(text: str) -> tuple[str, int]:
    try:
        return host_and_port(text)
    except WorkerError as error:
        raise UserError(f"--meet {text} is not an address; write it as in hostA:29500") from error


def _show(report: Any, json_file: str | None) -> None:
    """Print the report, or write it."""
    if json_file is not None:
        text = json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n"
        if json_file == "-":
            typer.echo(text, nl=False)
            return
        if is_first():  # hosts that could not meet rank 0 print theirs; the file is of rank 0
            output_file.write(Path(json_file), text)
    typer.echo("\n".join(printable(line) for line in report.lines))
