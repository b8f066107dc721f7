"""`carrywave report`: writes one HTML page about one or several runs, or serves it while they go on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from carrywave.cli.options import Device, note
from carrywave.errors import UserError
from carrywave.report.sample_kinds import Samples
from carrywave.runs import output_file

PAGE = "report.html"
MOST_BYTES = 1_000_000


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Run folders.")],
    file: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Output file. Default: report.html in the run folder; of several runs, here."),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Serve the page on this machine, and update it while the runs go on.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="With --live: the port. Default: any that is free.")] = 0,
    samples: Annotated[
        bool, typer.Option("--samples/--no-samples", help="Predict a little with the best weights, from the run's own data.")
    ] = True,
    device: Annotated[Device, typer.Option(help="Where to compute samples; auto uses CUDA if available.")] = Device.auto,
) -> None:
    """Show runs to people: one HTML page with curves, plan, step, restarts and samples; several runs side by side."""
    from carrywave.report.record import read_run

    if live and file is not None:
        raise UserError("--live serves the page and writes no file; use --live or -o")
    if port and not live:
        raise UserError("--port is for --live; add --live, or remove it")
    folders = [(Path(run), run) for run in runs]
    target = file or (folders[0][0] if len(runs) == 1 else Path()) / PAGE
    records = [read_run(folder, name) for folder, name in folders]
    if not live:
        output_file.check(target)
    sampler = partial(_samples, device=device.value) if samples else None
    if live:
        from carrywave.report.live import ADDRESS, LiveReport, server_of

        with server_of(LiveReport(folders, sampler), port) as server:
            note(f"serving http://{ADDRESS}:{server.server_port}/ until interrupted (Ctrl+C)")
            server.serve_forever()
    from carrywave.report.page import render

    text = render(records, [None if sampler is None else sampler(folder) for folder, _ in folders])
    if len(text.encode(errors="backslashreplace")) > MOST_BYTES:
        raise UserError(f"the page would be larger than {MOST_BYTES / 1e6:g} MB; report fewer runs at a time")
    output_file.write(target, text)
    note(f"wrote {target}")


def _samples(folder: Path, device: str) -> Samples:
    """The samples of a run; torch is loaded here, when a live page has long been there."""
    from carrywave.report.samples import samples_of

    return samples_of(folder, device)
