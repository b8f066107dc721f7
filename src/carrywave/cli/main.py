"""Defines the commands. Torch is imported inside them, so help, schema and spec errors appear immediately."""

from __future__ import annotations

import importlib
import inspect
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from carrywave import __version__
from carrywave.cli import backtest as backtesting
from carrywave.cli import doctor as examining
from carrywave.cli import export as exporting
from carrywave.cli import launch as launching
from carrywave.cli import plan as planning
from carrywave.cli import report as reporting
from carrywave.cli.exits import ending_at_a_signal, ending_in_order, leaving_at_once, with_exit_codes
from carrywave.cli.options import (
    Command,
    Device,
    DeviceOption,
    Group,
    InputFormat,
    JsonOption,
    note,
    plain,
    plain_warnings,
    spec_and_overrides,
)
from carrywave.cli.workers import (
    DevicesOption,
    Elastic,
    FewDevicesOption,
    HostIndexOption,
    HostsOption,
    MinDevicesOption,
    OnOption,
    RestartsOption,
    agreed,
    around,
    devices_that_pay,
    keeps_the_run,
    start_on_ray,
    start_workers,
)
from carrywave.data.files import cache
from carrywave.data.files.remote import Store, fetch, is_address
from carrywave.errors import RunError, UserError
from carrywave.launch import launch_record
from carrywave.launch.exit_reports import INTERRUPTED, STOPPED
from carrywave.launch.surroundings import Surroundings
from carrywave.parallel.startup.launcher_env import is_first
from carrywave.runs import output_file
from carrywave.runs.display import PlainWatcher, Recorder, confusion_table, row_line, table_of, watcher_for
from carrywave.runs.watcher import Silent, printable
from carrywave.spec.describe import schema as spec_schema
from carrywave.spec.load import dump, load, parse, parse_yaml, read_values, with_overrides
from carrywave.spec.precision import AUTO, suited, with_precision
from carrywave.spec.spec import Spec

app = typer.Typer(
    name="carrywave",
    help="Train stacked LSTMs for language modelling, classification, tagging, forecasting and regression.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
)


ENDINGS = {"interrupted": INTERRUPTED, "terminated": STOPPED}  # exit codes of a run that stopped early with a snapshot written


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"carrywave {__version__}")
        raise typer.Exit


RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its address in an object store.")]


@app.callback()
def _common(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)] = False,
) -> None:
    pass


@app.command(cls=Command)
@with_exit_codes
def train(
    spec: Annotated[list[str] | None, typer.Argument(metavar="SPEC.yaml|key=value", help="Spec file and overrides, all optional.")] = None,
    run: Annotated[
        str | None, typer.Option(metavar="DIR", help="Run folder, or its address in an object store. Default: runs/NAME.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --run where it stopped.")] = False,
    or_start: Annotated[
        bool,
        typer.Option("--continue", help="Like --resume if there is a run in --run, else start it: for clusters that repeat a command."),
    ] = False,
    init: Annotated[str | None, typer.Option(metavar="RUN|FILE", help="Start from these weights.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved spec, the summary and the plan, then exit.")] = False,
    device: DeviceOption = Device.auto,
    devices: DevicesOption = None,
    on: OnOption = None,
    restarts: RestartsOption = None,
    min_devices: MinDevicesOption = None,
    hosts: HostsOption = None,
    host_index: HostIndexOption = None,
    json_file: JsonOption = None,
) -> None:
    """Train a model; without a SPEC, a small character model on text that ships with Python."""
    path, overrides = spec_and_overrides(spec or [])
    where = around(hosts, host_index)
    with agreed(device.value) as of_rank_0:
        resume = resume or (or_start and bool(of_rank_0(lambda: {"there": _is_there(run)})["there"]))
        if resume and init is not None and not or_start:
            raise RunError("--resume continues with the run's own weights and --init starts from others; use only one of them")
        resolved = with_overrides(of_rank_0(lambda: _spec_of(run, where)), overrides) if resume and path is None else load(path, overrides)
        output_file.check(json_file)
    if on is not None and not dry_run:
        start_on_ray(devices, device.value, resolved.plan_spec, Elastic(restarts, min_devices))
    if devices is None and min_devices is None:
        before = Path(run) if resume and run is not None and not is_address(run) else None
        devices = devices_that_pay(resolved, device.value, before, where)
    elastic = Elastic(restarts, min_devices)
    workers = start_workers(devices, device.value, resolved.plan_spec, where=where, elastic=elastic, dry_run=dry_run)
    if dry_run and is_first():
        typer.echo(dump(_with_precision(resolved, run if resume else None, device.value, where)), nl=False)
    with ending_in_order():
        _train(resolved, run, resume, init, device.value, workers, json_file, dry_run=dry_run)


def _with_precision(spec: Spec, before: str | None, device: str, where: Surroundings) -> Spec:
    """The spec with the precision that `auto` is on this device or, where a run goes on, was in that run (`before`)."""
    if spec.train.precision != AUTO:
        return spec
    if before is not None:
        return with_precision(spec, parse(_spec_of(before, where)).train.precision)
    with leaving_at_once():
        from carrywave.parallel.world import pick_device
        from carrywave.step.precision import made_for_bf16
    return with_precision(spec, suited(made_for_bf16=made_for_bf16(pick_device(device))))


def _train(
    resolved: Spec,
    run: str | None,
    resume: bool,
    init: str | None,
    device: str,
    workers: int | None,
    json_file: Path | None,
    *,
    dry_run: bool,
) -> None:
    with leaving_at_once():
        from carrywave.train.fit import train as train_run

    # A dry run prints a spec; everything else becomes YAML comments, so that the output as a whole is a valid spec file.
    shown = PlainWatcher(Console(), before="# ") if dry_run else watcher_for(Console())
    with shown if is_first() else nullcontext(Silent()) as display:
        watch = Recorder(display)
        how = {} if workers is None else {"devices": workers}
        result = train_run(
            resolved, run=None if run is None else _place(run), resume=resume, init=init, device=device, watch=watch, dry_run=dry_run, **how
        )
    # After a restart, evaluations from earlier attempts of this launch are only in the run's metrics file.
    _write_rows(json_file, watch.rows if not launch_record.attempt() else _evaluations(result.run))
    if result.ending in ENDINGS:
        raise typer.Exit(ENDINGS[result.ending])


app.command(cls=Command)(with_exit_codes(planning.plan))
app.command(cls=Command)(with_exit_codes(examining.doctor))
app.command(cls=Command)(with_exit_codes(launching.launch))
app.command(cls=Command)(with_exit_codes(exporting.export))
app.command(cls=Command)(with_exit_codes(backtesting.backtest))
app.command(cls=Command)(with_exit_codes(reporting.report))


@app.command(cls=Command)
@with_exit_codes
def evaluate(
    run: RunArgument,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Data to evaluate on. Default: the run's own test or validation data.")
    ] = None,
    device: DeviceOption = Device.auto,
    devices: FewDevicesOption = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="Metrics by column, series or step (forecasting, in the units of the file), or by label; repeatable.",
        ),
    ] = None,
    top_k: Annotated[
        str | None, typer.Option("--top-k", metavar="K,K", help="Labels: also how often the target is among the K most likely.")
    ] = None,
    confusion: Annotated[bool, typer.Option("--confusion", help="Labels: also the confusion matrix.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Evaluate the best weights of a run."""
    output_file.check(json_file)
    tops = _numbers("--top-k", top_k) if top_k else []
    start_workers(devices, device.value)
    with leaving_at_once():
        from carrywave.runs.rows.standard_input import data_on_all
        from carrywave.runs.trained_run import evaluate_run
        from carrywave.tasks.doubts import worse_than_naive

    with data_on_all(data, _place(run), device.value) as found:
        given = found if data == "-" else None if data is None else _file(data)
        row = evaluate_run(_place(run), given, device.value, top_k=tops, confusion=confusion, note=note, by=by or ())
    told: dict[str, Any] = {name: row.pop(f"by_{name}") for name in dict.fromkeys(by or ()) if f"by_{name}" in row}
    if is_first():
        shown = {name: value for name, value in row.items() if name != "confusion"}
        typer.echo(printable(row_line(shown)))
        for name, rows in told.items():
            _print(table_of(f"by {name}", rows))
        if confusion:
            _print(confusion_table(row["confusion"]))
        if (verdict := worse_than_naive(row)) is not None:
            typer.echo(verdict)
    _write_rows(json_file, [row, *({"split": row["split"], "by": name, **each} for name, rows in told.items() for each in rows)])


@app.command(cls=Command)
@with_exit_codes
def predict(
    run: RunArgument,
    input_file: Annotated[
        str | None, typer.Argument(metavar="INPUT", help="Data to predict for, in the format of the training data; - is standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Output file, .jsonl or .csv. Default: stdout, as JSON Lines.")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="COLUMN[=NAME]", help="Carry a column of INPUT, such as an id, through to predictions; repeatable."),
    ] = None,
    input_format: Annotated[
        InputFormat, typer.Option("--format", help="Format of INPUT; auto goes by its name or first bytes, or by the training data.")
    ] = InputFormat.auto,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write CSV whatever the name of the output file, also to stdout.")] = False,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Language models: text to continue.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Language models: number of tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(help="Language models: 0 picks the most likely token, 1 samples from the model.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, metavar="K", help="Language models: sample from the K most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Language models: sample from the fewest tokens that have probability P together.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Language models: random seed of the sampling.")] = 1,
    device: DeviceOption = Device.auto,
    devices: FewDevicesOption = None,
) -> None:
    """Predict with the best weights of a run; a language model continues a prompt."""
    if not 0 <= temperature < math.inf:
        raise UserError(f"--temperature is {temperature}; use a number >= 0")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"--top-p is {top_p}; use a probability above 0 and at most 1")
    file = None if file == Path("-") else file
    output_file.check(file, wanted=True)
    with ending_at_a_signal():
        start_workers(devices, device.value, direct_output=True)
        with leaving_at_once():
            from carrywave.runs.prediction import predict_run

        given = input_file if input_file is None or input_file == "-" else _file(input_file)
        predict_run(
            _place(run),
            given,
            file,
            prompt=prompt,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            keep=tuple(keep or ()),
            format=input_format.value,
            as_csv=as_csv,
            device=device.value,
        )


@app.command(cls=Command)
@with_exit_codes
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Benchmark to run; an unknown name lists them all.")],
    json_file: JsonOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use small sizes, which show that it works but not how fast it is.")] = False,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORDS", help='kernels, step, gpu-pipeline: run only rows with all of these words, as in "8x512 bf16"; repeatable.'
        ),
    ] = None,
    chunks: Annotated[str | None, typer.Option(metavar="N,N", help="gpu-pipeline: numbers of chunks to try. Default: 2,4,8,16,32.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="gpu-pipeline: rounds in which variants take turns. Default: 5.")
    ] = None,
    predict: Annotated[bool, typer.Option("--predict", help="gpu-pipeline: profile the shares, and show predictions too.")] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="gpu-pipeline: draw a step of the fastest wavefront, as measured, in this SVG file.")
    ] = None,
    whole_step: Annotated[bool, typer.Option("--whole-step", help="gpu-pipeline: time the optimizer's update too.")] = False,
    shares: Annotated[bool, typer.Option("--shares", help="plan, sync: on shares of one GPU instead of CPU workers.")] = False,
    workers: Annotated[
        str | None, typer.Option(metavar="N,N", help="pipeline, replicas: numbers of workers. Default: 2,4,8, at most one for two cores.")
    ] = None,
    speed_only: Annotated[bool, typer.Option("--speed-only", help="pipeline: leave out the memory of each variant.")] = False,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="sync: text to train on. Default: text that ships with Python.")] = None,
    valid: Annotated[Path | None, typer.Option(metavar="FILE", help="sync: text to evaluate on. Default: a part of --text.")] = None,
    link: Annotated[
        int | None,
        typer.Option(min=1, metavar="MBIT", help="sync: also over links of so many Mbit/s, between network namespaces (root)."),
    ] = None,
    curve: Annotated[bool, typer.Option("--curve", help="sync: the loss against train.sync_every, from 1 to 500.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="sync: a key of the spec, as in model.hidden=256; repeatable.")
    ] = None,
) -> None:
    """Run a benchmark: carrywave and its peer side by side."""
    names = _benchmarks()
    if name not in names:
        raise UserError(f"unknown benchmark {name}; use one of {', '.join(names)}")
    output_file.check(json_file)
    given: dict[str, object] = {
        "rows": rows,
        "rounds": rounds,
        "predict": predict,
        "trace": trace,
        "whole_step": whole_step,
        "shares": shares,
        "speed_only": speed_only,
        "text": text,
        "valid": valid,
        "link": link,
        "curve": curve,
        "settings": settings,
    }
    given |= {
        option: None if text is None else _numbers(f"--{option}", text) for option, text in (("chunks", chunks), ("workers", workers))
    }
    run = importlib.import_module(f"carrywave.benchmarks.{name.replace('-', '_')}").run
    known = inspect.signature(run).parameters
    asked = {option: value for option, value in given.items() if value}
    if unknown := [option for option in asked if option not in known]:
        raise UserError(f"bench {name} has no --{unknown[0].replace('_', '-')}; remove it")
    found: list[dict[str, object]] = run(quick=quick, **asked)
    _print(table_of(f"bench {name}", found))
    _write_rows(json_file, found)


def _print(table: Table) -> None:
    console = Console()
    # A file or pipe has no width, so use one wide enough that rows are not wrapped.
    (console if console.is_terminal else Console(width=240)).print(table)


def _numbers(option: str, text: str) -> list[int]:
    """The whole numbers of a list such as `4,8`."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UserError(f"{option} {text} is not a list of whole numbers; write it as in 4,8,16")
    return [int(part) for part in parts]


@app.command(cls=Command)
@with_exit_codes
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


def _benchmarks() -> list[str]:
    """Names of the modules that define `run`, found by reading their source because importing them would load torch."""
    import carrywave.benchmarks

    folders = [Path(folder) for folder in carrywave.benchmarks.__path__]
    found = [path.stem for folder in folders for path in folder.glob("*.py") if "\ndef run(" in path.read_text(encoding="utf-8")]
    return sorted(name.replace("_", "-") for name in found)


def _spec_of(run: str | None, where: Surroundings) -> dict[str, Any]:
    """The values of the spec of a run that is resumed; none where another host keeps it, and its workers will read them."""
    if run is None:
        raise RunError("--resume needs a run folder; pass --run DIR")
    if is_address(run):
        text = Store(run, RunError).read("spec.yaml")
        if text is None:
            raise RunError(f"{run} has no run to resume (no spec.yaml); correct --run, or remove --resume to start a new run")
        return dict(parse_yaml(text.decode(errors="replace"), f"{run}/spec.yaml") or {})
    path = Path(run) / "spec.yaml"
    if not path.is_file():
        if not keeps_the_run(where):
            return {}
        raise RunError(f"{run} has no run to resume (no spec.yaml); correct --run, or remove --resume to start a new run")
    return read_values(path)


def _place(run: str) -> Path | str:
    """A run as the other modules take it: an address is text, which a path would not keep as it is."""
    return run if is_address(run) else Path(run)


def _file(name: str) -> Path:
    """A data file that a command is given; one in an object store is fetched."""
    return fetch(name, cache.folder(None)) if is_address(name) else Path(name)


def _is_there(run: str | None) -> bool:
    """True if there is a run to continue."""
    if run is None:
        raise RunError("--continue needs a run folder; pass --run DIR")
    return Store(run, RunError).read("spec.yaml") is not None if is_address(run) else (Path(run) / "spec.yaml").is_file()


def _write_rows(path: Path | None, rows: list[dict[str, object]]) -> None:
    """Write a JSON array with one row per line; NaN and infinity become null, since JSON has neither."""
    if path is not None and is_first():
        lines = (json.dumps({name: plain(value) for name, value in row.items()}, ensure_ascii=False) for row in rows)
        output_file.write(path, "[\n" + ",\n".join(lines) + "\n]\n")


def _evaluations(run: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()] if is_first() else []
    return [row for row in rows if row["split"] != "train"]


def main() -> None:
    """Run the command named on the command line."""
    plain_warnings()
    app(prog_name="carrywave")
