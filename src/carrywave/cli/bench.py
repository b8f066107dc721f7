"""`carrywave bench`: runs one of the benchmarks, with the options that it has."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Annotated

import typer

from carrywave.cli.options import JsonOption, numbers_of, show, write_rows
from carrywave.errors import UserError
from carrywave.plan.profile import PROFILE
from carrywave.runs import output_file
from carrywave.runs.display import table_of


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Benchmark to run; an unknown name lists them all.")],
    json_file: JsonOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use small sizes, which show that it works but not how fast it is.")] = False,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORDS",
            help='kernels, step, gpu-pipeline, quality: run only rows with all of these words, as in "8x512 bf16"; plan: this recipe; '
            "repeatable.",
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
    profile: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help=f"plan: on a GPU, predict from this profile; ${PROFILE} does the same.")
    ] = None,
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
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="sync, quality: a key of the spec, as in model.hidden=256; repeatable."),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help="quality: columns to run. Default: ours,recipe,torch,simple.")
    ] = None,
    data: Annotated[Path | None, typer.Option(metavar="FOLDER", help="quality: the folder of data sets. Default: data.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, metavar="N", help="quality: runs of each cell. Default: 3.")] = None,
    at_once: Annotated[int | None, typer.Option(min=1, metavar="N", help="quality: runs side by side. Default: 1.")] = None,
) -> None:
    """Run a benchmark: carrywave and its peer side by side."""
    names = _benchmarks()
    if name not in names:
        raise UserError(f"unknown benchmark {name}; use one of {', '.join(names)}")
    output_file.check(json_file)
    options: dict[str, object] = {
        "rows": rows,
        "rounds": rounds,
        "predict": predict,
        "trace": trace,
        "whole_step": whole_step,
        "profile": profile,
        "shares": shares,
        "speed_only": speed_only,
        "text": text,
        "valid": valid,
        "link": link,
        "curve": curve,
        "settings": settings,
        "columns": None if columns is None else [name.strip() for name in columns.split(",")],
        "data": data,
        "seeds": seeds,
        "at_once": at_once,
    }
    options |= {
        option: None if text is None else numbers_of(f"--{option}", text, least)
        for option, text, least in (("chunks", chunks, 1), ("workers", workers, 2))
    }
    module = importlib.import_module(names[name])
    parameters = inspect.signature(module.run).parameters
    set_options = {option: value for option, value in options.items() if value}
    if unknown := [option for option in set_options if option not in parameters]:
        raise UserError(f"bench {name} has no --{unknown[0].replace('_', '-')}; remove it")
    results: list[dict[str, object]] = module.run(quick=quick, **set_options)
    show(table_of(f"bench {name}", module.shown(results) if hasattr(module, "shown") else results))
    for line in module.conclusions(results) if hasattr(module, "conclusions") else ():
        typer.echo(line)
    write_rows(json_file, results)


def _benchmarks() -> dict[str, str]:
    """Modules that define `run`, by the name to call them by; found by reading their source because importing them would load torch."""
    import carrywave.benchmarks

    modules = {}
    for folder in map(Path, carrywave.benchmarks.__path__):
        for path in folder.rglob("*.py"):
            if "\ndef run(" in path.read_text(encoding="utf-8"):
                words = path.relative_to(folder).with_suffix("").parts
                modules[path.stem.replace("_", "-")] = ".".join(("carrywave.benchmarks", *words))
    return dict(sorted(modules.items()))
