"""Predicts with a trained run: a label, tags, a transcription, numbers or a forecast for each sequence, numbers for each step; a
continuation for each prompt.

Rows are read, predicted and written block by block, so memory does not grow with the input; only series are read as a whole, since they
must be sorted by time. All workers read and compute, rank 0 writes.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

from carrywave.data.files.rows import Row, Rows
from carrywave.data.inputs import Input
from carrywave.data.prepare import read_python
from carrywave.data.tables import step_series
from carrywave.data.tables.series import unseen_series
from carrywave.data.text.tally import Tally
from carrywave.errors import RunError, UserError, option
from carrywave.parallel.process_state import leaving_no_trace
from carrywave.parallel.world import World, from_rank_0, join, leave, raise_on_all
from carrywave.prediction import row_writer, sample_paths
from carrywave.prediction.blocks import Block, is_standard, kept_columns, read_blocks, standard_input
from carrywave.prediction.ensemble import Paths, mean_of_rows, open_members, paths_of
from carrywave.prediction.evaluation import is_ctc
from carrywave.prediction.generation import Sampling, continuations
from carrywave.prediction.outputs import HeadOutputs
from carrywave.prediction.predicted import BY_PLACE, estimates, forecasts, rows_of
from carrywave.prediction.saved_run import Saved, check_bands, open_run, warn
from carrywave.runs.watcher import printable
from carrywave.tasks.warnings import short_of_season

TOKENS = 200  # of a continuation
Sink = Callable[[Iterable[Row]], bool]  # takes rows on rank 0; False: no more are wanted


@dataclass(frozen=True)
class _Request:
    """What to predict for, and how, as `predict` says."""

    data: Any
    prompt: str | None
    tokens: int
    sampling: Sampling
    keep: Sequence[str]
    format: str
    beam: int | None
    samples: int | None
    steps: int | None
    note: Callable[[str], None]


@leaving_no_trace
def predict(
    path: Paths,
    data: Any = None,
    *,
    prompt: str | None = None,
    tokens: int = TOKENS,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 1,
    samples: int | None = None,
    steps: int | None = None,
    keep: str | Sequence[str] = (),
    format: str = "auto",
    beam: int | None = None,
    device: str = "auto",
    model: nn.Module | None = None,
    note: Callable[[str], None] | None = None,
) -> list[Row]:
    """Predict for a file or an object as `fit` accepts them, labels not needed; for a language model, for one `prompt` or, as `data`, a
    list of them.

    Of a list of runs, the predictions are averaged: probabilities, numbers, forecasts, and quantiles level by level.

    Fields of the input named in `keep`, such as an id, are carried through (`"label=truth"` gives one another name). `top_k` and `top_p`
    restrict which tokens are drawn. `beam`: a transcription is searched for, with so many beginnings kept at each step; without it, the
    most likely label of each step is taken. Of a run with data.distribution, `samples` asks for so many sample paths, with a row for each
    series, path and step, instead of quantiles; `steps` is how far they go: up to the horizon, or, if that is 1, any number. `format` is
    that of a file, where its name does not say it. `model` is the model of a run that was trained with the user's own modules; the best
    weights are loaded into it. Under a launcher, each worker predicts its part, and rank 0 returns all of it. Oddities in the data, such as
    gaps in the times, are warnings, or lines for `note`.

    >>> import carrywave as cw
    >>> how = {"batch": {"lanes": 2, "steps": 8}, "train": {"epochs": 1}}
    >>> result = cw.fit({"hidden": 4, "layers": 1}, "the carry goes on and on\\n" * 8, task="language", **how)
    >>> [row] = cw.predict(result.run, prompt="the", tokens=5)
    >>> len(row["continuation"])
    5
    """
    rows: list[Row] = []

    def keep_all(more: Iterable[Row]) -> bool:
        rows.extend(more)
        return True

    sampling = Sampling(temperature, top_k, top_p, seed)
    carried = (keep,) if isinstance(keep, str) else keep
    request = _Request(data, prompt, tokens, sampling, carried, format, beam, samples, steps, note or warn)
    _predict(paths_of(path), request, device, model, lambda world: nullcontext(keep_all))
    return rows


def predict_run(path: Paths, input: Path | str | None = None, output: Path | None = None, *, device: str = "auto", **options: Any) -> int:
    """Predict for a file, standard input (`-`) or a prompt, and write rows to a .jsonl, .csv or .parquet file or to standard output;
    `options` are those of `predict`.

    Returns the number of rows. Raises BrokenPipeError, in a world of one, if nobody reads standard output to the end; several workers end
    without a word.
    """
    written = 0

    @contextmanager
    def to_output(world: World) -> Iterator[Sink]:
        nonlocal written
        if world.rank > 0:
            yield lambda rows: True
            return
        with row_writer.writing(output) as writer:

            def write(rows: Iterable[Row]) -> bool:
                if output is None and request.prompt is not None:
                    writer.say("".join(row["text"] + "\n" for row in rows))
                else:
                    writer.add(rows)
                return not writer.gone

            yield write
            written = writer.rows
        if writer.gone and world.size == 1:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    defaults = {"prompt": None, "tokens": TOKENS, "keep": (), "format": "auto", "beam": None, "samples": None, "steps": None}
    drawn = {name: options.pop(name) for name in ("temperature", "top_k", "top_p", "seed") if name in options}
    request = _Request(data=input, sampling=Sampling(**drawn), note=_to_stderr, **(defaults | options))
    row_writer.check(output)
    _predict(paths_of(path), request, device, None, to_output)
    return written


def _to_stderr(line: str) -> None:
    print(f"carrywave: {printable(line)}", file=sys.stderr)


def _predict(
    paths: Sequence[Path | str],
    request: _Request,
    device: str,
    model: nn.Module | None,
    sink_for: Callable[[World], AbstractContextManager[Sink]],
) -> None:
    world = join(device)
    with raise_on_all(world):
        if len(paths) > 1 and request.samples is not None:
            raise UserError(f"{option('samples')} draws from one distribution, and the average of several runs is none; pass one run")
        if len(paths) > 1 and model is not None:
            raise UserError("several runs predict together only if their models are in their folders; pass one run with model=...")
        if len(paths) > 1:
            members = open_members(paths, device, world)
        else:
            members = [
                open_run(paths[0], device, model, world=world, whole_for="language", whole=request.samples is not None, loss=_no_loss)
            ]
        members = [_in_format(member, request.format) for member in members]
        for member in members:
            _check(member, request)
    if isinstance(request.data, Sized) and not isinstance(request.data, str) and len(request.data) == 0:
        leave(world)  # nothing to predict for, as where every message was filtered out
        return
    with ExitStack() as stack:
        with raise_on_all(world, same_message=True):
            sink = stack.enter_context(sink_for(world))
        if is_standard(request.data):
            file = from_rank_0(world, lambda: stack.enter_context(standard_input(members[0].spec)), no_timeout=True)
            request = replace(request, data=Path(file))
        for rows in _rows(members, request):
            # Whoever reads our output may take its time.
            if not from_rank_0(world, lambda rows=rows: sink(rows), no_timeout=True):  # type: ignore[misc]
                break
        leave(world)


def _rows(members: Sequence[Saved], request: _Request) -> Iterator[Iterable[Row]]:
    """The predictions, block by block. Collective."""
    world, spec = members[0].mesh.world, members[0].spec
    codecs, tally = [member.task.codec for member in members], Tally()
    if spec.reads_series:
        yield _of_series(members, request)
        return
    with raise_on_all(world):
        kept = kept_columns(request.keep, spec)
        rows = Rows("the prompt", [(0, {"text": request.prompt or ""})], kind="")
        if request.data is not None:
            rows = Input.of(request.data, spec).rows(codecs[0], labelled=False)
    if spec.task == "language":
        yield from continuations(members, rows, kept, request.tokens, request.sampling, tally)
    else:
        outputs, blocks = HeadOutputs(*members), read_blocks(rows, codecs, kept, tally)
        while (block := _next(world, blocks)) is not None:
            yield rows_of(outputs, block, beam=request.beam or 1)
    for line in tally.lines("the input") if world.rank == 0 and request.note is not warn else ():
        request.note(line)


def _next(world: World, blocks: Iterator[Block]) -> Block | None:
    with raise_on_all(world):
        return next(blocks, None)
    return None


def _of_series(members: Sequence[Saved], request: _Request) -> Iterator[Row]:
    """Forecasts after the last row of each series, or numbers for every row; computed when this is called."""
    world, codec, spec = members[0].mesh.world, members[0].task.codec, members[0].spec
    made, notes = list[Iterator[Row]](), list[str]()
    with raise_on_all(world):
        kept_columns(request.keep, spec)
        given = Input.of(request.data, spec)
    for member in members:
        with raise_on_all(world, no_timeout=True):
            its, spec = member.task.codec, member.spec
            table = given.table(its, labelled=False)
            if spec.task == "forecasting":
                sequences = read_python(table, its, spec, labelled=False)
                short = short_of_season(spec, sequences.lengths)
                notes += [*sequences.notes, *unseen_series(table.name, table.names, its), *([] if short is None else [short])]
            else:
                sequences = step_series.read(table, its, spec, part="data", labelled=False)
                notes += sequences.notes
        if request.samples is not None:
            steps = sample_paths.check(member, request.samples, request.steps)
            return sample_paths.sample_paths(member, sequences, table, request.samples, steps, request.sampling.seed)
        outs = HeadOutputs(member).of(sequences)
        made.append(forecasts(member, outs, sequences, table) if spec.task == "forecasting" else estimates(member, outs, table))
    for line in dict.fromkeys(notes) if world.rank == 0 else ():
        request.note(line)
    places = (BY_PLACE, "step", *codec.series, *(() if codec.time is None else (codec.time,)))
    return made[0] if len(made) == 1 else mean_of_rows(made, places)


def _in_format(saved: Saved, format: str) -> Saved:
    """The run, for a file of another format than its name says."""
    spec = saved.spec
    data = spec.data.model_copy(update={"format": format})
    return saved if format == "auto" else replace(saved, spec=spec.model_copy(update={"data": data}))


def _check(saved: Saved, request: _Request) -> None:
    """Refuse what the run cannot predict."""
    task, prompt, name = saved.spec.task, request.prompt, saved.run.path
    check_bands(saved)
    if not saved.model.has_output:
        raise RunError(f"head {type(saved.model.head).__name__} has no forward method, so it cannot predict; add one")
    if task == "transcription" and not is_ctc(saved.model):
        raise RunError(
            f"head {type(saved.model.head).__name__} is your own, and which labels its outputs stand for is not known; call it yourself"
        )
    if request.beam is not None and (task != "transcription" or isinstance(request.beam, bool) or request.beam < 1):
        is_for = "is at least 1; change it" if task == "transcription" else f"is for transcription, not for {task}; remove it"
        raise UserError(f"{option('beam')} {is_for}")
    if prompt is not None and task != "language":
        raise UserError(f"{option('prompt')} needs a language model, but {name} is a {task} model; pass an INPUT file instead")
    if prompt is not None and not isinstance(prompt, str):
        raise UserError(f"{option('prompt')} is of type {type(prompt).__name__}, not one text; pass a list of prompts as data")
    if prompt is not None and request.data is not None:
        raise UserError(f"{option('prompt')} and INPUT cannot be combined; pass only one of them")
    if request.data is None and task != "language":
        raise UserError(f"predict needs an INPUT file for a {task} model; pass it after the run folder")
    if (request.samples, request.steps) != (None, None):
        if task != "forecasting" or request.samples is None:
            raise UserError(f"{option('samples')} and {option('steps')} are for sample paths of forecasts, and go together; remove them")
        sample_paths.check(saved, request.samples, request.steps)
    how = request.sampling
    asked = {"top-k": how.top_k, "top-p": how.top_p, "temperature": how.temperature != 1.0, "tokens": request.tokens != TOKENS}
    if task != "language" and (named := next((word for word, value in asked.items() if value), None)) is not None:
        raise UserError(f"{option(named)} is for language models, but {name} is a {task} model; remove it")


def _no_loss(out: Any, target: Tensor) -> NoReturn:
    """In the place of a loss that a module may not have: a prediction needs none."""
    raise AssertionError("a prediction asked for a loss")
