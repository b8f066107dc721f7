"""`carrywave tune`: searches over keys of a spec, with a run for each trial, and writes the best spec."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carrywave.cli.exits import leaving_at_once
from carrywave.cli.options import Device, DeviceOption, JsonOption, show, spec_and_overrides, write_rows
from carrywave.launch.exit_reports import INTERRUPTED, STOPPED
from carrywave.runs import output_file
from carrywave.runs.display import table_of
from carrywave.runs.watcher import printable


def tune(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SPEC.yaml KEY=VALUES", help="Spec, and keys to search over: key=a,b,c or key=low..high; key=a is set for all."
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, metavar="N", help="Trials in total.")] = 20,
    hours: Annotated[float, typer.Option(min=0, help="Stop after this time, to be continued with --resume; 0: no limit.")] = 0.0,
    at_once: Annotated[
        int | None, typer.Option("--at-once", min=1, metavar="N", help="Trials side by side. Default: one for each GPU.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed of the search. Default: 1.")] = None,
    prune: Annotated[bool, typer.Option("--prune/--no-prune", help="Stop trials that do worse than half of the finished ones.")] = True,
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the search. Default: runs/tune-NUMBER.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the search in --run where it stopped.")] = False,
    device: DeviceOption = Device.auto,
    devices: Annotated[int | None, typer.Option(min=1, metavar="N", help="Devices of each trial. Default: 1.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Search over keys of a spec; each trial is a run, judged by train.best on the validation data."""
    path, keys = spec_and_overrides(words or [])
    output_file.check(json_file)
    with leaving_at_once():
        from carrywave.spec.load import read_values, set_overrides
        from carrywave.tuning.search_space import space_of
        from carrywave.tuning.tune import BEST, SearchOptions, run_search

    space, fixed = space_of(keys)
    base = None if resume and not words else set_overrides({} if path is None else read_values(path), fixed)
    options = SearchOptions(trials, 3600 * hours or None, at_once, device.value, devices, prune, lambda line: typer.echo(printable(line)))
    result = run_search(base, space, options, seed=seed, run=run, resume=resume)
    shown = [{name: _text(value) for name, value in row.items() if name != "why"} for row in result.rows]
    show(table_of("trials", shown))
    write_rows(json_file, result.rows)
    if result.best is not None:
        typer.echo(f"best: {result.best.train.best} {result.value:.4g}; train it with: carrywave train {result.run / BEST}")
    if result.ending is not None:
        what = "the time is over" if result.ending == "time" else result.ending
        typer.echo(f"{what}; go on with: carrywave tune --resume --run {result.run} --trials {trials}")
    if result.ending in ("interrupted", "terminated"):
        raise typer.Exit(INTERRUPTED if result.ending == "interrupted" else STOPPED)


def _text(value: object) -> object:
    """A value for the table: a learning rate needs more digits than a metric."""
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, int) else str(value)
