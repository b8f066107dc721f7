"""Predicts with a trained run: a label, tags, a transcription, numbers or a forecast for each sequence, numbers for each step; a
continuation for each prompt.

Rows are read, predicted and written block by block, so memory does not grow with the input; only series are read as a whole, since they
must be sorted by time. Rank 0 reads and writes, all workers compute.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

from carrywave.data.codec import Codec
from carrywave.data.files.arrays import MemoryAppender
from carrywave.data.files.rows import Row, Rows
from carrywave.data.formats.opening import open_rows
from carrywave.data.prepare import told_by
from carrywave.data.python_inputs import read_python, rows_for, series_of, series_opener
from carrywave.data.tables import step_series
from carrywave.data.tables.series import unseen_series
from carrywave.data.text.tally import Tally
from carrywave.errors import RunError, UserError, option
from carrywave.parallel.process_state import leaving_no_trace
from carrywave.parallel.world import World, from_rank_0, join, leave, raise_on_all
from carrywave.prediction import row_writer, sample_paths
from carrywave.prediction.averages import mean_of_rows
from carrywave.prediction.blocks import Block, KeptColumns, read_blocks, shared
from carrywave.prediction.ensemble import AveragedOutputs, Paths, open_members, paths_of
from carrywave.prediction.evaluation import is_ctc
from carrywave.prediction.generation import Sampling
from carrywave.prediction.outputs import Outputs
from carrywave.prediction.predicted import BY_PLACE, estimates, forecasts, rows_of
from carrywave.prediction.prompts import continued, prompts_of
from carrywave.prediction.saved_run import Saved, check_bands, open_run, warn
from carrywave.prediction.standard_input import is_standard, kept_in_a_file, kept_on_all, open_stream
from carrywave.runs.watcher import printable
from carrywave.spec.spec import Spec
from carrywave.tasks.doubts import short_of_season

TEMPERATURE, TOKENS = 1.0, 200  # how tokens are drawn if nothing is said
Sink = Callable[[Iterable[Row]], bool]  # takes rows on rank 0; False: no more are wanted


@dataclass(frozen=True)
class _Request:
    """What to predict for, and how, as `predict` says."""

    paths: Sequence[Path | str]
    data: Any
    note: Callable[[str], None]
    tell: Callable[[str], None] | None = None  # for lines on what is not odd; None: not wanted
    prompt: str | None = None
    tokens: int = TOKENS
    temperature: float = TEMPERATURE
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 1
    samples: int | None = None
    steps: int | None = None
    keep: Sequence[str] = ()
    format: str = "auto"
    beam: int | None = None

    def __post_init__(self) -> None:
        _ = self.how  # refused here, before anything is opened

    @property
    def how(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


@leaving_no_trace
def predict(
    path: Paths,
    data: Any = None,
    *,
    prompt: str | None = None,
    tokens: int = TOKENS,
    temperature: float = TEMPERATURE,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 1,
    samples: int | None = None,
    steps: int | None = None,
    keep: Sequence[str] = (),
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

    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    how: dict[str, Any] = {"keep": (keep,) if isinstance(keep, str) else keep, "format": format, "beam": beam, **sampling}
    request = _Request(paths_of(path), data, note or warn, note, prompt, tokens, samples=samples, steps=steps, **how)
    _predict(request, device, model, lambda world: nullcontext(keep_all))
    return rows


def predict_run(
    path: Paths,
    input: Path | str | None = None,
    output: Path | None = None,
    *,
    as_csv: bool = False,
    device: str = "auto",
    **options: Any,
) -> int:
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
        with row_writer.writing(output, ".csv" if as_csv else "") as writer:

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

    note = lambda line: print(f"carrywave: {printable(line)}", file=sys.stderr)  # noqa: E731
    request = _Request(paths_of(path), input, note, note, **options)
    row_writer.check(output)
    _predict(request, device, None, to_output)
    return written


def _predict(request: _Request, device: str, model: nn.Module | None, sink_for: Callable[[World], Any]) -> None:
    world = join(device)
    with raise_on_all(world):
        if len(request.paths) > 1 and model is not None:
            raise UserError("several runs predict together only if their models are in their folders; pass one run with model=...")
        if len(request.paths) > 1:
            members = open_members(request.paths, device, world)
        else:
            whole = request.samples is not None  # draws may be fed back
            members = [open_run(request.paths[0], device, model, world=world, whole_for="language", whole=whole, loss=_no_loss)]
        saved = members[0]
        _check(saved, request)
        for member in members:
            check_bands(member)
        carried = KeptColumns.of(
            request.keep, "forecasting" if saved.spec.reads_series else saved.spec.task, multi_label=saved.spec.data.multi_label
        )
    if _is_empty(request.data):
        leave(world)
        return
    spec = _in_format(saved.spec, request.format)
    with ExitStack() as stack:
        with raise_on_all(world, same_message=True):
            sink = stack.enter_context(sink_for(world))
        tally = Tally()
        if spec.task == "language":
            prompts = prompts_of(request.data, request.prompt, spec, carried)
            for rows in continued(members, prompts, request.tokens, request.how, tally):
                if not _written(world, sink, rows):
                    break
        elif spec.task == "forecasting":
            _forecast(members, spec, request, sink)
        elif spec.each_step:
            _estimate(members, spec, request, sink)
        else:
            outputs = Outputs(saved) if len(members) == 1 else AveragedOutputs(members)
            for block in shared(world, lambda: _blocks(stack, members, spec, request.data, carried, tally)):
                if not _written(world, sink, rows_of(outputs, block, beam=request.beam or 1)):
                    break
        if world.rank == 0 and request.tell is not None:
            for line in tally.lines("the input"):
                request.tell(line)
        leave(world)


def _is_empty(data: Any) -> bool:
    """True for an object without rows; what a name stands for is not looked into."""
    shape = getattr(data, "shape", None)
    return tuple(shape[:1]) == (0,) if shape is not None else isinstance(data, Sized) and not isinstance(data, str) and len(data) == 0


def _written(world: World, sink: Sink, rows: Iterable[Row]) -> bool:
    """Hand rows over on rank 0; on every worker, whether more are wanted."""
    return from_rank_0(world, lambda: sink(rows), no_timeout=True)  # whoever reads our output may take its time


def _blocks(stack: ExitStack, members: Sequence[Saved], spec: Spec, data: Any, carried: KeptColumns, tally: Tally) -> Iterator[Block]:
    codec, *others = (member.task.codec for member in members)
    yield from read_blocks(_open(stack, spec, data, codec), codec, carried, tally, others=others)


def _open(stack: ExitStack, spec: Spec, data: Any, codec: Codec) -> Rows:
    """The rows of the input; on rank 0 only."""
    if not is_standard(data):
        return rows_for(data, spec, codec)
    stream = open_stream(spec)
    if stream.format in ("jsonl", "text"):
        return open_rows(stream, spec, labelled=False, known=told_by(codec))
    return rows_for(stack.enter_context(kept_in_a_file(stream)), spec, codec)


def _forecast(members: Sequence[Saved], spec: Spec, request: _Request, sink: Sink) -> None:
    world, codec = members[0].mesh.world, members[0].task.codec
    with ExitStack() as stack:
        data = request.data
        if is_standard(data):
            data = kept_on_all(world, stack, lambda: spec)
        made = [_forecasts_of(member, data, request, tell=member is members[0]) for member in members]
        places = (BY_PLACE, "step", *codec.series, *(() if codec.time is None else (codec.time,)))
        _written(world, sink, made[0] if len(made) == 1 else mean_of_rows(made, places))


def _forecasts_of(saved: Saved, data: Any, request: _Request, *, tell: bool) -> Iterator[Row]:
    """The forecasts of one run, computed when this is called; with `tell`, note what is odd about the data."""
    world, codec = saved.mesh.world, saved.task.codec
    spec = _in_format(saved.spec, request.format)
    with raise_on_all(world, no_timeout=True):
        table = series_of(data, codec, spec)
        sequences = read_python(data, codec, spec, labelled=False)
    if world.rank == 0 and tell:
        short = short_of_season(spec, sequences.lengths)
        for line in (*sequences.notes, *unseen_series(table.name, table.names, codec), *([] if short is None else [short])):
            request.note(line)
    if request.samples is None:
        return forecasts(Outputs(saved), sequences, table)
    steps = sample_paths.check(saved, request.samples, request.steps)
    if world.rank == 0 and request.tell is not None:
        fed = spec.data.horizon == 1 and steps > 1
        ancestral = "sample paths are ancestral: each value is drawn given those drawn before it"
        request.tell(ancestral if fed else "sample paths are direct: each step is drawn by itself, given the past alone")
    return sample_paths.sample_paths(saved, sequences, table, request.samples, steps, request.how.seed)


def _estimate(members: Sequence[Saved], spec: Spec, request: _Request, sink: Sink) -> None:
    """The numbers of every step."""
    world, codec = members[0].mesh.world, members[0].task.codec
    places = ("step", *codec.series, *(() if codec.time is None else (codec.time,)))
    with ExitStack() as stack:
        data = kept_on_all(world, stack, lambda: spec) if is_standard(request.data) else request.data
        with raise_on_all(world, no_timeout=True):
            open_table = series_opener(data, spec)
            tables = [(open_table(member.task.codec, labelled=False), member.task.codec) for member in members]
            read = [(table, step_series.read(table, codec, spec, MemoryAppender, part="data", labelled=False)) for table, codec in tables]
        if world.rank == 0:
            for line in read[0][1].notes:
                request.note(line)
        made = [estimates(Outputs(member), sequences, table) for member, (table, sequences) in zip(members, read, strict=True)]
        _written(world, sink, made[0] if len(made) == 1 else mean_of_rows(made, places))


def _in_format(spec: Spec, format: str) -> Spec:
    """The spec, for a file of another format than its name says."""
    return spec if format == "auto" else spec.model_copy(update={"data": spec.data.model_copy(update={"format": format})})


def _check(saved: Saved, request: _Request) -> None:
    task, prompt, data = saved.spec.task, request.prompt, request.data
    if (request.samples is not None or request.steps is not None) and task != "forecasting":
        raise UserError(
            f"{option('samples')} and {option('steps')} are for forecasts, but {request.paths[0]} is a {task} model; remove them"
        )
    if request.steps is not None and request.samples is None:
        raise UserError(f"{option('steps')} is how far sample paths go; pass {option('samples')} too, or remove it")
    if request.samples is not None:
        sample_paths.check(saved, request.samples, request.steps)
        if len(request.paths) > 1:
            raise UserError(f"{option('samples')} draws from one distribution, and the average of several runs is none; pass one run")
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
        raise UserError(f"{option('prompt')} needs a language model, but {request.paths[0]} is a {task} model; pass an INPUT file instead")
    if prompt is not None and not isinstance(prompt, str):
        raise UserError(f"{option('prompt')} is of type {type(prompt).__name__}, not one text; pass a list of prompts as data")
    if prompt is not None and data is not None:
        raise UserError(f"{option('prompt')} and INPUT cannot be combined; pass only one of them")
    if data is None and task != "language":
        raise UserError(f"predict needs an INPUT file for a {task} model; pass it after the run folder")
    how, default = request.how, {"temperature": TEMPERATURE, "tokens": TOKENS}
    for name, value in {"top-k": how.top_k, "top-p": how.top_p, "temperature": how.temperature, "tokens": request.tokens}.items():
        if task != "language" and value != default.get(name):
            raise UserError(f"{option(name)} is for language models, but {request.paths[0]} is a {task} model; remove it")


def _no_loss(out: Any, target: Tensor) -> NoReturn:
    """In the place of a loss that a module may not have: a prediction needs none."""
    raise AssertionError("a prediction asked for a loss")
