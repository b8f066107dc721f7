"""Convert rows of fields to `Sequences` in two passes: `learn` derives a `Codec` from the training rows, `encode` applies it to any rows.

Tokens and labels are learned from the whole training file, held-out rows included, so that nothing in it is unknown; means
and standard deviations only from the rows that are trained on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.files import fields, label_sets
from carrywave.data.files.arrays import Appender, NewArray, token_dtype
from carrywave.data.files.row_weights import Weigher
from carrywave.data.files.rows import WEIGHT, Row, Rows
from carrywave.data.formats.recognised import NamedRows
from carrywave.data.sequences import UNSEEN, UNSEEN_INSIDE, Sequences
from carrywave.data.tables.moments import Moments, own_scale, standardise
from carrywave.data.text import spelling, vocabulary
from carrywave.data.text.tally import Tally
from carrywave.data.text.tokenizers import Words, split_words
from carrywave.errors import DataError, SpecError
from carrywave.spec.spec import Spec

Held = NDArray[np.bool_]
INSIDE = ("I-", "E-", "M-", "L-")  # how labels begin that go on with a span
RESETS = ("language", "tagging")  # tasks in which a row may hold several sequences, each with a new state


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
    text_labels: bool | None = None  # of transcriptions: whether they are texts
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
            self._label(*fields.class_of(fields.take(row, "label", where), "label", where))
        elif task == "tagging":
            for label in fields.tags_of(row, _count(row, where), where):
                if label is not None:
                    self._label(*label)
        elif task == "transcription":
            labels, text = fields.transcript_of(row, where)
            self.text_labels = text and self.text_labels is not False
            for kind, name in labels:
                self._label(kind, name)
        elif task == "regression":
            target = fields.target_of(row, where, self.outputs)
            self.outputs = len(target)
            if not self.is_held(index) and not weightless(row):
                self.targets.add(target[None])

    def _label(self, kind: str, name: str) -> None:
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


def weightless(row: Row) -> bool:
    """True if the target of a row is to count for nothing."""
    weight = row.get(WEIGHT)
    return weight is not None and not isinstance(weight, str) and bool(np.all(np.asarray(weight) == 0))


def learn(rows: NamedRows, spec: Spec, held: Held) -> Codec:
    """Learn the codec from training rows; `held` marks the rows that are held out."""
    first = next(iter(rows), None)
    if first is None:
        raise _empty(rows)
    where, content = rows.where(first[0]), fields.content_field(first[1], rows.where(first[0]))
    seen = _Learned(rows, spec, held)
    learned: dict[str, Any] = {}
    if (content == "text" and spec.data.tokens == "word") or (content == "tokens" and isinstance(fields.tokens_of(first[1], where), list)):
        learned = _words(vocabulary.count_words(map(split_words, seen.texts()) if content == "text" else seen.words()), spec)
    elif spec.model.characters != "none" or spec.data.lowercase:
        key = "data.lowercase" if spec.data.lowercase else f"model.characters={spec.model.characters}"
        raise SpecError(f"{key} is for words, but {where} has {_form(content, spec)}; set data.tokens=word for text, or remove it")
    elif content == "text":
        keep_rare = spec.model.dropout_rare > 0
        words, bpe, size = vocabulary.learn(spec.data.tokens, seen.texts(), spec.data, keep_rare=keep_rare)
        learned = {"kind": spec.data.tokens, "vocabulary": words, "bpe": bpe, "size": size}
    elif content == "tokens":
        if spec.data.vocabulary is not None or spec.data.min_count > 1:
            raise SpecError("data.vocabulary and data.min_count do not apply to numeric tokens; remove them, or use string tokens")
        seen.numbers()
        learned = {"kind": "int", "size": seen.largest + 2}  # one for all that are larger
    elif spec.task == "language":
        raise DataError(f"{where}: a language model needs text or tokens, but the row has steps; use text, or task=forecasting")
    else:
        seen.steps()
        width = seen.columns or 0
        by_sequence = spec.data.standardize == "sequence"
        mean, std = seen.features.scale(wanted=spec.data.standardize is True, columns=width)
        learned = {"columns": tuple(str(number) for number in range(width)), "mean": mean, "std": std, "own_scale": by_sequence}
    if spec.task == "regression":
        learned["target_mean"], learned["target_std"] = seen.targets.scale(wanted=bool(spec.data.standardize), columns=seen.outputs or 0)
    labels = seen.sets.labels if spec.data.multi_label else seen.labels
    if spec.task == "transcription":
        learned["text_labels"] = bool(seen.text_labels)
    if spec.data.multi_label:
        learned["label_sets"] = seen.sets.form
    kinds = set(labels.values())
    learned["label_kind"] = kinds.pop() if len(kinds) == 1 else "string"
    learned["text_column"], learned["label_column"] = rows.names()
    return Codec(spec.task, content, labels=_in_order(labels, rows, spec), **learned)


def _empty(rows: Rows) -> DataError:
    first = next(iter(rows.rows), None) if isinstance(rows, NamedRows) else None
    if first is None:
        return DataError(f"{rows.name} is empty; use data with at least one row")
    fact = f"{rows.name} has no row with a sequence and a target (a row has {', '.join(map(str, list(first[1])[:8]))})"
    return DataError(f"{fact}; set data.text and data.label to the names of their columns")


def _words(counts: Mapping[str, int], spec: Spec) -> dict[str, Any]:
    """What is known of words from how often each occurs in train, and of their characters if they are read."""
    words = vocabulary.choose(counts, spec.data, keep_rare=spec.model.dropout_rare > 0)
    learned: dict[str, Any] = {"kind": "word", "vocabulary": words, "size": len(words), "lowercase": spec.data.lowercase}
    if spec.model.characters != "none":
        learned["characters"], learned["word_length"] = spelling.learn(counts, spec.data.word_length)
    return learned


def _form(content: str, spec: Spec) -> str:
    """What a row that has no words holds."""
    return {"text": f"text that is read by {spec.data.tokens}", "tokens": "numbers as tokens"}.get(content, "numbers")


def _count(row: Row, where: str) -> int:
    """Return how many labels a row of tags has."""
    value = fields.as_plain(fields.take(row, "labels", where))
    return len(value) if hasattr(value, "__len__") else 0


def _in_order(labels: dict[str, str], rows: Rows, spec: Spec) -> tuple[str, ...]:
    if spec.task in ("classification", "tagging", "transcription") and not labels:
        raise DataError(f"{rows.name} has no labels; add a label to each row, to each step for tagging, any number for transcription")
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


def encode(
    rows: Rows,
    codec: Codec,
    new: NewArray,
    *,
    labelled: bool,
    join: bool,
    documents: bool = False,
    tally: Tally | None = None,
    part: str = "",
    may_be_empty: bool = False,
) -> Sequences:
    """Encode all rows with a codec; `join` concatenates them into one sequence, in which each starts anew if they are `documents`.

    `tally` counts what train does not have, and is otherwise told in the notes of the sequences, of a part by this name.
    """
    told = tally is None
    tally = tally or Tally(counted=codec.task != "transcription" and codec.label_sets == label_sets.NONE)
    writer = _Writer(codec, new, labelled, tally, documents=join and documents)
    shortest = 0 if join else 2 if codec.task == "language" and labelled else 1
    for number, row in rows:
        where = rows.where(number)
        steps = writer.content(row, where)
        if len(steps) < shortest:
            raise DataError(f"{where}: {codec.field} has {len(steps)} steps, and needs {shortest}; extend the row, or remove it")
        writer.add(steps, row, where)
    tally.left_out += getattr(rows, "left_out", 0)
    if not writer.rows and not may_be_empty:
        raise _empty(rows)
    if join and writer.rows < (2 if labelled else 1):
        raise DataError(f"{rows.name} has 1 token, but a language model needs 2 to have a target; add more text")
    notes = tuple(tally.lines(part or rows.name, train=part == "train")) if told else ()
    return replace(writer.close(join=join, name=rows.name), notes=notes)


class _Writer:
    """Appends rows to the arrays of one `Sequences`."""

    def __init__(self, codec: Codec, new: NewArray, labelled: bool, tally: Tally, *, documents: bool = False) -> None:
        self.codec, self.rows, self.new, self.tally, self.documents = codec, 0, new, tally, documents
        self.resets: Appender | None = None  # made when a row has some
        self.weigher = Weigher(new, per_step=codec.task in RESETS) if labelled else None
        if codec.kind is None:
            self.inputs = new(np.float32, len(codec.columns))
        else:
            columns = 1 + codec.word_length if codec.word_length else None
            self.inputs = new(token_dtype(max(codec.size, codec.character_codes)), columns)
        self.starts, self.lengths = new(np.int64, None), new(np.int64, None)
        self.labels: Appender | None = None
        self.tags: Appender | None = None
        self.spans: Appender | None = None
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
        elif labelled and codec.task == "transcription":
            self.labels, self.spans, self.count = new(np.int64, None), new(np.int64, 2), 0

    def content(self, row: Row, where: str) -> NDArray[Any]:
        """Return a row's inputs: tokens [steps], those of words with the codes of their characters if they are read, or numbers
        [steps, features].
        """
        codec = self.codec
        if codec.kind is None:
            # An array of whole numbers, which by itself would be tokens, is numbers where the training data had numbers.
            whole = row.get("steps") is None and isinstance(row.get("tokens"), np.ndarray)
            matrix = fields.steps_of({"steps": row["tokens"]} if whole else row, where, len(codec.columns))
            return standardise(matrix, *(own_scale(matrix) if codec.own_scale else (codec.mean, codec.std)))
        if isinstance(codec.tokens, Words):
            written = codec.field == "text"
            words = split_words(ended(fields.text_of(row, where), codec.task, codec.kind)) if written else words_of(row, where)
            ids = codec.tokens.word_ids(words)
            self.tally.read(ids, codec.tokens.unknown, words)
            return codec.spelled(ids, words)
        if codec.field == "text":
            ids = codec.tokens.ids(ended(fields.text_of(row, where), codec.task, codec.kind))
        else:
            ids = np.minimum(ids_of(row, where), codec.tokens.unknown).astype(np.int32)
        self.tally.read(ids, codec.tokens.unknown)
        return ids

    def add(self, steps: NDArray[Any], row: Row, where: str) -> None:
        """Append one row."""
        codec = self.codec
        if self.several:
            self._add_sets(len(steps), row, where)
        elif self.tags is not None:
            tags = fields.tags_of(row, len(steps), where)
            self.tags.append(np.array([fields.IGNORED if tag is None else self._class(tag[1]) for tag in tags], np.int64))
        elif self.labels is not None and codec.task == "classification":
            _, label = fields.class_of(fields.take(row, "label", where), "label", where)
            self.labels.append(np.array([self._class(label)], np.int64))
        elif self.labels is not None and self.spans is not None:
            numbers = [self._class(label) for _, label in fields.transcript_of(row, where)[0]]
            numbers = [number for number in numbers if number >= 0]
            self.labels.append(np.array(numbers, np.int64))
            self.spans.append(np.array([[self.count, self.count + len(numbers)]], np.int64))
            self.count += len(numbers)
        elif self.labels is not None:
            scaled = standardise(fields.target_of(row, where, codec.outputs), codec.target_mean, codec.target_std)
            self.labels.append(scaled[None])
        self._add_resets(len(steps), row, where)
        if self.weigher is not None:
            self.weigher.add(row, len(steps), where)
        self.inputs.append(steps)
        self.starts.append(np.array([self.rows], np.int64))
        self.lengths.append(np.array([len(steps)], np.int64))
        self.rows += len(steps)

    def _add_sets(self, steps: int, row: Row, where: str) -> None:
        to = self.tags if self.labels is None else self.labels
        if to is not None:
            sets = label_sets.sets_of(row, where, steps=None if to is self.labels else steps)
            to.append(label_sets.encode(sets, self.codec.label_sets, self.codec.label_numbers, where, self.tally.labels))

    def _add_resets(self, steps: int, row: Row, where: str) -> None:
        if self.codec.task not in RESETS:
            fields.refuse_resets(row, where)
        if row.get("resets") is not None and self.codec.field == "text":
            raise DataError(f"{where}: resets are for tokens and steps, and this row has text; set data.reset to what ends a document")
        resets = fields.resets_of(row, steps, where)
        if self.resets is None and (resets is not None or self.documents):
            self.resets = self.new(np.bool_, None)
            self.resets.append(np.zeros(self.rows, np.bool_))
        if self.resets is not None:
            resets = np.zeros(steps, np.bool_) if resets is None else resets
            if self.documents and steps:
                resets = np.concatenate(([True], resets[1:]))
            self.resets.append(resets)

    def _class(self, label: str) -> int:
        number = self.codec.label_numbers.get(label)
        if number is not None:
            return number
        self.tally.labels[label] += 1
        return UNSEEN_INSIDE if label.startswith(INSIDE) else UNSEEN

    def close(self, *, join: bool, name: str) -> Sequences:
        """Finish the arrays and return the sequences."""
        starts, lengths = self.starts.close(), self.lengths.close()
        if join:
            starts, lengths = np.array([0], np.int64), np.array([self.rows], np.int64)
        labels = None if self.labels is None else self.labels.close()
        tags, resets, spans = (None if each is None else each.close() for each in (self.tags, self.resets, self.spans))
        weights, step_weights = (None, None) if self.weigher is None else self.weigher.close(join=join, name=name)
        return Sequences(
            self.inputs.close(), starts, lengths, labels, tags, resets, weights=weights, step_weights=step_weights, spans=spans
        )
