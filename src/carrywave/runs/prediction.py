"""Predicts with a trained run: a label, tags, numbers or a forecast for each sequence; a continuation for each prompt."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from carrywave.data.codec import Codec
from carrywave.data.files.fields import as_plain
from carrywave.data.files.frames import columns_of, is_frame, plain_column
from carrywave.data.files.source import HEAD_BYTES, not_utf8, to_utf8
from carrywave.data.python_inputs import file_of, read_python, series_of
from carrywave.data.sequences import Sequences
from carrywave.data.tables.series import scales, unseen_series
from carrywave.data.tables.table import Table
from carrywave.errors import DataError, PlanError, RunError, UserError
from carrywave.model.model import Model
from carrywave.parallel.gather import collect
from carrywave.parallel.startup.launcher_env import is_first
from carrywave.parallel.world import join, leave, raise_on_all
from carrywave.runs import output_file as outputs
from carrywave.runs.evaluation import passes
from carrywave.runs.generation import generate
from carrywave.runs.trained_run import Saved, open_run, warn
from carrywave.runs.watcher import printable
from carrywave.spec.spec import BatchSpec
from carrywave.tasks.task import Part
from carrywave.tasks.views import Naive

BY_PLACE = "series"  # the field of a forecast with the index, from 0, of one of several unnamed series
Row = dict[str, Any]
Prompt = tuple[str, str]  # its name in errors, and the text to continue


def predict(
    path: Path | str,
    data: Any = None,
    *,
    prompt: str | None = None,
    tokens: int = 200,
    temperature: float = 1.0,
    seed: int = 1,
    device: str = "auto",
    model: nn.Module | None = None,
    note: Callable[[str], None] | None = None,
) -> list[Row]:
    """Predict for a file or an object as `fit` accepts them, labels not needed; for a language model, for one prompt or a list of them.

    `model` is the model of a run that was trained with the user's own modules; the best weights are loaded into it. Under a launcher, each
    worker predicts its part, and rank 0 returns all of it. Oddities in the data, such as gaps in the times, are warnings, or lines for
    `note`.

    >>> import carrywave as cw
    >>> how = {"batch": {"lanes": 2, "steps": 8}, "train": {"epochs": 1}}
    >>> result = cw.fit({"hidden": 4, "layers": 1}, "the carry goes on and on\\n" * 8, task="language", **how)
    >>> [row] = cw.predict(result.run, prompt="the", tokens=5)
    >>> len(row["continuation"])
    5
    """
    world = join(device)
    with raise_on_all(world):
        saved = open_run(path, device, model, world=world)
        _check(saved, path, data, prompt)
    if saved.spec.task == "language":
        return continuations(saved, _prompts(data, prompt, saved), tokens, temperature, seed)
    codec, spec = saved.task.codec, saved.spec
    with raise_on_all(world, patient=True):
        table = series_of(data, codec, spec) if spec.task == "forecasting" else None
        if table is not None:
            table.check_ahead(spec.data.horizon)
        sequences = read_python(data, codec, spec, labelled=False)
    if world.rank == 0:
        for line in () if table is None else (*sequences.notes, *unseen_series(table.name, table.names, codec)):
            (note or warn)(line)
    rows = predictions(saved, sequences, table)
    leave(world)
    return rows


def _check(saved: Saved, path: Path | str, data: Any, prompt: str | None) -> None:
    workers = saved.mesh.world.size
    if workers > 1 and saved.spec.task == "language":
        raise PlanError(f"a prompt is continued token by token, on one device; start one worker instead of {workers}")
    if not saved.model.has_output:
        raise RunError(f"head {type(saved.model.head).__name__} has no forward method, so it cannot predict; add one")
    if prompt is not None and saved.spec.task != "language":
        raise UserError(f"--prompt needs a language model, but {path} is a {saved.spec.task} model; pass an INPUT file instead")
    if prompt is not None and data is not None:
        raise UserError("--prompt and INPUT cannot be combined; pass only one of them")
    if data is None and saved.spec.task != "language":
        raise UserError(f"predict needs an INPUT file for a {saved.spec.task} model; pass it after the run folder")


def predict_run(
    path: Path | str, input: Path | None = None, output: Path | None = None, *, prompt: str | None = None, **how: Any
) -> list[Row]:
    """Predict for a file (or, for a language model, a prompt), and write rows to a .jsonl or .csv file or to standard output."""
    kind = "" if output is None else output.suffix.lower()
    if kind not in ("", ".csv", ".json", ".jsonl", ".txt"):
        raise UserError(
            f"{output}: predictions are written as JSON Lines or CSV, not as {kind}; use a file name that ends in .jsonl or .csv"
        )
    rows = predict(path, input, prompt=prompt, note=lambda line: print(f"carrywave: {printable(line)}", file=sys.stderr), **how)
    if not is_first():
        return rows
    text = _csv(rows) if kind == ".csv" else "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if output is None:
        _show(text if prompt is None else rows[0]["text"] + "\n")
    else:
        outputs.write(output, text)
    return rows


def _show(text: str) -> None:
    """Write to standard output: verbatim for a program, escaped for a terminal."""
    if sys.stdout is None:
        raise UserError("standard output is closed, so the result would be lost; open it, or pass a file with -o")
    try:
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    except UnicodeEncodeError:  # an encoding that lacks some characters, or an unpaired surrogate
        sys.stdout.write(text.encode(sys.stdout.encoding, errors="backslashreplace").decode(sys.stdout.encoding))


def continuations(saved: Saved, prompts: list[Prompt], count: int, temperature: float, seed: int) -> list[Row]:
    """Continue each prompt."""
    if not isinstance(saved.model, Model):
        raise RunError(
            f"{type(saved.model.module).__name__} passes no carry from token to token, so it cannot continue prompts; "
            "train a cw.Model(encoder, lstm, head)"
        )
    codec = saved.task.codec
    starts = [_start(codec, text, where) for where, text in prompts]
    made = generate(saved.model, [ids.tolist() for ids in starts], count, temperature=temperature, seed=seed, device=saved.mesh.device)
    rows = []
    for (_, text), ids, more in zip(prompts, starts, made, strict=True):
        whole = codec.decode([*ids.tolist(), *more]) if text else codec.decode(more)
        rows.append({"prompt": text, "continuation": codec.decode(more), "text": whole})
    return rows


def _start(codec: Codec, text: str, where: str) -> NDArray[Any]:
    """The tokens to continue from. A model must have read something: for an empty prompt, a line end."""
    if not text:
        end = codec.tokens.ids("\n")[-1:]
        if not len(end) or end[0] < 0:
            raise DataError(f"{where} is empty, and the vocabulary has no newline to start from; pass some text to continue")
        return end
    ids = codec.encode(text, where)
    if not len(ids):
        raise DataError(f"{where}: {text!r:.40} contains no tokens; pass some text to continue")
    return ids


def _prompts(data: Any, prompt: str | None, saved: Saved) -> list[Prompt]:
    """The prompts: `prompt` itself, the lines of a file, a text, or a list of texts."""
    if data is None:
        return [("the prompt", prompt or "")]
    file = file_of(data, saved.spec)
    texts = [data] if isinstance(data, str) else _texts(data)
    found = list(_lines(Path(file))) if file is not None else [(f"prompt {number}", text) for number, text in enumerate(texts)]
    if not found:
        raise DataError(f"{file or 'data'} is empty; pass one prompt per line")
    for where, text in found:
        if not isinstance(text, str):
            raise DataError(f"{where} must be a string, got {type(text).__name__}; pass a list of strings")
    return found


def _texts(data: Any) -> Any:
    """The texts in order; from a frame, its column prompt or text, or its only column."""
    if not is_frame(data):
        return as_plain(data)
    columns = dict(columns_of(data))
    name = next((name for name in ("prompt", "text") if name in columns), next(iter(columns)) if len(columns) == 1 else None)
    if name is None:
        raise DataError(f"the frame has no column named prompt or text (columns: {', '.join(list(columns)[:8])}); rename or add one")
    return plain_column(columns[name])


def _lines(path: Path) -> Iterator[Prompt]:
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not a regular file; pass a file with one prompt per line")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; pass a file with one prompt per line") from error
    except UnicodeDecodeError as error:
        known = not_utf8(path, path.read_bytes()[:HEAD_BYTES])
        raise DataError(known or f"{path} is not UTF-8 text at byte {error.start}; {to_utf8(path)}") from error
    for number, line in enumerate(lines, start=1):
        if path.suffix != ".jsonl":
            yield f"{path}:{number}", line
            continue
        try:
            value = json.loads(line)
            text = value.get("prompt", value.get("text")) if isinstance(value, dict) else value
        except ValueError as error:
            raise DataError(f"{path}:{number}: not JSON ({error}); write one object per line") from error
        if not isinstance(text, str):
            raise DataError(f'{path}:{number}: no text; write {{"text": "…"}} on each line')
        yield f"{path}:{number}", text


def predictions(saved: Saved, data: Sequences, table: Table | None = None) -> list[Row]:
    """One row for each sequence, in the order of the file; for a forecast, one for each step ahead of the end of each series.

    `table` holds the series as in the file: their times and their scale.
    """
    match saved.spec.task:
        case "classification":
            return [_label(saved, logits) for logits in _outputs(saved, data)]
        case "regression":
            values = [saved.task.codec.restore(out).tolist() for out in _outputs(saved, data)]
            return [{"label": value[0] if len(value) == 1 else value} for value in values]
        case "tagging":
            codec = saved.task.codec
            return [{"labels": [codec.label(int(tag)) for tag in logits.argmax(-1)]} for logits in _outputs(saved, data)]
        case _:
            return list(_forecasts(saved, data, table)) if table is not None else []


def _label(saved: Saved, logits: NDArray[Any]) -> Row:
    shares = torch.softmax(torch.from_numpy(logits).double(), dim=-1).tolist()
    labels = saved.task.codec.labels
    best = int(np.argmax(logits))
    return {
        "label": saved.task.codec.label(best),
        "probability": round(shares[best], 6),
        "probabilities": {n: round(s, 6) for n, s in zip(labels, shares, strict=True)},
    }


def _forecasts(saved: Saved, data: Sequences, table: Table) -> Iterator[Row]:
    """Every step ahead of the last row of every series, in the units of the file."""
    spec, codec = saved.spec.data, saved.task.codec
    targets = np.array(codec.targets)
    lasts = data.starts + data.lengths - 1
    naive_NHC = Naive(data, targets, spec.horizon, spec.season, spec.residual)(lasts)
    columns = [codec.columns[index] for index in targets]
    known = scales(table, codec)
    for number, out in enumerate(_outputs(saved, data)):
        mean, std = (np.array(values)[targets] for values in known[number])
        times = table.ahead(number, spec.horizon)
        for step in range(spec.horizon):
            row: Row = {} if codec.series is None else {codec.series: table.series_name(number)}
            if codec.series is None and len(data) > 1:
                row[BY_PLACE] = number  # unnamed series are told apart by their position
            if times is not None:
                row[str(codec.time)] = times[step]
            row["step"] = step + 1
            for place, column in enumerate(columns):
                value = (out[step, place] + naive_NHC[number, step, place]) * std[place] + mean[place]
                if spec.quantiles is None:
                    row[column] = float(value)
                else:
                    row |= {f"{column}-q{quantile:g}": float(v) for quantile, v in zip(spec.quantiles, value, strict=True)}
            yield row


def _outputs(saved: Saved, data: Sequences) -> list[NDArray[Any]]:
    """The head's output for each sequence: of its last step for a forecast, of every step for tags, of the whole sequence otherwise."""
    spec = saved.spec
    if spec.task == "tagging" and spec.streams:
        # Predictions are for each sequence by itself, however the model was trained.
        spec = spec.model_copy(update={"batch": BatchSpec(tokens=spec.lanes * spec.steps)})
    part = Part("input", data, saved.task.unlabelled(data))
    pieces: dict[int, list[Tensor]] = {}
    seen: list[Tensor] = []

    def observe(out: Tensor, targets: Tensor | None) -> None:
        seen.append(out)

    for batch, _ in passes(saved.model, spec, part, mesh=saved.mesh, stage=saved.stage, observe=observe):
        if not saved.stage.has_head:
            continue
        # Chunks are concatenated over time; a pooled head's output counts after the last one.
        out = torch.cat(seen) if len(seen) > 1 and not saved.stage.pooled else seen[-1]
        seen.clear()
        out = out.float().cpu()
        lengths, owners = batch.lengths.tolist(), batch.sequence.tolist()
        for lane, (length, owner) in enumerate(zip(lengths, owners, strict=True)):
            if owner < 0 or not length:
                continue
            if saved.stage.pooled:
                pieces[owner] = [out[lane]]
            elif spec.task == "forecasting":
                pieces[owner] = [out[length - 1, lane]]
            else:
                pieces.setdefault(owner, []).append(out[:length, lane])
    own = {str(owner): torch.cat(parts) if saved.spec.task == "tagging" else parts[0] for owner, parts in pieces.items()}
    found = {int(owner): out for part in collect(saved.mesh.world, own) for owner, out in part.items()}
    return [found[number].numpy() for number in range(len(data))] if found else []


def _csv(rows: list[Row]) -> str:
    plain = [{name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in row.items()} for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(plain[0]) if plain else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    return text.getvalue()
