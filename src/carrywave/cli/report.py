"""`carrywave report`: writes one HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carrywave.cli.options import Device, DeviceOption, note
from carrywave.runs import output_file


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    file: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Output file. Default: report.html in the run folder.")
    ] = None,
    samples: Annotated[
        bool, typer.Option("--samples/--no-samples", help="Predict a little with the best weights, from the run's own data.")
    ] = True,
    device: DeviceOption = Device.auto,
) -> None:
    """Show a run to people: one HTML page with its result beside the baselines, curves, samples, times and plan."""
    from carrywave.report.blocks import Block
    from carrywave.report.page import render
    from carrywave.report.record import read_run

    record, target = read_run(run), file or run / "report.html"
    output_file.check(target)
    shown: list[Block] = ["Samples were left out of this report."]
    if samples:
        from carrywave.report.samples import samples_of

        shown = samples_of(run, device.value)
    output_file.write(target, render(record, shown))
    note(f"wrote {target}")
