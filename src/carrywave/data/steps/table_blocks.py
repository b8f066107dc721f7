"""Tables of series, read a block of whole series at a time, so that a file may be larger than memory.

A table that fits into memory is one block, its rows in any order. A larger Parquet file must have the rows of each series next to each
other; it is then read in blocks of a limited number of cells, and at least one series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet

from carrywave.data.codec import Codec
from carrywave.data.files import fields
from carrywave.data.files.rows import WEIGHT, Row, Rows
from carrywave.data.files.source import Source
from carrywave.data.tables.columns import COVARIATES, SERIES_NAME, ColumnChoice
from carrywave.data.tables.moments import unusable
from carrywave.data.tables.table import Table, arrange, read_table
from carrywave.errors import DataError
from carrywave.spec.data_spec import DataSpec

WHOLE_CELLS = 1 << 24  # a Parquet file with more is read in blocks
BLOCK_CELLS = 1 << 21

Open = Callable[[Codec | None, bool], Iterator[Table]]


@dataclass(frozen=True)
class SeriesSource:
    """Where series come from: as the spec says or, given a codec, as the training data was read; with or without their targets."""

    open: Open
    separate: bool = False  # each series is an example by itself, so that whole ones are held out, not their ends


def of_file(source: Source, data: DataSpec) -> SeriesSource:
    """The series of a CSV or Parquet table."""

    def blocks(codec: Codec | None, labelled: bool) -> Iterator[Table]:
        choice = choice_of(data, codec, source.name, labelled=labelled)
        if source.format == "parquet" and (file := _in_blocks(source, choice)) is not None:
            yield from _arranged(source, file, choice)
            return
        table, notes = read_table(source, choice.series, time=choice.time, decimal=data.decimal)
        yield arrange(table, source.name, choice, read_notes=notes)

    return SeriesSource(blocks)


def of_table(table: Any, name: str, data: DataSpec, index: str | None = None) -> SeriesSource:
    """The series of an Arrow table in memory; `index` is the column that was a frame's index."""
    return SeriesSource(lambda codec, labelled: iter([arrange(table, name, choice_of(data, codec, name, labelled=labelled), index=index)]))


def of_rows(open_rows: Callable[[bool], Rows], data: DataSpec) -> SeriesSource:
    """A series for each row with `steps` and, for each step, a number or several in `labels`; rows are opened with or without these."""

    def blocks(codec: Codec | None, labelled: bool) -> Iterator[Table]:
        rows = open_rows(labelled)
        table, targets = _long_table(rows, data, codec, labelled=labelled)
        weight = WEIGHT if WEIGHT in table.column_names else None
        choice = replace(ColumnChoice.of(data, codec, labelled=labelled), weight=weight)
        if codec is None:
            named = next((name for name in (*COVARIATES, "columns", "targets") if getattr(data, name)), None)
            if named is not None:
                raise DataError(f"{rows.name} has rows of steps, but data.{named} names columns; use a CSV or Parquet file, or remove it")
            choice.check_unnamed(rows.name, "time", "frequency")
            choice = replace(choice, series=SERIES_NAME, targets=targets, frequency="none")
        yield arrange(table, rows.name, choice)

    return SeriesSource(blocks, separate=True)


def choice_of(data: DataSpec, codec: Codec | None, name: str, *, labelled: bool) -> ColumnChoice:
    """The choice of columns of a table; refuse one without targets."""
    if codec is None and not data.targets:
        raise DataError(f"{name} is a table, but data.targets does not say what to estimate at every step; set it to a column or several")
    if codec is None and data.label is not None:
        raise DataError(f"{name} is a table, whose targets data.targets names, but data.label is {data.label}; remove it")
    both = sorted(set(data.targets or ()) & set(data.columns or ())) if codec is None else []
    if both:
        raise DataError(
            f"data.columns and data.targets both name {both[0]!r}, but what is estimated is not read; remove it from data.columns"
        )
    return ColumnChoice.of(data, codec, labelled=labelled)


def _in_blocks(source: Source, choice: ColumnChoice) -> Any | None:
    """The Parquet file, if it is too large to be read as a whole and has a column that names series."""
    file = source.guard(lambda: pa_parquet.ParquetFile(source.path, memory_map=True, pre_buffer=False))
    names = file.schema_arrow.names
    wanted = len(names) if choice.columns is None else len(choice.columns) + 2
    large = file.metadata.num_rows * wanted > WHOLE_CELLS
    return file if large and (choice.series or SERIES_NAME) in names else None


def _arranged(source: Source, file: Any, choice: ColumnChoice) -> Iterator[Table]:
    """The blocks of a file as tables; what the first one shows (times, their spacing, columns) holds for all."""
    before: set[str] = set()
    for first, block in _blocks(source, file, choice):
        name = source.name if not first else f"{source.name} from row {first + 1:,} on"
        table = arrange(block, name, choice)
        again = next((series for series in table.names if series in before), None)
        if again is not None:
            fact = f"the rows of series {again} are not next to each other, as they must be in a file of {file.metadata.num_rows:,} rows"
            raise DataError(f"{source.name}: {fact}; sort the file by {table.series}")
        before.update(table.names)
        yield replace(table, name=source.name)
        if not choice.trained and not first:
            read = tuple(column for column in table.columns[: len(table.values[0])] if column in block.column_names)
            spacing = choice.frequency or table.frequency
            choice = replace(choice, columns=read, time=table.time, series=table.series, frequency=spacing, categorical=table.categorical)


def _blocks(source: Source, file: Any, choice: ColumnChoice) -> Iterator[tuple[int, Any]]:
    """Cut a file into tables of whole series, each with the number of rows before it."""
    series = choice.series or SERIES_NAME
    names = file.schema_arrow.names
    read = names
    if choice.columns is not None and choice.time is not None:
        wanted = {*choice.columns, *choice.categorical, *choice.static, choice.time, choice.weight, series}
        read = [name for name in names if name in wanted]
    most = max(1, BLOCK_CELLS // len(read))
    batches = file.iter_batches(batch_size=most, columns=read, use_threads=False)
    held, first = None, 0
    while (batch := source.guard(lambda: next(batches, None))) is not None:
        table = pa.Table.from_batches([batch])
        held = table if held is None else pa.concat_tables([held, table])
        if held.num_rows < most:
            continue
        codes = held[series].combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
        changes = np.flatnonzero(codes[1:] != codes[:-1])
        if len(changes):
            end = int(changes[-1]) + 1
            yield first, held.slice(0, end)
            first += end
            held = held.slice(end).combine_chunks()
    if held is not None and held.num_rows:
        yield first, held


def _long_table(rows: Rows, data: DataSpec, codec: Codec | None, *, labelled: bool) -> tuple[Any, tuple[str, ...]]:
    """Rows with steps as one table with a row for each step, and the names of its targets."""
    columns = None if codec is None else len(codec.measured)
    outputs = None if codec is None else len(codec.step_targets)
    series: list[str] = []
    lengths: list[int] = []
    steps: list[fields.Matrix] = []
    labels: list[fields.Matrix] = []
    weights: list[float | fields.Matrix | None] = []
    for number, row in rows:
        where = rows.where(number)
        fields.refuse_resets(row, where)
        steps.append(_matrix(row, "steps", where, columns, missing=data.missing))
        columns = _width(steps[-1]) or columns
        if labelled:
            labels.append(_matrix(row, "labels", where, outputs, missing=None))
            outputs = _width(labels[-1]) or outputs
            weights.append(fields.weight_of(row, len(steps[-1]), where))
            if len(labels[-1]) != len(steps[-1]):
                raise DataError(f"{where}: {len(labels[-1])} labels for {len(steps[-1])} steps; use one per step (null for none)")
        if codec is None and data.series is not None:
            fields.take(row, data.series, where)  # not an item without a name
        series.append(_named(row, data, f"{rows.name} item {len(series)}"))
        lengths.append(len(steps[-1]))
    if not steps:
        raise DataError(f"{rows.name} is empty; use data with at least one row")
    again = next((name for name in series if series.count(name) > 1), None) if len(set(series)) < len(series) else None
    if again is not None:
        raise DataError(f"{rows.name}: two rows are named {again} ({data.series or SERIES_NAME}); give each sequence its own name")
    targets = (codec.step_targets if codec is not None else _target_names(outputs or 1)) if labelled else ()
    made = {SERIES_NAME: pa.DictionaryArray.from_arrays(np.repeat(np.arange(len(series)), lengths), pa.array(series))}
    for names, matrices in (([str(place) for place in range(columns or 1)], steps), (targets, labels)):
        wide = [np.broadcast_to(matrix, (len(matrix), len(names))) for matrix in matrices]
        together = np.concatenate(wide) if wide else np.empty((0, 0))
        made |= {name: pa.array(together[:, place]) for place, name in enumerate(names)}
    if any(weight is not None for weight in weights):
        each = [np.broadcast_to(1.0 if weight is None else weight, many) for weight, many in zip(weights, lengths, strict=True)]
        made[WEIGHT] = pa.array(np.concatenate(each))
    return pa.table(made), targets


def _target_names(outputs: int) -> tuple[str, ...]:
    return ("label",) if outputs == 1 else tuple(f"label {number}" for number in range(outputs))


def _named(row: Row, data: DataSpec, otherwise: str) -> str:
    name = row.get(data.series or SERIES_NAME)
    return otherwise if name is None else str(name)


def _width(matrix: fields.Matrix) -> int | None:
    """How many numbers a step has; None if every step is null, which leaves it open."""
    return None if matrix.shape[1] == 1 and np.isnan(matrix).all() else matrix.shape[1]


def _matrix(row: Row, field: str, where: str, columns: int | None, *, missing: str | None) -> fields.Matrix:
    """The numbers of a field for each step, NaN for null; `missing` says whether inputs may lack any, and None that these are targets."""
    value = fields.take(row, field, where)
    if isinstance(value, list) and None in value:
        width = columns or next((len(step) for step in value if isinstance(step, list | tuple)), 1)
        if width > 1 or any(isinstance(step, list | tuple) for step in value):
            value = [[None] * width if step is None else step for step in value]  # all of it is missing
    matrix = fields.numbers(value, field, where)
    matrix = matrix[:, None] if matrix.ndim == 1 else matrix
    if matrix.ndim != 2 or not matrix.size:
        raise DataError(f"{where}: {field} has shape {list(matrix.shape)}; write a list of steps, each a number or a list of numbers")
    if columns is not None and matrix.shape[1] != columns:
        raise DataError(f"{where}: a step has {matrix.shape[1]} numbers in {field}, but others have {columns}; use {columns} in every step")
    bad = unusable(matrix) & ~(np.isnan(matrix) if missing != "error" else np.zeros(1, np.bool_))
    if bad.any():
        step, column = (int(place) for place in np.argwhere(bad)[0])
        remedy = "fill the gap, or set data.missing=mask, forward, interpolate or zero" if np.isnan(matrix[step, column]) else "correct it"
        raise DataError(
            f"{where}: step {step}, column {column} of {field} is {matrix[step, column]}, not a finite number (below 1e25); {remedy}"
        )
    return matrix
