"""`carrywave backtest`: forecasts from rolling origins within known data, with scores, a table of all forecasts and a page."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from carrywave.cli.exits import leaving_at_once
from carrywave.cli.options import Device, DeviceOption, JsonOption, note, spec_and_overrides, wide_console, write_rows
from carrywave.cli.workers import FewDevicesOption, start_workers
from carrywave.errors import UserError
from carrywave.launch.exit_reports import INTERRUPTED, STOPPED
from carrywave.parallel.startup.launcher_env import is_first
from carrywave.runs import output_file
from carrywave.runs.display import table_of, watcher_for
from carrywave.runs.watcher import Silent
from carrywave.spec.load import load

if TYPE_CHECKING:
    from carrywave.train.backtest import Backtest

CSV, PAGE = "backtest.csv", "backtest.html"
SHOWN_STEPS = 12  # rows of the table of steps ahead; further ones are in --json


def backtest(
    words: Annotated[
        list[str], typer.Argument(metavar="SPEC.yaml|RUN [key=value]", help="Spec to train and backtest, with overrides; or a trained run.")
    ],
    data: Annotated[str | None, typer.Option(metavar="FILE", help="Data to backtest on. Default: the training file.")] = None,
    horizon: Annotated[int | None, typer.Option(min=1, metavar="N", help="Steps ahead of each origin. Default: data.horizon.")] = None,
    stride: Annotated[int | None, typer.Option(min=1, metavar="N", help="Rows from one origin to the next. Default: the horizon.")] = None,
    origins: Annotated[int, typer.Option(min=1, metavar="N", help="Origins; the last is a horizon before the end.")] = 5,
    retrain: Annotated[bool, typer.Option("--retrain", help="Train anew for every origin, on all rows before it.")] = False,
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of what is trained. Default: runs/backtest-NUMBER.")] = None,
    device: DeviceOption = Device.auto,
    devices: FewDevicesOption = None,
    json_file: JsonOption = None,
) -> None:
    """Forecast from rolling origins within known data, and compare with what came."""
    trained, overrides = _trained(words)
    if trained is not None and overrides:
        raise UserError(f"{overrides[0]} changes a spec, but {trained} is a trained run; pass its SPEC.yaml instead")
    if trained is not None and not retrain and run is not None:
        raise UserError("a trained run is not trained again, so there is nothing for --run; add --retrain, or remove it")
    spec = None if trained is not None else load(*spec_and_overrides(words))
    output_file.check(json_file)
    start_workers(devices, device.value)
    with leaving_at_once():
        from carrywave.train import backtest as backtesting

    request = backtesting.Rolling(horizon, stride, origins)
    if trained is not None and not retrain:
        result = backtesting.backtest_run(Path(trained), data, request, device.value, note)
    else:
        spec = spec or backtesting.spec_of_run(Path(str(trained)))
        how: dict[str, Any] = {"retrain": retrain, "run": run, "device": device.value, "note": note}
        with watcher_for(Console()) if is_first() else nullcontext(Silent()) as watch:
            result = backtesting.backtest_spec(spec, data, request, watch=watch, **how)
    if result.ending is not None:
        raise typer.Exit(INTERRUPTED if result.ending == "interrupted" else STOPPED)
    if is_first():
        _report(result, json_file)


def _trained(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The trained run among the words, if one is named, and the overrides."""
    path, overrides = spec_and_overrides(list(words))
    named = next((word for word in words if "=" not in word), None)
    is_run = named is not None and path is not None and path.is_dir()
    return (named if is_run else None), overrides


def _report(result: Backtest, json_file: Path | None) -> None:
    from carrywave.prediction.row_writer import writing
    from carrywave.report.backtest_page import backtest_page
    from carrywave.train.backtest import rows_of

    table, shown = result.folder / CSV, result.folder / PAGE
    with writing(table) as writer:
        writer.add(rows_of(result))
    output_file.write(shown, backtest_page(result))
    write_rows(json_file, result.scores)
    console = wide_console()
    for title, by in (("all forecasts", ()), ("by column", ("column",)), ("by origin", ("origin",)), ("by step ahead", ("step",))):
        rows = [_shown(row, by) for row in result.scores if _is_by(row, by)]
        if rows:
            console.print(table_of(title, rows[:SHOWN_STEPS]))
            if len(rows) > SHOWN_STEPS:
                console.print(f"… and {len(rows) - SHOWN_STEPS} more; --json FILE writes all of them", markup=False, highlight=False)
    typer.echo(f"forecasts: {table}\npage: {shown}")


def _is_by(row: dict[str, object], by: Sequence[str]) -> bool:
    return all((row[name] is not None) == (name in by) for name in ("origin", "step", "column"))


def _shown(row: dict[str, object], by: Sequence[str]) -> dict[str, object]:
    """The group and its figures, without those that are only for programs."""
    figures = {name: value for name, value in row.items() if name not in ("origin", "step", "column") and not name.startswith("coverage")}
    return {name: row[name] for name in by} | figures
