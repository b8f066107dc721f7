"""`carrywave export`: writes a trained model for other runtimes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from carrywave.cli.exits import leaving_at_once
from carrywave.cli.options import RunArgument, note
from carrywave.errors import PlanError
from carrywave.parallel.startup.launcher_env import launched


class ExportFormat(StrEnum):
    """The formats that can be written."""

    safetensors = "safetensors"
    onnx = "onnx"
    torch = "torch"
    c = "c"


def export(
    run: RunArgument,
    to: Annotated[
        ExportFormat,
        typer.Option("--to", help="safetensors for torch.nn.LSTM, onnx for onnxruntime, torch for torch.export, c for a C file."),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="New folder to write. Default: exports/NAME-FORMAT.")
    ] = None,
    stateful: Annotated[bool, typer.Option("--stateful", help="onnx, torch: the carry goes in and comes out.")] = False,
    step: Annotated[
        bool, typer.Option("--step", help="onnx, torch: one step with its state as inputs and outputs, without recurrent operators.")
    ] = False,
) -> None:
    """Write the best weights of a run as safetensors, ONNX, a torch.export program or a C file. What is written was run and compared."""
    if launched():
        raise PlanError("export works in one process, but a launcher started this one; run it by itself")
    with leaving_at_once():
        from carrywave.exporting.run_export import export_run

    exported = export_run(Path(run), to.value, output, stateful=stateful, step=step, note=note)
    typer.echo(f"wrote {exported.folder}: {', '.join(exported.files)}")
    if exported.difference is not None:
        typer.echo(f"largest difference from the model: {exported.difference:.1e}")
