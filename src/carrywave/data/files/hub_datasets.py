"""Datasets of Hugging Face's library: given as objects, or named in a spec as `hf:NAME@CONFIG#SPLIT`.

They are read in batches of Arrow tables, never as a whole. A name is written to one Parquet file in the cache, and from there on it is a
file like any other. Class labels are read by their names. The library is imported only for names.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pa_parquet

from carrywave.errors import DataError, from_system, one_line

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


def is_name(name: str) -> bool:
    """True if a name in a spec is that of a dataset."""
    return name.startswith(PREFIX)


def fetch(name: str, field: str, cache: Path) -> Path:
    """The Parquet file in the cache with the rows of a dataset, written now if it is not there; `field` is its key in the spec."""
    dataset = _load(name, field)
    if not len(dataset):
        raise DataError(f"{name} is empty; use a dataset with at least one row")
    key = hashlib.sha256(f"{dataset._fingerprint} {len(dataset)}".encode()).hexdigest()[:32]
    place = cache / FOLDER / f"{key}.parquet"
    draft = place.with_name(f".draft-{os.getpid()}-{place.name}")
    try:
        if not place.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            pa_parquet.write_table(pa.concat_tables(table.replace_schema_metadata(None) for table in tables_of(dataset)), draft)
            draft.replace(place)
    except OSError as error:
        fact = f"{name} cannot be written to the cache {place.parent} ({error.strerror})"
        raise from_system(error, DataError)(f"{fact}; set data.cache to another folder") from error
    finally:
        draft.unlink(missing_ok=True)
    return place


def _load(name: str, field: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{field}={name} needs the package datasets; install it with: pip install 'carrywave[datasets]'") from error
    rest, _, split = name.removeprefix(PREFIX).partition("#")
    path = Path(os.path.expanduser(rest))
    try:
        saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
        where, _, config = (str(path), "", "") if path.exists() else rest.partition("@")
        loaded = datasets.load_from_disk(where) if saved else datasets.load_dataset(where, config or None)
    except Exception as error:  # whatever the library raises: files that are missing, or an address that cannot be reached
        raise DataError(f"{field}={name} cannot be loaded ({one_line(error)}); use {PREFIX}FOLDER or {PREFIX}NAME@CONFIG#SPLIT") from error
    if not isinstance(loaded, dict):
        loaded = {"": loaded}
    wanted = split or ("" if "" in loaded else USUAL_SPLIT.get(field, ""))
    if wanted not in loaded:
        names = ", ".join(f"{PREFIX}{rest}#{each}" if each else f"{PREFIX}{rest}" for each in loaded)
        raise DataError(f"{field}={name} has no split {wanted}; name one: {names}")
    return loaded[wanted]
