"""Convert rows of fields to `Sequences` in two passes: `learn` derives a `Codec` from the training rows, `encode` applies it to any rows.

Tokens and labels are learned from the whole training file, held-out rows included, so that nothing in it is unknown; means
and standard deviations only from the rows that are trained on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec, first_unknown, unknown_token
from carrywave.data.files import fields, label_sets
from carrywave.data.files.arrays import Appender, NewArray, token_dtype
from carrywave.data.files.rows import Row, Rows
from carrywave.data.sequences import Sequences
from carrywave.data.tables.moments import Moments, own_scale, standardise
from carrywave.data.text import vocabulary
from carrywave.data.text.tokenizers import Ids, Words
from carrywave.errors import DataError, SpecError
from carrywave.spec.data_spec import DataSpec
from carrywave.spec.spec import Spec

Held = NDArray[np.bool_]
RESETS = ("language", "tagging")  # tasks in which a row may hold several sequences, each with a new state
TARGETS = {"classification": "label", "regression": "label", "tagging": "labels"}  # field that holds the target


def target_field(spec: Spec) -> str:
    """The field of a row that holds its target, or those of its steps."""
    return "labels" if spec.each_step else TARGETS.get(spec.task, "label")


@dataclasses.dataclass
class _Learned:
    """What the first pass collects besides tokens."""

    rows: Rows
    spec: Spec
    held: Held
    labels: dict[str, str] = dataclasses.field(default_factory=dict)  # name -> kind
    sets: label_sets.LabelSets = dataclasses.field(default_factory=label_sets.LabelSets)
    features: Moments = dataclasses.field(default_factory=Moments)
    targets: Moments = dataclasses.field(default_factory=Moments)
    columns: int | None = None
    outputs: int | None = None
    largest: int = -1

    def each(self) -> Iterator[tuple[int, str, Row]]:
        """Yield (index, location, row) for each row."""
        for index, (number, row) in enumerate(self.rows):
            yield index, self.rows.where(number), row

    def watch(self, index: int, where: str, row: Row) -> None:
        """Record the row's labels or target."""
        task = self.spec.task
        if self.spec.data.multi_label:
            self.sets.watch(label_sets.sets_of(row, where, steps=_count(row, where) if task == "tagging" else None), where)
        elif task == "classification":
            self._label(*fields.class_of(fields.take(row, "label", where), "label", where), where)
        elif task == "tagging":
            for label in fields.tags_of(row, _count(row, where), where):
                if label is not None:
                    self._label(*label, where)
        elif task == "regression":
            target = fields.target_of(row, where, self.outputs)
            self.outputs = len(target)
            if not self.is_held(index):
                self.targets.add(target[None])

    def _label(self, kind: str, name: str, where: str) -> None:
        other = next(iter(self.labels.values()), kind)
        if kind != other:
            raise DataError(f"{where}: label {name} is a {kind}, but earlier rows have a {other}; use one kind of label")
        self.labels[name] = kind

    def is_held(self, index: int) -> bool:
        """True if the row is held out of training."""
        return bool(index < len(self.held) and self.held[index])

    def texts(self) -> Iterator[str]:
        """Yield each row's text as it will be tokenised."""
        for index, where, row in self.each():
            self.watch(index, where, row)
            yield ended(fields.text_of(row, where), self.spec.task, self.spec.data.tokens)

    def words(self) -> Iterator[list[str]]:
        """Yield each row's list of words."""
        for index, where, row in self.each():
            self.watch(index, where, row)
            yield words_of(row, where)

    def numbers(self) -> None:
        """Scan rows whose tokens are integers."""
        for index, where, row in self.each():
            self.watch(index, where, row)
            self.largest = max(self.largest, int(ids_of(row, where).max(initial=-1)))

    def steps(self) -> None:
        """Scan rows of numeric steps."""
        for index, where, row in self.each():
            self.watch(index, where, row)
            matrix = fields.steps_of(row, where, self.columns)
            self.columns = matrix.shape[1]
            if not self.is_held(index):
                self.features.add(matrix)


def learn(rows: Rows, spec: Spec, held: Held) -> Codec:
    """Learn the codec from training rows; `held` marks the rows that are held out."""
    first = next(iter(rows), None)
    if first is None:
        raise DataError(f"{rows.name} is empty; use data with at least one row")
    where, content = rows.where(first[0]), fields.content_field(first[1], rows.where(first[0]))
    seen = _Learned(rows, spec, held)
    known: dict[str, Any] = {}
    if content == "text":
        words, bpe, size = vocabulary.learn(spec.data.tokens, seen.texts(), spec.data)
        known = {"kind": spec.data.tokens, "vocabulary": words, "bpe": bpe, "size": size}
    elif content == "tokens" and isinstance(fields.tokens_of(first[1], where), list):
        words = vocabulary.choose(vocabulary.count_words(seen.words()), spec.data, words=True)
        known = {"kind": "word", "vocabulary": words, "size": len(words)}
    elif content == "tokens":
        if spec.data.vocabulary is not None or spec.data.min_count > 1:
            raise SpecError("data.vocabulary and data.min_count do not apply to numeric tokens; remove them, or use string tokens")
        seen.numbers()
        known = {"kind": "int", "size": seen.largest + 1}
    elif spec.task == "language":
        raise DataError(f"{where}: a language model needs text or tokens, but the row has steps; use text, or task=forecasting")
    else:
        seen.steps()
        width = seen.columns or 0
        own = spec.data.standardize == "sequence"
        if not spec.data.standardize:
            seen.features.check_unscaled([f"feature {number}" for number in range(width)], rows.name)
        mean, std = seen.features.scale(wanted=spec.data.standardize is True, columns=width)
        known = {"columns": tuple(str(number) for number in range(width)), "mean": mean, "std": std, "own_scale": own}
    if spec.task == "regression":
        if not spec.data.standardize:
            seen.targets.check_unscaled([f"target {number}" for number in range(seen.outputs or 0)], rows.name)
        known["target_mean"], known["target_std"] = seen.targets.scale(wanted=bool(spec.data.standardize), columns=seen.outputs or 0)
    labels = seen.sets.labels if spec.data.multi_label else seen.labels
    if spec.data.multi_label:
        known["label_sets"] = seen.sets.form
    kind = next(iter(labels.values()), "string")  # all labels are of one kind: that has been checked
    return Codec(spec.task, content, labels=_in_order(labels, rows, spec), label_kind=kind, **known)


def _count(row: Row, where: str) -> int:
    """Return how many labels a row of tags has."""
    value = fields.as_plain(fields.take(row, "labels", where))
    return len(value) if hasattr(value, "__len__") else 0


def not_read(rows: Rows, codec: Codec, data: DataSpec) -> tuple[str, ...]:
    """Return a line that names the fields of the first row that are ignored, if any."""
    first = next(iter(rows), None)
    wanted = {codec.field: data.text, TARGETS.get(codec.task, ""): data.label}  # with the names that the data has for them
    others = [] if first is None else [str(name) for name in first[1] if name not in (*wanted, "resets")]
    if not others:
        return ()
    shown = ", ".join(others[:8]) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
    read = [name if given in (None, name) else f"{given} as {name}" for name, given in wanted.items() if name]
    return (f"{rows.name}: reading {' and '.join(read)}; ignored: {shown}",)


def _in_order(labels: dict[str, str], rows: Rows, spec: Spec) -> tuple[str, ...]:
    if spec.task in ("classification", "tagging") and not labels:
        raise DataError(f"{rows.name} has no labels; add a label to each row, or to each step for tagging")
    numeric = all(name.removeprefix("-").isdecimal() for name in labels)
    return tuple(sorted(labels, key=lambda name: (int(name), name) if numeric else (0, name)))


def ended(text: str, task: str, kind: str | None) -> str:
    """Return the text to tokenise. For words: language texts end in a line end (<eos>); in other tasks line ends are white space."""
    if kind != "word":
        return text
    flat = " ".join(text.split()) if task != "language" else text
    return flat + "\n" if task == "language" and not text.endswith("\n") else flat


def words_of(row: Row, where: str) -> list[str]:
    """Return a row's tokens, which must be words."""
    tokens = fields.tokens_of(row, where)
    if not isinstance(tokens, list):
        raise DataError(f"{where}: tokens contains numbers, but the training data contains words; use one kind of token")
    return tokens


def ids_of(row: Row, where: str) -> NDArray[np.int64]:
    """Return a row's tokens, which must be integers."""
    tokens = fields.tokens_of(row, where)
    if isinstance(tokens, list):
        if not tokens:
            return np.empty(0, np.int64)
        raise DataError(f"{where}: tokens contains words, but the training data contains numbers; use one kind of token")
    return tokens


def encode(rows: Rows, codec: Codec, new: NewArray, *, labelled: bool, join: bool, documents: bool = False) -> Sequences:
    """Encode all rows with a codec; `join` concatenates them into one sequence, in which each starts anew if they are `documents`."""
    writer = _Writer(codec, new, labelled, documents=join and documents)
    shortest = 0 if join else 2 if codec.task == "language" and labelled else 1
    count = 0
    for number, row in rows:
        where = rows.where(number)
        steps = writer.content(row, where)
        if len(steps) < shortest:
            if not len(steps):
                raise DataError(f"{where}: {codec.field} is a zero-length sequence; remove the row, or give it at least one step")
            raise DataError(
                f"{where}: the sequence has {len(steps)} token, but a language model needs 2 to have a target; extend it or remove it"
            )
        writer.add(steps, row, where)
        count += 1
    if not count:
        raise DataError(f"{rows.name} is empty; use data with at least one row")
    if join and writer.rows < (2 if labelled else 1):
        many = f"{writer.rows} token{'s' * (writer.rows != 1)}"
        raise DataError(f"{rows.name} has {many}, but a language model needs 2 to have a target; add more text")
    return writer.close(join=join)


class _Writer:
    """Appends rows to the arrays of one `Sequences`."""

    def __init__(self, codec: Codec, new: NewArray, labelled: bool, *, documents: bool = False) -> None:
        self.codec, self.rows, self.new, self.documents = codec, 0, new, documents
        self.resets: Appender | None = None  # made when a row has some
        self.inputs = new(np.float32, len(codec.columns)) if codec.kind is None else new(token_dtype(codec.size), None)
        self.starts, self.lengths = new(np.int64, None), new(np.int64, None)
        self.labels: Appender | None = None
        self.tags: Appender | None = None
        self.several = codec.label_sets != label_sets.NONE
        if labelled and self.several:
            listed = new(np.float32, len(codec.labels))
            self.labels, self.tags = (listed, None) if codec.task == "classification" else (None, listed)
        elif labelled and codec.task == "classification":
            self.labels = new(np.int64, None)
        elif labelled and codec.task == "regression":
            self.labels = new(np.float32, codec.outputs)
        elif labelled and codec.task == "tagging":
            self.tags = new(np.int64, None)

    def content(self, row: Row, where: str) -> NDArray[Any]:
        """Return a row's inputs: tokens [steps], or numbers [steps, features]."""
        codec = self.codec
        if codec.kind is None:
            # An array of whole numbers, which by itself would be tokens, is numbers where the training data had numbers.
            whole = row.get("steps") is None and isinstance(row.get("tokens"), np.ndarray)
            matrix = fields.steps_of({"steps": row["tokens"]} if whole else row, where, len(codec.columns))
            return standardise(matrix, *(own_scale(matrix) if codec.own_scale else (codec.mean, codec.std)), where)
        if codec.field == "text":
            text = ended(fields.text_of(row, where), codec.task, codec.kind)
            return self._known(codec.tokens.ids(text), where, lambda place: codec.tokens.name(text, place))
        if isinstance(codec.tokens, Words):
            words = words_of(row, where)
            return self._known(codec.tokens.word_ids(words), where, lambda place: words[place])
        ids = ids_of(row, where)
        return self._known(np.where(ids < codec.size, ids, -1).astype(np.int32), where, lambda place: str(ids[place]))

    def _known(self, ids: Ids, where: str, name: Any) -> Ids:
        unknown = first_unknown(ids)
        if unknown is None:
            return ids
        if self.codec.kind == "int":
            size = self.codec.size
            raise DataError(
                f"{where}: token {name(unknown)} is outside the training vocabulary of {size} tokens; train with it, or remove it"
            )
        raise DataError(unknown_token(name(unknown), where))

    def add(self, steps: NDArray[Any], row: Row, where: str) -> None:
        """Append one row."""
        codec = self.codec
        if self.several:
            self._add_sets(len(steps), row, where)
        elif self.tags is not None:
            tags = fields.tags_of(row, len(steps), where)
            self.tags.append(np.array([fields.IGNORED if tag is None else self._class(tag[1], where) for tag in tags], np.int64))
        elif self.labels is not None and codec.task == "classification":
            _, label = fields.class_of(fields.take(row, "label", where), "label", where)
            self.labels.append(np.array([self._class(label, where)], np.int64))
        elif self.labels is not None:
            scaled = standardise(fields.target_of(row, where, codec.outputs), codec.target_mean, codec.target_std, where)
            self.labels.append(scaled[None])
        self._add_resets(len(steps), row, where)
        self.inputs.append(steps)
        self.starts.append(np.array([self.rows], np.int64))
        self.lengths.append(np.array([len(steps)], np.int64))
        self.rows += len(steps)

    def _add_sets(self, steps: int, row: Row, where: str) -> None:
        to = self.tags if self.labels is None else self.labels
        if to is not None:
            sets = label_sets.sets_of(row, where, steps=None if to is self.labels else steps)
            to.append(label_sets.encode(sets, self.codec.label_sets, self.codec.label_numbers, where))

    def _add_resets(self, steps: int, row: Row, where: str) -> None:
        given = row.get("resets") is not None
        if given and self.codec.task not in RESETS:
            raise DataError(f"{where}: resets begin new sequences, but {self.codec.task} has one label for a row; write a row for each")
        if given and self.codec.field == "text":
            raise DataError(f"{where}: resets are for tokens and steps, and this row has text; set data.reset to what ends a document")
        found = fields.resets_of(row, steps, where)
        if self.resets is None and (found is not None or self.documents):
            self.resets = self.new(np.bool_, None)
            self.resets.append(np.zeros(self.rows, np.bool_))
        if self.resets is not None:
            found = np.zeros(steps, np.bool_) if found is None else found
            if self.documents and steps:
                found = np.concatenate(([True], found[1:]))
            self.resets.append(found)

    def _class(self, label: str, where: str) -> int:
        number = self.codec.label_numbers.get(label)
        if number is None:
            known = ", ".join(self.codec.labels[:5]) + (", …" if len(self.codec.labels) > 5 else "")
            raise DataError(
                f"{where}: label {label!r} was never seen in training (labels: {known}); add training data with it, or remove the row"
            )
        return number

    def close(self, *, join: bool) -> Sequences:
        """Finish the arrays and return the sequences."""
        starts, lengths = self.starts.close(), self.lengths.close()
        if join:
            starts, lengths = np.array([0], np.int64), np.array([self.rows], np.int64)
        labels = None if self.labels is None else self.labels.close()
        tags, resets = (None if each is None else each.close() for each in (self.tags, self.resets))
        return Sequences(self.inputs.close(), starts, lengths, labels, tags, resets)
