"""Reads rows to predict for in blocks, so that memory does not grow with the file. Rank 0 reads; the others get each block from it.

Blocks are cut by the rows alone, so they, and the batches made of them, are the same for any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carrywave.data import examples
from carrywave.data.codec import Codec
from carrywave.data.files.arrays import MemoryAppender
from carrywave.data.files.fields import FIELDS
from carrywave.data.files.rows import Row, Rows
from carrywave.data.formats.recognised import NamedRow, is_empty
from carrywave.data.sequences import Sequences
from carrywave.data.text.tally import Tally
from carrywave.errors import DataError, UserError, option
from carrywave.parallel.gather import broadcast
from carrywave.parallel.world import World, raise_on_all

PREDICTED: Mapping[str, tuple[str, ...]] = {
    "classification": ("label", "probability", "probabilities"),
    "regression": ("label",),
    "tagging": ("labels",),
    "transcription": ("labels", "probability"),
    "language": ("prompt", "continuation", "text"),
}
MOST_ROWS = 4096
MOST_ELEMENTS = 1 << 20  # numbers, tokens or characters; a row that has more is a block of its own


@dataclass(frozen=True)
class KeptColumns:
    """Columns of the input, each with its name in the predictions."""

    columns: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(words: Iterable[str], task: str, *, multi_label: bool = False) -> KeptColumns:
        """Read names such as `id`, or `label=truth` for a column that is to have another name."""
        reserved = (*PREDICTED.get(task, ()), *(("probabilities",) if multi_label else ()))
        pairs = [(word, word) if "=" not in word else (word.partition("=")[0], word.partition("=")[2]) for word in words]
        if pairs and task == "forecasting":
            raise UserError(f"{option('keep')} is for rows, but predictions for series have their names and times anyway; remove it")
        for column, name in pairs:
            if not column or not name:
                raise UserError(f"{option('keep')} has an empty name; write a column, or COLUMN=NAME for another name")
            if name in reserved:
                raise UserError(
                    f"{option('keep')} {column}: predictions have a field {name} of their own; "
                    f"choose another name, as in {column}=given_{name}"
                )
        twice = [name for number, (_, name) in enumerate(pairs) if name in [other for _, other in pairs[:number]]]
        if twice:
            raise UserError(f"{option('keep')} names {twice[0]} twice; name each field once")
        return KeptColumns(tuple(pairs))

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to read from the input."""
        return tuple(column for column, _ in self.columns)

    def take(self, row: Mapping[str, Any], where: str) -> Row:
        """The carried fields of a row, under the names it has in the input."""
        fields = row.original if isinstance(row, NamedRow) else row
        carried: Row = {}
        for column, name in self.columns:
            if column not in fields:
                shown = ", ".join(str(each) for each in list(fields)[:8])
                raise DataError(f"{where} has no field {column} (fields: {shown}); name one that every row has with {option('keep')}")
            carried[name] = fields[column]
        return carried


@dataclass(frozen=True)
class Block:
    """Rows that follow each other in the input."""

    data: Sequences  # of the rows that are not empty
    carried: Sequence[Row] = ()  # of each row; on rank 0 only
    empty: frozenset[int] = frozenset()  # which rows have nothing to read; on rank 0 only
    others: tuple[Sequences, ...] = ()  # the same rows, as further runs read them


def read_blocks(
    rows: Rows,
    codec: Codec,
    carried: KeptColumns,
    tally: Tally | None = None,
    *,
    others: Sequence[Codec] = (),
    most_rows: int = MOST_ROWS,
    most_elements: int = MOST_ELEMENTS,
) -> Iterator[Block]:
    """Yield all rows in order, encoded with a codec and with each of `others`; an input without rows is an error.

    `tally` counts what train does not have, and rows in which there is nothing to read.
    """
    tally = tally or Tally()
    piece: list[tuple[int, Row]] = []
    kept: list[Row] = []
    empty: set[int] = set()
    elements = count = 0
    for number, row in rows:
        size = _elements(row, codec.field)
        if kept and (len(kept) == most_rows or elements + size > most_elements):
            yield _block(_some(rows, piece), codec, kept, others, empty, tally)
            piece, kept, empty, elements = [], [], set(), 0
        kept.append(carried.take(row, rows.where(number)))
        count += 1
        if is_empty(next((row[field] for field in FIELDS if row.get(field) is not None), None)):
            empty.add(len(kept) - 1)
            continue
        # Other fields are not held: a row may have much that nobody asked for.
        read = row if row.get(codec.field) is None else {name: row[name] for name in (codec.field, "resets") if name in row}
        piece.append((number, read))
        elements += size
    if not count:
        raise DataError(f"{rows.name} is empty; use data with at least one row")
    yield _block(_some(rows, piece), codec, kept, others, empty, tally)


def _some(rows: Rows, piece: list[tuple[int, Row]]) -> Rows:
    """Some of the rows."""
    return Rows(rows.name, lambda: piece, rows.kind, join=False)


def _block(piece: Rows, codec: Codec, carried: list[Row], others: Sequence[Codec], empty: set[int], tally: Tally) -> Block:
    tally.left_out += len(empty)
    tallies = (tally, *(Tally() for _ in others))
    data, *more = (
        examples.encode(piece, each, MemoryAppender, labelled=False, join=False, tally=counts, may_be_empty=True)
        for each, counts in zip((codec, *others), tallies, strict=True)
    )
    return Block(data, carried, frozenset(empty), tuple(more))


def _elements(row: Row, field: str) -> int:
    """Roughly how much a row holds; what it is worth is checked when it is encoded."""
    value = row.get(field)
    if isinstance(value, np.ndarray):
        return int(value.size)
    if not isinstance(value, list | tuple | str):
        return 1
    first = value[0] if value else None
    return len(value) * (len(first) if isinstance(first, list | tuple | np.ndarray) else 1)


def shared(world: World, read: Callable[[], Iterator[Block]]) -> Iterator[Block]:
    """The blocks that rank 0 reads, on every worker. Collective; a mistake in the input is raised on all of them."""
    blocks: Iterator[Block] | None = None
    while True:
        block: Block | None = None
        # Patiently: the other end of a pipe may take its time.
        with raise_on_all(world, same_message=True, no_timeout=True):
            if world.rank == 0:
                blocks = read() if blocks is None else blocks
                block = next(blocks, None)
        packed = broadcast(world, {} if block is None else _packed((block.data, *block.others)))
        if not packed:
            return
        if block is None:
            data, *others = _unpacked(packed)
            block = Block(data, others=tuple(others))
        yield block


def _packed(read: Sequence[Sequences]) -> dict[str, Tensor]:
    """The arrays as bytes, named with what they hold: not every dtype of NumPy can be sent."""
    arrays = {
        f"{number} {name}": array
        for number, data in enumerate(read)
        for name in ("inputs", "starts", "lengths", "resets")
        if (array := getattr(data, name)) is not None
    }
    return {
        f"{name} {array.dtype.str} {'x'.join(map(str, array.shape))}": torch.from_numpy(
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )
        for name, array in arrays.items()
    }


def _unpacked(packed: dict[str, Tensor]) -> list[Sequences]:
    arrays: dict[int, dict[str, Any]] = {}
    for key, flat in packed.items():
        number, name, dtype, shape = key.split(" ")
        array = flat.numpy().view(np.dtype(dtype)).reshape([int(size) for size in shape.split("x")])
        arrays.setdefault(int(number), {})[name] = array
    return [Sequences(**each) for _, each in sorted(arrays.items())]
