"""`carrywave evaluate`: the metrics of a trained run on its own or other data, as a whole and by column, series, step or label."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from carrywave.cli.exits import leaving_at_once
from carrywave.cli.options import Device, DeviceOption, JsonOption, file_of, note, runs_and_data, show, write_rows
from carrywave.cli.workers import FewDevicesOption, start_workers
from carrywave.errors import UserError
from carrywave.parallel.startup.launcher_env import is_first
from carrywave.runs import output_file
from carrywave.runs.display import confusion_table, row_line, table_of
from carrywave.runs.watcher import printable


def evaluate(
    words: Annotated[
        list[str],
        typer.Argument(metavar="RUN… [FILE]", help="Run folder, or several, evaluated as one by the average of what they predict."),
    ],
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Data to evaluate on. Default: the run's own test or validation data.")
    ] = None,
    device: DeviceOption = Device.auto,
    devices: FewDevicesOption = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="Metrics by column, series or step (forecasting, in the units of the file), by label, or of spans by type; repeatable.",
        ),
    ] = None,
    top: Annotated[
        list[int] | None,
        typer.Option("--top", min=1, metavar="K", help="Labels: also how often the target is among the K most likely; repeatable."),
    ] = None,
    confusion: Annotated[bool, typer.Option("--confusion", help="Labels: also the confusion matrix.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Evaluate the best weights of a run, or of several together."""
    runs, last_word = runs_and_data(words, only_files=True)
    if last_word is not None and data is not None:
        raise UserError(f"{last_word} and --data {data} both name the data; pass one of them")
    data = data or last_word
    output_file.check(json_file)
    start_workers(devices, device.value)
    with leaving_at_once():
        from carrywave.prediction.evaluate import evaluate_run
        from carrywave.tasks.baselines import beside, verdicts

    source = None if data is None else file_of(data)
    row = evaluate_run([Path(run) for run in runs], source, device.value, top=top or (), confusion=confusion, note=note, by=by or ())
    by_name: dict[str, Any] = {name: row.pop(f"by_{name}") for name in dict.fromkeys(by or ()) if f"by_{name}" in row}
    if is_first():
        shown = {name: value for name, value in row.items() if name != "confusion"}
        typer.echo(printable(row_line(shown)))
        for name, rows in by_name.items():
            show(table_of(f"by {name}", rows))
        if confusion:
            show(confusion_table(row["confusion"]))
        for line in (beside(row), *verdicts(row)):
            if line is not None:
                typer.echo(line)
    write_rows(json_file, [row, *({"split": row["split"], "by": name, **each} for name, rows in by_name.items() for each in rows)])
