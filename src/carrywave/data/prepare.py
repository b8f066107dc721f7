"""Prepare the data a spec names: find, read, split and cache its files; or read one more file with the codec of a run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from carrywave.data import examples, holdout, overlap
from carrywave.data.codec import Codec
from carrywave.data.files import cache, hashes, hub_datasets
from carrywave.data.files.arrays import MemoryAppender, NewArray
from carrywave.data.files.frame_file import read_frame
from carrywave.data.files.label_sets import NONE
from carrywave.data.files.rows import json_rows
from carrywave.data.files.source import Source, find
from carrywave.data.formats.opening import labels_beside, open_rows
from carrywave.data.formats.recognised import NOTHING, Known, NamedRows
from carrywave.data.formats.series_formats import tsf
from carrywave.data.sequences import Ints, Sequences
from carrywave.data.steps import series_source, step_series
from carrywave.data.tables import series
from carrywave.data.tables.choice import ColumnChoice
from carrywave.data.tables.table import Table, arrange
from carrywave.data.text import token_stream
from carrywave.data.text.documents import BLANK_LINE, ROW
from carrywave.data.text.tally import Tally
from carrywave.errors import DataError, SpecError
from carrywave.spec.defaults import AUTO, with_spans
from carrywave.spec.facts import DataFacts
from carrywave.spec.idle_keys import BUILTIN, BYTES, DATASET
from carrywave.spec.spec import Spec

IS_TSF = re.compile(r"(?im)^@attribute\s[^@]*(?s:.)*^@data\s*$")
SMALL_BYTES = 16 << 20  # a file to predict from is read into memory up to this size, so that nothing is written to the cache
HASHES = "hashes"  # the folder of hashes of data files, within the cache folder
READING = (
    "encoding",
    "separator",
    "decimal",
    "read",
    "text",
    "label",
    "tokens",
    "vocabulary",
    "min_count",
    "share",
    "split",
    "columns",
    "targets",
    "time",
    "series",
    "known",
    "calendar",
    "categorical",
    "static",
    "missing",
    "repeats",
    "frequency",
    "horizon",
    "season",
    "context",
    "standardize",
)
# As READING, but left out where they have their default: keys of older versions stay.
READING_LATER = (
    "channels",
    "transform",
    "scale",
    "multi_label",
    "reset",
    "weight",
    "lowercase",
    "word_length",
    "distribution",
    "each_step",
    "warmup",
)
LABELLED = ("classification", "tagging", "regression", "transcription")


@dataclass(frozen=True)
class Prepared:
    """Data ready for training."""

    train: Sequences
    valid: Sequences | None
    test: Sequences | None
    codec: Codec
    facts: DataFacts
    fingerprint: str  # hash of the files' content and of how they are read
    notes: tuple[str, ...] = ()  # remarks for the user about how the data was read
    files: Mapping[str, str] = field(default_factory=dict)  # the SHA-256 of each part's file, for parts that are files
    about: Mapping[str, Any] = field(default_factory=dict)  # how a table of series was read, for programs
    formats: frozenset[str] = frozenset()  # of the files; none if the data was passed as objects


def _silent(_: str) -> None:
    """Discard a note."""


def prepare(spec: Spec, *, codec: Codec | None = None, note: Callable[[str], None] = _silent) -> Prepared:
    """Read everything the spec names, or load it from the cache; with `codec`, read it as the data of another run was read."""
    check_codec(codec, spec)
    if spec.data.train is None:
        raise SpecError("data.train is not set; set it to a file to train on")
    sources = _sources(spec)
    for source in sources.values():
        _check_format(source, spec)
    place = cache.folder(spec.data.cache)
    before = _signs(sources.values())
    files = _digests(sources, place, spec)
    key = _key(spec, sources, files, codec)

    def build(new: NewArray) -> cache.Entry:
        note(f"reading {', '.join(source.name for source in sources.values())} into the cache {cache.place_of(place, key)}")
        entry = _build(spec, sources, new, codec)
        _check_steady(sources.values(), before)
        return entry

    entry = cache.fetch(place, key, build)
    file_digests = {part: digest for part, digest in files.items() if sources[part].path is not None}
    return replace(bundle(entry, key, note), files=file_digests, formats=frozenset(_how_read(source, spec) for source in sources.values()))


def digests_of(spec: Spec) -> dict[str, tuple[str, str]]:
    """The name and the SHA-256 of each data file that the spec names, by its key in the spec."""
    sources = _sources(spec)
    digests = _digests(sources, cache.folder(spec.data.cache), spec)
    return {f"data.{part}": (source.name, digests[part]) for part, source in sources.items()}


def _sources(spec: Spec) -> dict[str, Source]:
    """The files of the parts that the spec names."""
    names = {"train": spec.data.train, "valid": spec.data.valid, "test": spec.data.test}
    place = cache.folder(spec.data.cache)
    return {part: _find(name, f"data.{part}", spec, place) for part, name in names.items() if name is not None}


def _find(name: str, field: str, spec: Spec, place: Path) -> Source:
    """The file of a name, read as the spec says."""
    data = spec.data
    bytewise = _reads_bytes(spec)
    return find(name, field=field, format=data.format, any_bytes=bytewise, cache=place, encoding=data.encoding)


def _digests(sources: Mapping[str, Source], place: Path | None, spec: Spec) -> dict[str, str]:
    """The SHA-256 of each file, with that of a file of labels beside it; of files that were hashed before and have not changed since, from
    the cache folder, if there is one.
    """
    with nullcontext() if place is None else hashes.remembering(place / HASHES):
        digests = {}
        for part, source in sources.items():
            beside = [hashes.sha256(path) for path in labels_beside(source, spec)]
            digests[part] = _hash([source.digest(), *beside]) if beside else source.digest()
        return digests


def _signs(sources: Iterable[Source]) -> list[tuple[int, ...]]:
    """What changes whenever a file does: its size and times."""
    found = [source.path.stat() for source in sources if source.path is not None]
    return [(each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in found]


def _check_steady(sources: Iterable[Source], before: list[tuple[int, ...]]) -> None:
    """Refuse a file that changed while it was read: what was read is not what its hash stands for, in the cache and on other hosts."""
    names = ", ".join(source.name for source in sources)
    if _signs(sources) != before:
        raise DataError(f"{names} changed while it was read; wait until it is complete, then try again")


def bundle(entry: cache.Entry, fingerprint: str, note: Callable[[str], None]) -> Prepared:
    """Combine the parts with their codec and facts; each part's fingerprint identifies the data and the part."""
    if "valid" not in entry.parts:
        note("no data is held out for validation")
    for part, value in entry.parts.items():
        if len(value) and not value.counted:
            raise DataError(
                f"{part}: the weight of every row in it is 0, so nothing could be learned or measured; change weights, or its rows"
            )
    marked = {
        part: replace(value, firsts=_firsts(entry.parts["train"], value), fingerprint=f"{fingerprint}:{part}")
        for part, value in entry.parts.items()
    }
    facts = entry.codec.facts(marked["train"])
    return Prepared(
        marked["train"], marked.get("valid"), marked.get("test"), entry.codec, facts, fingerprint, entry.notes, about=entry.about
    )


def _firsts(train: Sequences, part: Sequences) -> Ints | None:
    """The first row of each series of a part that begins within them, after rows of train; of a series that train leaves out, its first row
    in the part.
    """
    if part.warm is None or train.names is None or part.names is None or not np.shares_memory(part.inputs, train.inputs):
        return None
    starts = dict(zip(train.names, train.starts.tolist(), strict=True))
    return np.array([starts.get(name, start) for name, start in zip(part.names, part.starts.tolist(), strict=True)], np.int64)


def read(path: str, codec: Codec, spec: Spec, *, labelled: bool = True, part: str = "data") -> Sequences:
    """Read one more file with the codec of a run; if not `labelled`, labels may be missing and are not read."""
    place = cache.folder(spec.data.cache)
    source = _find(str(path), part, spec, place)
    _check_format(source, spec)
    small = source.path is None or source.path.stat().st_size <= SMALL_BYTES
    before = _signs([source])
    files = _digests({part: source}, None if small else place, spec)

    def build(new: NewArray) -> cache.Entry:
        sequences = _encode(source, codec, spec, new, labelled=labelled, part=part)
        _check_steady([source], before)
        return cache.Entry({part: sequences}, codec, sequences.notes)

    file = [files[part], source.format]
    how = _reading(spec)
    key = _hash(["read", cache.FORMAT, file, codec.to_json(), spec.streams, how, labelled, part])
    entry = build(MemoryAppender) if small else cache.fetch(place, key, build)
    return replace(entry.parts[part], notes=entry.notes, fingerprint=f"{key}:{part}")


def rows_of_file(path: str, spec: Spec, codec: Codec | None, *, part: str = "data") -> NamedRows:
    """Return the rows of a file to predict from, whose labels may be missing."""
    source = _find(path, part, spec, cache.folder(spec.data.cache))
    _check_format(source, spec)
    return open_rows(source, spec, labelled=False, known=told_by(codec))


def table_of_file(path: str, codec: Codec | None, spec: Spec, *, labelled: bool = True) -> Table:
    """Return the series in a file, in their original units; read as the spec says or, given a codec, as the training data was. If not
    `labelled`, without the weights of targets.
    """
    place = cache.folder(spec.data.cache)
    return _table_opener(_find(str(path), "data", spec, place), spec, labelled=labelled)(codec)


def check_codec(codec: Codec | None, spec: Spec) -> None:
    """Reject the codec of another task."""
    if codec is not None and codec.task != spec.task:
        raise DataError(f"task={spec.task}, but the codec is for {codec.task}; start from a run of the same task")
    if codec is not None and spec.each_step != bool(codec.step_targets):
        other = str(not spec.each_step).lower()
        raise DataError(f"data.each_step={str(spec.each_step).lower()}, but the codec is of a run with {other}; set it alike")
    if codec is not None and spec.data.multi_label != (codec.label_sets != NONE):
        other = str(not spec.data.multi_label).lower()
        raise DataError(f"data.multi_label={str(spec.data.multi_label).lower()}, but the codec is of a run with {other}; set it alike")


def _reads_bytes(spec: Spec) -> bool:
    """True if a file of text is read as raw bytes, whatever it contains."""
    return spec.task == "language" and spec.data.tokens == "byte" and spec.streams


def _how_read(source: Source, spec: Spec) -> str:
    """The format of a file, as far as keys about files act on it."""
    if source.path is None:
        return BUILTIN
    if hub_datasets.is_name(source.name):
        return DATASET
    return BYTES if source.format == "text" and _reads_bytes(spec) else source.format


def told_by(codec: Codec | None) -> Known:
    """What a codec tells of the columns and labels of other data."""
    return NOTHING if codec is None else Known(codec.text_column, codec.label_column, codec.labels)


def _check_format(source: Source, spec: Spec) -> None:
    if source.format == "text" and spec.data.weight is not None and spec.task == "language":
        raise DataError(
            f"{source.name} is read as plain text, which has no field {spec.data.weight} (data.weight); use .jsonl, or remove it"
        )


def _key(spec: Spec, sources: dict[str, Source], files: Mapping[str, str], codec: Codec | None) -> str:
    """Return a hash of the files and of every option that affects the result."""
    parts = {part: [files[part], source.format] for part, source in sources.items()}
    return key_of(parts, spec, codec)


def key_of(parts: Mapping[str, Any], spec: Spec, codec: Codec | None) -> str:
    """Return a hash of what identifies the parts of the data and of every option that affects the result."""
    data = spec.data
    keyed = "valid" not in parts and data.share > 0 and (spec.task in LABELLED or not spec.streams)
    options = {
        "format": cache.FORMAT,
        "files": dict(parts),
        "codec": None if codec is None else codec.to_json(),
        "task": spec.task,
        "streams": spec.streams,
        "seed": spec.train.seed if keyed else None,
        "window": spec.steps if spec.reads_series else None,
        "data": _reading(spec),
    }
    return _hash(options)


def _reading(spec: Spec) -> dict[str, Any]:
    """The options that affect how data is read: those of its section, whether the model reads the characters of words and how it learns of
    rare ones; all these by the labels, if model.crf is left open. Numbers were once scaled by targets of weight 0 as well.
    """
    spans = {"spans": True} if spec.model.crf == AUTO else {}
    spec = with_spans(spec, spans=True)
    later = {name for name in READING_LATER if getattr(spec.data, name) != type(spec.data).model_fields[name].default}
    spelled = {} if spec.model.characters == "none" else {"characters": True}
    scaled = {"weightless": True} if spec.task == "regression" else {}
    rare = {"rare": True} if spec.model.dropout_rare else {}
    return spec.data.model_dump(mode="json", include={*READING, *later}) | spelled | scaled | rare | spans


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _build(spec: Spec, sources: dict[str, Source], new: NewArray, codec: Codec | None) -> cache.Entry:
    if spec.task == "forecasting":
        return series.build({part: _table_opener(source, spec) for part, source in sources.items()}, spec, new, codec=codec)
    if spec.each_step:
        return step_series.build({part: _series_source(source, spec) for part, source in sources.items()}, spec, new, codec=codec)
    train, share = sources["train"], 0.0 if "valid" in sources else spec.data.share
    notes: tuple[str, ...] = ()
    if _is_stream(train, spec):
        codec = codec or token_stream.learn_stream(train, spec.data, spec.task, keep_rare=spec.model.dropout_rare > 0)
        held = np.zeros(0, np.bool_)
    else:
        rows = open_rows(train, spec, known=told_by(codec))
        held = holdout.held_out(rows.count() if share else 0, share, spec.train.seed)
        codec = codec or examples.learn(rows, spec, held)
        notes = rows.notes()
    notes = (*(line for source in sources.values() for line in source.notes()), *notes)
    encoded = {part: _encode(source, codec, spec, new, labelled=True, part=part) for part, source in sources.items()}
    parts = hold_out(encoded, spec, share, held, train.name)
    notes = (*dict.fromkeys(notes), *(line for each in encoded.values() for line in each.notes), *overlap.notes(parts, sources))
    return cache.Entry(parts, codec, notes)


def hold_out(encoded: dict[str, Sequences], spec: Spec, share: float, held: examples.Held, name: str) -> dict[str, Sequences]:
    """Take valid from train if `valid` is missing: the end of a stream, or the rows marked in `held`."""
    valid: Sequences | None = None
    if share and spec.task == "language" and spec.streams and len(encoded["train"]) == 1:
        train, valid = holdout.split_tail(encoded["train"], share, name)
    else:
        train, valid = holdout.split_keyed(encoded["train"], held)
    return {**encoded, "train": train} if valid is None else {**encoded, "train": train, "valid": valid}


def _is_stream(source: Source, spec: Spec) -> bool:
    return spec.task == "language" and spec.streams and source.format == "text"


def _encode(source: Source, codec: Codec, spec: Spec, new: NewArray, *, labelled: bool, part: str) -> Sequences:
    """Encode a whole file with a codec."""
    if spec.task == "forecasting":
        return series.read(_table_opener(source, spec, labelled=labelled)(codec), codec, spec, new, part=part, labelled=labelled)
    if spec.each_step:
        return step_series.read(_series_source(source, spec), codec, spec, new, part=part, labelled=labelled)
    if _is_stream(source, spec):
        tally = Tally()
        tokens = token_stream.encode_stream(source, codec, new, tally)
        if len(tokens) < holdout.LEAST_TOKENS and labelled:
            raise DataError(f"{source.name} has {len(tokens)} token, but a language model needs 2 to have a target; add more text")
        if spec.data.reset == ROW:
            raise SpecError(f"data.reset={ROW}, but {source.name} is text without rows; set it to a token, or to {BLANK_LINE!r}")
        notes = tuple(tally.lines(part, train=part == "train"))
        return Sequences(tokens, np.array([0], np.int64), np.array([len(tokens)], np.int64), notes=notes)
    rows = open_rows(source, spec, labelled=labelled, known=told_by(codec))
    join = spec.task == "language" and spec.streams and rows.join
    return examples.encode(rows, codec, new, labelled=labelled, join=join, documents=spec.data.reset == ROW, part=part)


def _series_source(source: Source, spec: Spec) -> series_source.SeriesSource:
    """The series of a file in which every step has targets."""
    if source.format == "jsonl" and holds_steps(source):
        return series_source.of_rows(lambda labelled: open_rows(source, spec, labelled=labelled), spec.data)
    return series_source.of_frame(lambda: _frame(source, spec), source.name, spec.data)


def holds_steps(source: Source) -> bool:
    """True if the objects of a JSON file hold a series each, rather than the values of one time."""
    return '"steps"' in next(iter(source.texts()), "")


def series_of_file(path: str, spec: Spec) -> series_source.SeriesSource:
    """The series of a file whose steps are estimated."""
    source = _find(path, "data", spec, cache.folder(spec.data.cache))
    _check_format(source, spec)
    return _series_source(source, spec)


def _table_opener(source: Source, spec: Spec, *, labelled: bool = True) -> Callable[[Codec | None], Table]:
    """Return a function that reads a table as the spec says or, given a codec, as the training data was read."""

    def open_table(codec: Codec | None) -> Table:
        choice = ColumnChoice.of(spec.data, codec, labelled=labelled)
        if source.format == "jsonl" and holds_steps(source):
            return series.choose_columns(series.from_rows(json_rows(source), choice.weight), choice)
        frame, notes = _frame(source, spec)
        return arrange(frame, source.name, choice, notes=notes)

    return open_table


def _frame(source: Source, spec: Spec) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The table in a file; a text that is no table may be one of the Monash archive."""
    if source.format == "text" and (text := "".join(source.texts())) and IS_TSF.search(text):
        return tsf(text), source.notes()
    return read_frame(source, spec.data)
