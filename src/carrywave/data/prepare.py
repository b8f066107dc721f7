"""Prepare the data a spec names: find, read, split and cache its files; or read one more file with the codec of a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd

from carrywave.data import examples, holdout, overlap
from carrywave.data.codec import Codec
from carrywave.data.files import cache, hashes
from carrywave.data.files.arrays import NewArray
from carrywave.data.files.cache import Entry
from carrywave.data.files.frame_file import read_frame
from carrywave.data.files.label_sets import NONE
from carrywave.data.files.source import Source, find
from carrywave.data.formats.opening import labels_beside, open_rows
from carrywave.data.formats.recognised import NOTHING, Known, NamedRows
from carrywave.data.formats.series_formats import tsf
from carrywave.data.sequences import Ints, Sequences
from carrywave.data.tables import series, step_series
from carrywave.data.tables.series_rows import choice_of, table_of_rows
from carrywave.data.tables.table import Open, Table, arrange
from carrywave.data.text import token_stream
from carrywave.data.text.documents import BLANK_LINE, ROW
from carrywave.data.text.tally import Tally
from carrywave.errors import DataError, SpecError
from carrywave.spec.defaults import AUTO, with_spans
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec

if TYPE_CHECKING:
    from carrywave.data.python_inputs import ObjectInput

IS_TSF = re.compile(r"(?im)^@attribute\s[^@]*(?s:.)*^@data\s*$")
Frame = tuple[pd.DataFrame, tuple[str, ...]]  # a table, and lines on how it was read


@dataclass(frozen=True)
class Prepared:
    """Data ready for training."""

    train: Sequences
    valid: Sequences | None
    test: Sequences | None
    codec: Codec
    facts: DataFacts
    fingerprint: str  # hash of what was read
    notes: tuple[str, ...] = ()  # remarks for the user about how the data was read
    about: Mapping[str, Any] = field(default_factory=dict)  # how a table of series was read, for programs


@dataclass(frozen=True)
class FileInput:
    """A file that a spec or a command names."""

    source: Source
    spec: Spec

    @staticmethod
    def of(name: str, spec: Spec, field: str) -> FileInput:
        """Find the file; `field` is the key that names it."""
        data = spec.data
        place = cache.folder(data.cache)
        source = find(name, field=field, format=data.format, any_bytes=_reads_bytes(spec), cache=place, encoding=data.encoding)
        if source.format == "text" and data.weight is not None and spec.task == "language":
            fact = f"{source.name} is read as plain text, which has no field {data.weight} (data.weight)"
            raise DataError(f"{fact}; use .jsonl, or remove it")
        return FileInput(source, spec)

    @property
    def name(self) -> str:
        """The file as the user named it."""
        return self.source.name

    @property
    def stream(self) -> Source | None:
        """The file, if its text is one stream."""
        return self.source if self.spec.task == "language" and self.spec.streams and self.source.format == "text" else None

    def rows(self, codec: Codec | None, *, labelled: bool) -> NamedRows:
        """The rows of the file."""
        return open_rows(self.source, self.spec, labelled=labelled, known=told_by(codec))

    def frame(self) -> Frame | Table | None:
        """The table in the file; a text that is no table may be one of the Monash archive."""
        source = self.source
        if source.format == "jsonl" and '"steps"' in next(iter(source.texts()), ""):
            return None
        if source.format == "text" and (text := "".join(source.texts())) and IS_TSF.search(text):
            return tsf(text), source.notes()
        return read_frame(source, self.spec.data)

    @property
    def files(self) -> list[Path]:
        """The file, and those beside it that may have its labels."""
        return [] if self.source.path is None else [self.source.path, *labels_beside(self.source, self.spec)]


Input: TypeAlias = "FileInput | ObjectInput"  # one part of the data


def _silent(_: str) -> None:
    """Discard a note."""


def prepare(spec: Spec, *, codec: Codec | None = None, note: Callable[[str], None] = _silent) -> Prepared:
    """Read everything the spec names, or load it from the cache; with `codec`, read it as the data of another run was read."""
    check_codec(codec, spec)
    if spec.data.train is None:
        raise SpecError("data.train is not set; set it to a file to train on")
    inputs = _inputs(spec)
    place = cache.folder(spec.data.cache)
    files = {part: [(str(path.absolute()), hashes.signs_of(path)) for path in each.files] for part, each in inputs.items()}
    key = key_of(files, spec, codec)

    def built(new: NewArray) -> Entry:
        note(f"reading {', '.join(each.name for each in inputs.values())} into the cache {place / key}")
        return build(inputs, spec, new, codec)

    return bundle(cache.fetch(place, key, built), note)


def _inputs(spec: Spec) -> dict[str, FileInput]:
    """The files of the parts that the spec names."""
    names = {"train": spec.data.train, "valid": spec.data.valid, "test": spec.data.test}
    return {part: FileInput.of(name, spec, f"data.{part}") for part, name in names.items() if name is not None}


def digests_of(spec: Spec) -> dict[str, tuple[str, str]]:
    """The name and the SHA-256 of each data file that the spec names, by its key in the spec; with files of labels beside it."""
    found = {}
    for part, each in _inputs(spec).items():
        digests = [each.source.digest(), *(hashes.sha256(path) for path in each.files[1:])]
        found[f"data.{part}"] = each.name, digests[0] if len(digests) == 1 else cache.key_of(digests)
    return found


def key_of(parts: Mapping[str, Any], spec: Spec, codec: Codec | None) -> str:
    """Return a hash of what identifies the parts of the data and of every option that may affect how they are read."""
    left_open = spec.model.crf == AUTO
    spec = with_spans(spec, spans=True)  # the labels decide whether
    data = spec.data.model_dump(mode="json", exclude={"train", "valid", "test", "cache"})
    model = [left_open, spec.model.characters != "none", spec.model.dropout_rare > 0, spec.streams, spec.steps, spec.past_steps]
    return cache.key_of([dict(parts), None if codec is None else codec.to_json(), spec.task, spec.train.seed, model, data])


def bundle(entry: Entry, note: Callable[[str], None] = _silent) -> Prepared:
    """Combine the parts with their codec and facts."""
    if "valid" not in entry.parts:
        note("no data is held out for validation")
    for part, value in entry.parts.items():
        check_weights(part, value)
    parts = {part: replace(value, firsts=_firsts(entry.parts["train"], value)) for part, value in entry.parts.items()}
    train, codec = parts["train"], entry.codec
    return Prepared(
        train, parts.get("valid"), parts.get("test"), codec, codec.facts(train), entry.fingerprint, entry.notes, about=entry.about
    )


def check_weights(part: str, data: Sequences) -> None:
    """Refuse a part in which the weight of every target is 0; the first rows of sequences may only warm up the carry."""
    largest = 1.0 if data.weights is None or not len(data) else float(data.weights.max())
    if data.step_weights is not None:
        starts = data.starts if data.warm is None else data.starts + data.warm
        scored = (data.step_weights[low:high] for low, high in zip(starts, data.starts + data.lengths, strict=True))
        largest = max((float(weights.max(initial=0.0)) for weights in scored), default=1.0)
    if not largest:
        raise DataError(f"{part}: every weight in it is 0, so nothing could be learned or measured; change them, or remove data.weight")


def _firsts(train: Sequences, part: Sequences) -> Ints | None:
    """The first row of each series of a part that begins within them, after rows of train; of a series that train leaves out, its first row
    in the part.
    """
    if part.warm is None or train.names is None or part.names is None or not np.shares_memory(part.inputs, train.inputs):
        return None
    starts = dict(zip(train.names, train.starts.tolist(), strict=True))
    return np.array([starts.get(name, start) for name, start in zip(part.names, part.starts.tolist(), strict=True)], np.int64)


def check_codec(codec: Codec | None, spec: Spec) -> None:
    """Reject the codec of another task."""
    if codec is None:
        return
    learned = (codec.task, bool(codec.step_targets), codec.label_sets != NONE)
    asked = {"task": spec.task, "data.each_step": spec.each_step, "data.multi_label": spec.data.multi_label}
    for (key, value), other in zip(asked.items(), learned, strict=True):
        if value != other:
            words = (str(each).lower() if isinstance(each, bool) else each for each in (value, other))
            raise DataError("{}={}, but the codec is for {}; start from a run of the same task".format(key, *words))


def _reads_bytes(spec: Spec) -> bool:
    """True if a file of text is read as raw bytes, whatever it contains."""
    return spec.task == "language" and spec.data.tokens == "byte" and spec.streams


def told_by(codec: Codec | None) -> Known:
    """What a codec tells of the columns and labels of other data."""
    return NOTHING if codec is None else Known(codec.text_column, codec.label_column, codec.labels)


def opener(given: Input) -> Open:
    """Return a function that reads the series of an input as the spec says or, given a codec, as the training data was read."""

    def open_table(codec: Codec | None, labelled: bool = True) -> Table:
        found = given.frame()
        if found is None:
            return table_of_rows(given.rows(codec, labelled=labelled), given.spec, codec, labelled=labelled)
        if isinstance(found, Table):
            return found
        frame, notes = found
        return arrange(frame, given.name, choice_of(given.spec.data, codec, given.name, labelled=labelled), notes=notes)

    return open_table


def build(inputs: Mapping[str, Input], spec: Spec, new: NewArray, codec: Codec | None) -> Entry:
    """Read all parts: those that are given, and valid, which is held out of train if it is not; without a codec, learn it."""
    if spec.reads_series:
        how = step_series.build if spec.each_step else series.build
        entry = how(opener(inputs["train"])(codec), spec, new, codec=codec, files=inputs.keys())
        others = {part: encode(each, entry.codec, spec, new, part=part) for part, each in inputs.items() if part != "train"}
        told = [*entry.notes, *(line for data in others.values() for line in data.notes)]
        return replace(entry, parts=entry.parts | others, notes=tuple(dict.fromkeys(told)))
    train, share = inputs["train"], 0.0 if "valid" in inputs else spec.data.share
    rows, held, notes = None, np.zeros(0, np.bool_), list[str]()
    if train.stream is not None:
        codec = codec or token_stream.learn_stream(train.stream, spec.data, spec.task, keep_rare=spec.model.dropout_rare > 0)
    else:
        rows = train.rows(codec, labelled=True)
        held = holdout.held_out(rows.count() if share else 0, share, spec.train.seed)
        codec = codec or examples.learn(rows, spec, held)
        notes = list(rows.notes())
        if codec.kind == "int" and codec.task != "language" and not rows.join:  # which is how many counts and measurements look
            how_to = "to read them as numbers, pass floats, as in x.astype(float)"
            notes.insert(0, f"{train.name}: whole numbers are read as tokens, {codec.size - 1:,} different ones at most; {how_to}")
    parts: dict[str, Sequences] = {}
    for part, each in inputs.items():
        parts[part] = encode(each, codec, spec, new, part=part, rows=rows if part == "train" else None)
        notes += [*(() if each.stream is None else each.stream.notes()), *parts[part].notes]
    valid: Sequences | None = None
    if share and spec.task == "language" and spec.streams and len(parts["train"]) == 1:
        parts["train"], valid = holdout.split_tail(parts["train"], share, train.name)
    elif held.any():
        parts["train"], valid = holdout.pick(parts["train"], ~held), holdout.pick(parts["train"], held)
    parts |= {} if valid is None else {"valid": valid}
    return Entry(parts, codec, (*dict.fromkeys(notes), *overlap.notes(parts)))


def encode(
    given: Input, codec: Codec, spec: Spec, new: NewArray, *, labelled: bool = True, part: str = "data", rows: NamedRows | None = None
) -> Sequences:
    """Read one part with a codec; if not `labelled`, labels may be missing and are not read. `rows` are those of the part, if it was opened
    before.
    """
    if spec.reads_series:
        how = step_series.read if spec.each_step else series.read
        read = how(opener(given)(codec, labelled), codec, spec, new, part=part, labelled=labelled)
        check_weights(part, read)
        return read
    if (stream := given.stream) is not None:
        tally = Tally()
        tokens = token_stream.encode_stream(stream, codec, new, tally)
        if len(tokens) < holdout.LEAST_TOKENS and labelled:
            raise DataError(f"{stream.name} has {len(tokens)} token, but a language model needs 2 to have a target; add more text")
        if spec.data.reset == ROW:
            raise SpecError(f"data.reset={ROW}, but {stream.name} is text without rows; set it to a token, or to {BLANK_LINE!r}")
        notes = tuple(tally.lines(part, train=part == "train"))
        return Sequences(tokens, np.array([0], np.int64), np.array([len(tokens)], np.int64), notes=notes)
    rows = rows or given.rows(codec, labelled=labelled)
    join = spec.task == "language" and spec.streams and rows.join
    read = examples.encode(rows, codec, new, labelled=labelled, join=join, documents=spec.data.reset == ROW, part=part)
    check_weights(part, read)
    return read
