"""Prompts for a language model, read in blocks from text, a file, standard input or Python, and their continuations by all workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.files.fields import as_plain
from carrywave.data.files.frames import columns_of, is_frame, plain_column
from carrywave.data.files.rows import Row, Rows
from carrywave.data.files.source import FORMATS, Source, find
from carrywave.data.formats.opening import open_rows
from carrywave.data.python_inputs import file_of
from carrywave.data.text.tally import Tally
from carrywave.errors import DataError, RunError
from carrywave.model.model import Model
from carrywave.parallel.gather import collect
from carrywave.parallel.world import World, from_rank_0
from carrywave.prediction.blocks import KeptColumns
from carrywave.prediction.generation import Sampling, generate
from carrywave.prediction.saved_run import Saved
from carrywave.prediction.standard_input import is_standard, open_stream
from carrywave.spec.spec import Spec

MOST_PROMPTS = 1024
MOST_STEPS = 1 << 18  # of a block of prompts, padded to the longest
FIELDS = ("prompt", "text")


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    where: str  # its name in errors
    text: str
    carried: Row = field(default_factory=dict)


def prompts_of(data: Any, prompt: str | None, spec: Spec, carried: KeptColumns) -> Iterator[Prompt]:
    """The prompts: `prompt` itself, the lines or rows of a file or of standard input, a text, or a list of texts."""
    if data is None:
        yield Prompt("the prompt", prompt or "")
        return
    file = file_of(data, spec)
    if is_standard(data):
        stream = open_stream(spec)
        prompts = _lines(stream) if stream.format == "text" else _of_rows(open_rows(stream, spec, labelled=False).rows, carried)
        name = stream.name
    elif file is not None:
        name, prompts = file, _of_file(file, spec, carried)
    else:
        texts = [data] if isinstance(data, str) else _texts(data)
        name, prompts = "data", (_checked(f"prompt {number}", text) for number, text in enumerate(texts))
    count = 0
    for each in prompts:
        count += 1
        if carried.columns and not each.carried:
            each = Prompt(each.where, each.text, carried.take({"text": each.text}, each.where))
        yield each
    if not count:
        raise DataError(f"{name} is empty; pass one prompt per line")


def _checked(where: str, text: Any) -> Prompt:
    if not isinstance(text, str):
        raise DataError(f"{where} must be a string, got {type(text).__name__}; pass a list of strings")
    return Prompt(where, text)


def _texts(data: Any) -> Any:
    """The texts in order; from a frame, its column prompt or text, or its only column."""
    if not is_frame(data):
        return as_plain(data)
    columns = dict(columns_of(data))
    name = next((name for name in FIELDS if name in columns), next(iter(columns)) if len(columns) == 1 else None)
    if name is None:
        raise DataError(f"the frame has no column named prompt or text (columns: {', '.join(list(columns)[:8])}); rename or add one")
    return plain_column(columns[name])


def _of_file(name: str, spec: Spec, carried: KeptColumns) -> Iterator[Prompt]:
    path = Path(name)
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not a regular file; pass a file with one prompt per line")
    # The format of the run's own text says nothing about prompts: they are lines unless the name says otherwise.
    kinds = [FORMATS[suffix.lower()] for suffix in path.suffixes if suffix.lower() in FORMATS]
    format = spec.data.format if spec.data.format != "auto" else kinds[-1] if kinds else "text"
    source = find(name, field="INPUT", format=format)
    yield from _lines(source) if source.format == "text" else _of_rows(open_rows(source, spec, labelled=False).rows, carried)


def _lines(source: Source) -> Iterator[Prompt]:
    """Every line is a prompt, also an empty one."""
    for number, line in source.lines():
        where = f"{source.name}:{number}"
        try:
            yield Prompt(where, line.decode().removesuffix("\r"))
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: byte {error.start} of the line is not valid utf-8; set data.encoding") from error


def _of_rows(rows: Rows, carried: KeptColumns) -> Iterator[Prompt]:
    for number, row in rows:
        where = rows.where(number)
        text = next((row[name] for name in FIELDS if row.get(name) is not None), None)
        if not isinstance(text, str):
            raise DataError(f'{where}: no text; write {{"text": "…"}} on each line')
        yield Prompt(where, text, carried.take(row, where))


def continued(members: Sequence[Saved], prompts: Iterator[Prompt], count: int, how: Sampling, tally: Tally) -> Iterator[list[Row]]:
    """Yield the continuations of block after block of prompts; on ranks other than 0 the blocks are empty. Collective.

    Rank 0 reads the prompts, and `tally` counts what train does not have. Each worker continues its share of a block. Several runs continue
    them together.
    """
    saved, models = members[0], [member.model for member in members if isinstance(member.model, Model)]
    world, codec = saved.mesh.world, saved.task.codec
    if not isinstance(saved.model, Model):
        raise RunError(
            f"{type(saved.model.module).__name__} passes no carry from token to token, so it cannot continue prompts; "
            "train a cw.Model(encoder, lstm, head)"
        )
    first = 0
    for block in _blocks(world, prompts, codec):
        starts = [start(codec, prompt.text, prompt.where) for prompt in block]
        for prompt, tokens in zip(block, starts, strict=True):
            tally.read(tokens, codec.tokens.unknown, prompt.text)
        numbers = range(world.rank, len(block), world.size)
        made = generate(
            models,
            [starts[number].tolist() for number in numbers],
            count,
            how=how,
            device=saved.mesh.device,
            numbers=[first + number for number in numbers],
            ends=saved.task.document_ends,
        )
        local = {"number": torch.tensor(list(numbers)), "tokens": torch.tensor(made)} if made and count else {}
        by_number = {
            number: tokens
            for received in collect(world, local)
            if received
            for number, tokens in zip(received["number"].tolist(), received["tokens"].tolist(), strict=True)
        }
        yield [
            _row(codec, prompt, starts[number].tolist(), by_number.get(number, []))
            for number, prompt in enumerate(block)
            if world.rank == 0
        ]
        first += len(block)


def _row(codec: Codec, prompt: Prompt, begun: list[int], more: list[int]) -> Row:
    whole = codec.decode([*begun, *more]) if prompt.text else codec.decode(more)
    return {**prompt.carried, "prompt": prompt.text, "continuation": codec.decode(more), "text": whole}


def _blocks(world: World, prompts: Iterator[Prompt], codec: Codec) -> Iterator[list[Prompt]]:
    """Blocks of prompts that rank 0 reads, on every worker."""
    waiting: list[Prompt] = []  # read, but not fit for the block before
    while True:
        block: list[Prompt] = []

        def read() -> list[tuple[str, str]]:
            nonlocal block, waiting
            block, waiting = _next_block([*waiting], prompts, codec)
            return [(prompt.where, prompt.text) for prompt in block]

        received = from_rank_0(world, read, no_timeout=True)
        block = block if world.rank == 0 else [Prompt(where, text) for where, text in received]
        if not block:
            return
        yield block


def _next_block(waiting: list[Prompt], prompts: Iterable[Prompt], codec: Codec) -> tuple[list[Prompt], list[Prompt]]:
    """The next prompts, as many as fit, and one that does not."""
    block = waiting
    longest = max((len(start(codec, each.text, each.where)) for each in block), default=0)
    for prompt in prompts:
        longest = max(longest, len(start(codec, prompt.text, prompt.where)))
        if block and longest * (len(block) + 1) > MOST_STEPS:
            return block, [prompt]
        block.append(prompt)
        if len(block) == MOST_PROMPTS:
            break
    return block, []


def start(codec: Codec, text: str, where: str) -> NDArray[Any]:
    """The tokens to continue from. A model must have read something: for an empty prompt, a line end."""
    if not text:
        end = codec.tokens.ids("\n")[-1:]
        if not len(end) or end[0] == codec.tokens.unknown:
            raise DataError(f"{where} is empty, and the vocabulary has no newline to start from; pass some text to continue")
        return end
    ids = codec.encode(text, where)
    if not len(ids):
        raise DataError(f"{where}: {text!r:.40} contains no tokens; pass some text to continue")
    return ids
