"""`carrywave predict`: what a trained run predicts for a file or standard input, or how a language model continues a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from carrywave.cli.exits import leaving_at_once
from carrywave.cli.options import Device, DeviceOption, InputFormat, file_of, runs_and_data
from carrywave.cli.workers import FewDevicesOption, start_workers
from carrywave.errors import unwinding
from carrywave.runs import output_file


def predict(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN… [INPUT]",
            help="Run folder, or several, whose predictions are averaged; then the data, in the format of the training data, or -.",
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Output file, .jsonl, .csv or .parquet. Default: stdout, as JSON lines."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="COLUMN[=NAME]", help="Carry a column of INPUT, such as an id, through to predictions; repeatable."),
    ] = None,
    input_format: Annotated[
        InputFormat, typer.Option("--format", help="Format of INPUT; auto goes by its name or first bytes, or by the training data.")
    ] = InputFormat.auto,
    beam: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Transcription: search, with N beginnings kept at each step, instead of the likeliest labels."
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Language models: text to continue.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Language models: number of tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(help="Language models: 0 picks the most likely token, 1 samples from the model.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, metavar="K", help="Language models: sample from the K most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Language models: sample from the fewest tokens that have probability P together.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Forecasts of distributions: N sample paths instead of quantiles.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="How far sample paths go: up to data.horizon or, if that is 1, any number of steps."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the sampling, of tokens or of paths.")] = 1,
    device: DeviceOption = Device.auto,
    devices: FewDevicesOption = None,
) -> None:
    """Predict with the best weights of a run, or of several together; a language model continues a prompt."""
    runs, input_file = runs_and_data(words, only_files=prompt is not None)
    file = None if file == Path("-") else file
    output_file.check(file, wanted=True)
    with unwinding():
        start_workers(devices, device.value, prints_result=True)
        with leaving_at_once():
            from carrywave.prediction.predict import predict_run

        source = input_file if input_file is None or input_file == "-" else file_of(input_file)
        how: dict[str, Any] = {"keep": tuple(keep or ()), "format": input_format.value, "beam": beam, "device": device.value}
        how |= {"prompt": prompt, "tokens": tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        predict_run([Path(run) for run in runs], source, file, samples=samples, steps=steps, **how)
