"""Prepares data: reads, splits and caches the files that a spec names, or objects of Python; or reads one more part with a run's codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from carrywave.data import examples, holdout
from carrywave.data.codec import Codec
from carrywave.data.files import cache, hashes
from carrywave.data.files.cache import Entry
from carrywave.data.files.label_sets import NONE
from carrywave.data.formats.recognised import NamedRows
from carrywave.data.inputs import Input, file_of
from carrywave.data.sequences import Ints, Sequences
from carrywave.data.tables import series, step_series
from carrywave.data.tables.table import Table
from carrywave.data.text import token_stream
from carrywave.data.text.documents import BLANK_LINE, ROW
from carrywave.data.text.tally import Tally
from carrywave.errors import DataError, SpecError
from carrywave.spec.defaults import AUTO, with_spans
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec

PARTS = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}


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


def _silent(_: str) -> None:
    """Discard a note."""


def prepare(spec: Spec, *, codec: Codec | None = None, note: Callable[[str], None] = _silent) -> Prepared:
    """Read everything the spec names, or load it from the cache; with `codec`, read it as the data of another run was read."""
    check_codec(codec, spec)
    if spec.data.train is None:
        raise SpecError("data.train is not set; set it to a file to train on")
    inputs = _inputs(spec)
    place = cache.folder(spec.data.cache)
    key = _key(inputs, spec, codec)

    def built() -> Entry:
        note(f"reading {', '.join(each.name for each in inputs.values())} into the cache {place / key}")
        return build(inputs, spec, codec)

    return bundle(cache.fetch(place, key, built), note)


def from_python(data: Any, spec: Spec, *, codec: Codec | None = None) -> Prepared:
    """Prepare data for training. `data` is train, or a dict of train, valid and test; each part may be

    - a Path, or a string that names a file (see `file_of`): all parts must then be files;
    - a text (language); an array or tensor of tokens, one stream or [sequences, steps]; a list of sequences of any length;
    - a pair (inputs, targets), or (inputs, targets, weights); a list of such pairs, or of dicts with the fields of a JSON line;
    - a frame (pandas, polars, Arrow): series for forecasting, else rows with the fields of a JSON line;
    - a map-style Dataset of dicts or pairs; a Dataset of Hugging Face's library, streamed or not;
    - an array [rows, columns], or a list of them, for forecasting.

    With `codec`, it is read as the data of another run was read.
    """
    check_codec(codec, spec)
    by_part = _by_part(data)
    named = naming(data, spec)
    if named.data.train is not None:
        return prepare(named, codec=codec)
    inputs = {part: Input(part, spec, data=value) for part, value in by_part.items()}
    return bundle(build(inputs, spec, codec).fingerprinted())


def naming(data: Any, spec: Spec) -> Spec:
    """Return the spec with the files that `data` names in place of its own, or with `data.train` None if `data` holds objects.

    Beside a file to train on, the spec's own `data.valid` and `data.test` stay; beside objects they are refused unless replaced there.
    """
    by_part = _by_part(data)
    files = {part: file for part, value in by_part.items() if (file := file_of(value, spec)) is not None}
    if files and len(files) < len(by_part):
        raise DataError(f"data mixes files ({', '.join(files)}) and objects; pass all parts as files or all as objects")
    from_spec = {part: file for part in ("valid", "test") if part not in by_part and (file := getattr(spec.data, part)) is not None}
    if from_spec and not files:
        fact = " and ".join(f"data.{part}" for part in from_spec)
        wanted = ", ".join(f"'{part}': …" for part in ("train", "valid", "test") if part in from_spec or part in by_part)
        raise SpecError(f"the spec names {fact}, but the data was passed as an object, not as a file; pass {{{wanted}}}, or remove {fact}")
    named = {"train": None, "valid": None, "test": None, **from_spec, **files}
    return spec.model_copy(update={"data": spec.data.model_copy(update=named)})


def _by_part(data: Any) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        return {"train": data}
    unknown = [name for name in data if name not in PARTS]
    if unknown or "train" not in data:
        raise DataError(f"data is a dict with keys {', '.join(map(str, data)) or 'none'}; use train and, optionally, valid and test")
    return {PARTS[name]: value for name, value in data.items() if value is not None}


def read_python(data: Any, codec: Codec, spec: Spec, *, labelled: bool = True, part: str = "data") -> Sequences:
    """Read one more part, a file or an object, with the codec of a run; if not `labelled`, labels may be missing and are not read."""
    return encode(Input.of(data, spec, part), codec, spec, labelled=labelled, part=part)


def series_of(data: Any, codec: Codec | None, spec: Spec, *, labelled: bool = False) -> Table:
    """Return the series in a file or an object, in their original units; if `labelled`, with the weights of targets."""
    return Input.of(data, spec).table(codec, labelled=labelled)


def _inputs(spec: Spec) -> dict[str, Input]:
    """The files of the parts that the spec names."""
    names = {"train": spec.data.train, "valid": spec.data.valid, "test": spec.data.test}
    return {part: Input.of(name, spec, part, f"data.{part}") for part, name in names.items() if name is not None}


def digests_of(spec: Spec) -> dict[str, tuple[str, str]]:
    """The name and the SHA-256 of each data file that the spec names, by its key in the spec; with files of labels beside it."""
    found = {}
    for part, each in _inputs(spec).items():
        digests = [hashes.sha256(path) for path in each.files] or [cache.key_of(each.name)]
        found[f"data.{part}"] = each.name, digests[0] if len(digests) == 1 else cache.key_of(digests)
    return found


def _key(inputs: Mapping[str, Input], spec: Spec, codec: Codec | None) -> str:
    """Return a hash of what identifies the parts of the data and of every option that may affect how they are read."""
    files = {part: [(str(path.absolute()), hashes.signs_of(path)) for path in each.files] for part, each in inputs.items()}
    left_open = spec.model.crf == AUTO
    spec = with_spans(spec, spans=True)  # the labels decide whether
    data = spec.data.model_dump(mode="json", exclude={"train", "valid", "test", "cache"})
    model = [left_open, spec.model.characters > 0, spec.model.dropout_rare > 0, spec.streams, spec.steps, spec.past_steps]
    return cache.key_of([files, None if codec is None else codec.to_json(), spec.task, spec.train.seed, model, data])


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


def build(inputs: Mapping[str, Input], spec: Spec, codec: Codec | None) -> Entry:
    """Read all parts: those that are given, and valid, which is held out of train if it is not; without a codec, learn it."""
    if spec.reads_series:
        how = step_series.build if spec.each_step else series.build
        entry = how(inputs["train"].table(codec), spec, codec=codec, files=inputs.keys())
        others = {part: encode(each, entry.codec, spec, part=part) for part, each in inputs.items() if part != "train"}
        told = [*entry.notes, *(line for data in others.values() for line in data.notes)]
        return replace(entry, parts=entry.parts | others, notes=tuple(dict.fromkeys(told)))
    train, share = inputs["train"], 0.0 if "valid" in inputs else spec.data.share
    rows, held, notes = None, np.zeros(0, np.bool_), list[str]()
    if train.stream is not None:
        codec = codec or token_stream.learn_stream(train.stream, spec.data, spec.task, keep_rare=spec.model.dropout_rare > 0)
    else:
        rows = train.rows(codec, labelled=True)
        held = holdout.held_out(len(rows) if share else 0, share, spec.train.seed)
        codec = codec or examples.learn(rows, spec, held)
        notes = list(rows.notes)
        if codec.kind == "int" and codec.task != "language" and not rows.join:  # which is how many counts and measurements look
            how_to = "to read them as numbers, pass floats, as in x.astype(float)"
            notes.insert(0, f"{train.name}: whole numbers are read as tokens, {codec.size - 1:,} different ones at most; {how_to}")
    parts: dict[str, Sequences] = {}
    for part, each in inputs.items():
        parts[part] = encode(each, codec, spec, part=part, rows=rows if part == "train" else None)
        notes += [*(() if each.stream is None else each.stream.notes()), *parts[part].notes]
    valid: Sequences | None = None
    if share and spec.task == "language" and spec.streams and len(parts["train"]) == 1:
        parts["train"], valid = holdout.split_tail(parts["train"], share, train.name)
    elif held.any():
        parts["train"], valid = holdout.pick(parts["train"], ~held), holdout.pick(parts["train"], held)
    parts |= {} if valid is None else {"valid": valid}
    return Entry(parts, codec, tuple(dict.fromkeys(notes)))


def encode(
    given: Input, codec: Codec, spec: Spec, *, labelled: bool = True, part: str = "data", rows: NamedRows | None = None
) -> Sequences:
    """Read one part with a codec; if not `labelled`, labels may be missing and are not read. `rows` are those of the part, if it was opened
    before.
    """
    if spec.reads_series:
        how = step_series.read if spec.each_step else series.read
        read = how(given.table(codec, labelled=labelled), codec, spec, part=part, labelled=labelled)
        check_weights(part, read)
        return read
    if (stream := given.stream) is not None:
        tally = Tally()
        tokens = token_stream.encode_stream(stream, codec, tally)
        if len(tokens) < holdout.LEAST_TOKENS and labelled:
            raise DataError(f"{stream.name} has {len(tokens)} token, but a language model needs 2 to have a target; add more text")
        if spec.data.reset == ROW:
            raise SpecError(f"data.reset={ROW}, but {stream.name} is text without rows; set it to a token, or to {BLANK_LINE!r}")
        notes = tuple(tally.lines(part, train=part == "train"))
        return Sequences(tokens, np.array([0], np.int64), np.array([len(tokens)], np.int64), notes=notes)
    rows = rows or given.rows(codec, labelled=labelled)
    join = spec.task == "language" and spec.streams and rows.join
    read = examples.encode(rows, codec, labelled=labelled, join=join, documents=spec.data.reset == ROW, part=part)
    check_weights(part, read)
    return read
