"""The command `carrywave`: all commands, in the order of its help. Torch is imported inside them, so help and spec errors are immediate."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from carrywave import __version__
from carrywave.cli.backtest import backtest
from carrywave.cli.doctor import doctor
from carrywave.cli.evaluate import evaluate
from carrywave.cli.examples import epilog
from carrywave.cli.exits import with_exit_codes
from carrywave.cli.export import export
from carrywave.cli.launch import launch
from carrywave.cli.options import Command, Group, plain_warnings
from carrywave.cli.plan import plan
from carrywave.cli.predict import predict
from carrywave.cli.report import report
from carrywave.cli.train import train
from carrywave.cli.tune import tune
from carrywave.launch.exit_reports import told_apart
from carrywave.runs import output_file
from carrywave.spec.describe import schema as spec_schema

app = typer.Typer(
    name="carrywave",
    help="Train stacked LSTMs for language modelling, classification, tagging, forecasting and regression.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"carrywave {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)] = False,
) -> None:
    pass


def schema(
    file: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Output file. Default: stdout.")] = None,
) -> None:
    """Write the JSON schema of the spec, for editors."""
    text = json.dumps(spec_schema(), indent=2) + "\n"
    output_file.check(file, wanted=True)
    if file is None:
        typer.echo(text, nl=False)
    else:
        output_file.write(file, text)


for command in (train, tune, plan, doctor, launch, export, backtest, report, evaluate, predict, schema):
    app.command(cls=Command, epilog=epilog(command.__name__))(with_exit_codes(command))


def main() -> None:
    """Run the command named on the command line."""
    plain_warnings()
    # Of torch's connections, our own messages tell what matters.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        app(prog_name="carrywave")
    except SystemExit as end:
        raise SystemExit(told_apart(end.code if isinstance(end.code, int) else int(end.code is not None))) from None
