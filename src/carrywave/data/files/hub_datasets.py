"""Datasets of Hugging Face's library: given as objects, or named in a spec as `hf:NAME@CONFIG#SPLIT`.

They are read in batches of Arrow tables, never as a whole. A name is written to one Parquet file in the cache, and from there on it is a
file like any other. Class labels are read by their names. The library is imported only for names.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pa_parquet

from carrywave.errors import DataError, from_system, one_line

Row = dict[str, Any]
BATCH_ROWS = 1024
PREFIX = "hf:"
FOLDER = "datasets"  # within the cache
USUAL_SPLIT = {"data.train": "train", "data.valid": "validation", "data.test": "test"}


def is_dataset(value: Any) -> bool:
    """True for a Dataset, or an IterableDataset, of Hugging Face's library."""
    return type(value).__module__.partition(".")[0] == "datasets" and hasattr(value, "features") and hasattr(value, "with_format")


def tables_of(dataset: Any) -> Iterator[Any]:
    """Yield the rows as Arrow tables, in order, with class labels as names."""
    for batch in dataset.with_format("arrow").iter(batch_size=BATCH_ROWS):
        table = pa.table(batch)
        for name, feature in (dataset.features or {}).items():
            if name in table.column_names and (named := _named(table[name].combine_chunks(), feature)) is not None:
                table = table.set_column(table.column_names.index(name), name, named)
        yield table


def _named(column: Any, feature: Any) -> Any | None:
    """Class labels, or lists of them, as names; None for any other column. A negative label is a missing one."""
    inner = getattr(feature, "feature", None)
    if hasattr(inner, "int2str") and (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        lists = pa.ListArray if pa.types.is_list(column.type) else pa.LargeListArray
        return lists.from_arrays(column.offsets, _named(column.values, inner), mask=column.is_null() if column.null_count else None)
    if not hasattr(feature, "int2str"):
        return None
    codes = pc.if_else(pc.less(column, 0), pa.scalar(None, column.type), column)
    return pa.array(feature.names, pa.string()).take(codes)


@dataclass(frozen=True)
class DatasetRows:
    """The rows of a dataset."""

    name: str
    dataset: Any
    join: bool = True

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        number = 0
        for table in tables_of(self.dataset):
            for row in table.to_pylist():
                yield number, row
                number += 1

    def count(self) -> int:
        """Return the number of rows; a streamed dataset is read to its end for it."""
        return len(self.dataset) if hasattr(self.dataset, "__len__") else sum(table.num_rows for table in tables_of(self.dataset))

    def where(self, number: int) -> str:
        """Return part and row number."""
        return f"{self.name} item {number}"

    def key(self) -> str:
        """A hash that changes with the rows: the library's own, or of a streamed dataset the hash of all that it holds."""
        fingerprint = getattr(self.dataset, "_fingerprint", None)
        if hasattr(self.dataset, "__len__") and isinstance(fingerprint, str):
            return f"{fingerprint} {len(self.dataset)}"
        digest = hashlib.sha256()
        for _, row in self:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()


def table_of(dataset: Any) -> Any:
    """All rows as one Arrow table: for series, which are read as a whole."""
    return pa.concat_tables(list(tables_of(dataset)))


def is_name(name: str) -> bool:
    """True if a name in a spec is that of a dataset."""
    return name.startswith(PREFIX)


def fetch(name: str, field: str, cache: Path) -> Path:
    """The Parquet file in the cache with the rows of a dataset, written now if it is not there; `field` is its key in the spec."""
    dataset = _load(name, field)
    key = hashlib.sha256(json.dumps([DatasetRows(name, dataset).key()]).encode()).hexdigest()[:32]
    place = cache / FOLDER / f"{key}.parquet"
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        _write(dataset, name, place)
    return place


def _load(name: str, field: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{field}={name} needs the package datasets; install it with: pip install 'carrywave[datasets]'") from error
    rest, _, split = name.removeprefix(PREFIX).partition("#")
    where, _, config = (rest, "", "") if Path(os.path.expanduser(rest)).exists() else rest.partition("@")
    path = Path(os.path.expanduser(where))
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path) if path.exists() else where, config or None)
    except Exception as error:  # whatever the library raises: files that are missing, or an address that cannot be reached
        raise DataError(f"{field}={name} cannot be loaded ({one_line(error)}); use {PREFIX}FOLDER or {PREFIX}NAME@CONFIG#SPLIT") from error
    if not isinstance(loaded, dict):
        if split:
            raise DataError(f"{field}={name} has no splits; remove #{split}")
        return loaded
    split = split or USUAL_SPLIT.get(field, "")
    if split not in loaded:
        problem = f"has no split {split}" if split else "has several splits"
        raise DataError(f"{field}={name} {problem}; name one: {', '.join(f'{PREFIX}{rest}#{each}' for each in loaded)}")
    return loaded[split]


def _write(dataset: Any, name: str, place: Path) -> None:
    """Write a file as a whole or not at all; another process that writes the same one does no harm."""
    handle, draft = tempfile.mkstemp(prefix=".draft-", dir=place.parent)
    os.close(handle)
    writer: Any = None
    try:
        for table in tables_of(dataset):
            writer = writer or pa_parquet.ParquetWriter(draft, table.schema.remove_metadata())
            writer.write_table(table.replace_schema_metadata(None).cast(writer.schema))
        if writer is None:
            raise DataError(f"{name} is empty; use a dataset with at least one row")
        writer.close()
        os.replace(draft, place)
    except OSError as error:
        raise from_system(error, DataError)(
            f"{name} cannot be written to the cache {place.parent} ({error.strerror}); set data.cache to another folder"
        ) from error
    finally:
        with suppress(OSError):
            os.unlink(draft)
