"""Convert rows of fields to `Sequences` in two passes: `learn` derives a `Codec` from the training rows, `encode` applies it to any rows.

Tokens and labels are learned from the whole training file, held-out rows included, so that nothing in it is unknown; means
and standard deviations only from the rows that are trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from carrywave.data.codec import Codec
from carrywave.data.files import fields, label_sets
from carrywave.data.files.rows import SHOWN, WEIGHT, Row, Rows
from carrywave.data.formats.recognised import NamedRows
from carrywave.data.sequences import UNSEEN, UNSEEN_INSIDE, Ints, Sequences, token_dtype
from carrywave.data.tables.moments import Scale, scale_of, standardise
from carrywave.data.text import spelling, vocabulary
from carrywave.data.text.tag_scheme import tags_of
from carrywave.data.text.tally import Tally
from carrywave.data.text.tokenizers import Words, split_words
from carrywave.errors import DataError
from carrywave.spec.defaults import with_spans
from carrywave.spec.model_spec import CHARACTERS
from carrywave.spec.spec import Spec

Flags = NDArray[np.bool_]
Content = TypeVar("Content")
INSIDE = ("I-", "E-", "M-", "L-")  # how labels begin that go on with a span
POOLED = ("classification", "regression")  # tasks whose linear part reads the spelling of words that the vocabulary does not have
LONGEST = 24  # characters of such a word that are kept
RESETS = ("language", "tagging")  # tasks with a target for each step, in which a row may hold several sequences, each with a new state


@dataclass
class _Learned:
    """What the first pass collects besides the content of the rows."""

    rows: NamedRows
    spec: Spec
    held: Flags
    labels: dict[str, str] = field(default_factory=dict)  # name -> kind
    sets: label_sets.LabelSets = field(default_factory=label_sets.LabelSets)
    features: list[fields.Matrix] = field(default_factory=list)  # of the rows that are trained on
    targets: list[fields.Matrix] = field(default_factory=list)
    text_labels: bool = True  # of transcriptions: whether they are texts
    columns: int | None = None
    outputs: int | None = None

    def contents(self, read: Callable[[Row, str], Content]) -> Iterator[Content]:
        """Yield the content of each row, after its target was recorded."""
        for index, (number, row) in enumerate(self.rows):
            where = self.rows.where(number)
            held = bool(index < len(self.held) and self.held[index])
            self._watch(row, where, held=held)
            content = read(row, where)
            if isinstance(content, np.ndarray) and content.dtype == np.float64:
                self.columns = content.shape[1]
                if not held:
                    self.features.append(content)
            yield content

    def _watch(self, row: Row, where: str, *, held: bool) -> None:
        task = self.spec.task
        if self.spec.data.multi_label:
            self.sets.watch(label_sets.sets_of(row, task, where), where)
        elif task == "regression":
            target = fields.target_of(row, where, self.outputs)
            self.outputs = len(target)
            if not held and not zero_weight(row):
                self.targets.append(target[None])
        elif task != "language":
            self.text_labels &= task == "transcription" and isinstance(row.get("labels"), str)
            self.labels |= {label[1]: label[0] for label in fields.labels_of(row, task, where) if label is not None}

    def text(self, row: Row, where: str) -> str:
        """A row's text as it will be tokenised."""
        return ended(fields.text_of(row, where), self.spec.task, self.spec.data.tokens)

    def steps(self, row: Row, where: str) -> fields.Matrix:
        """A row's numbers."""
        return fields.steps_of(row, where, self.columns)


def _scale(rows: list[fields.Matrix], columns: int) -> Scale:
    """The mean and deviation of each column; 0 and 1 of nothing."""
    return scale_of(np.concatenate(rows)) if rows else ((0.0,) * columns, (1.0,) * columns)


def zero_weight(row: Row) -> bool:
    """True if the target of a row is to count for nothing."""
    weight = row.get(WEIGHT)
    return weight is not None and not isinstance(weight, str) and bool(np.all(np.asarray(weight) == 0))


def learn(rows: NamedRows, spec: Spec, held: Flags) -> Codec:
    """Learn the codec from training rows; `held` marks the rows that are held out."""
    first = next(iter(rows), None)
    if first is None:
        raise _empty(rows)
    where, content = rows.where(first[0]), fields.content_field(first[1], rows.where(first[0]))
    words = spec.data.tokens == "word" if content == "text" else content == "tokens" and isinstance(fields.tokens_of(first[1], where), list)
    kinds = {"steps": "numbers", "tokens": "integer", "text": spec.data.tokens}
    vocabulary.check_keys("word" if words else kinds[content], spec.data, spec.model.characters)
    seen = _Learned(rows, spec, held)
    learned: dict[str, Any] = {}
    keep_rare = spec.model.dropout_rare > 0
    if words:
        counts = vocabulary.count_words(map(split_words, seen.contents(seen.text)) if content == "text" else seen.contents(words_of))
        spec = with_spans(spec, spans=tags_of(tuple(seen.labels)) is not None)
        keep_rare = spec.model.dropout_rare > 0
        chosen = vocabulary.choose(counts, spec.data, keep_rare=keep_rare)
        learned = {"kind": "word", "vocabulary": chosen, "size": len(chosen), "lowercase": spec.data.lowercase}
        if spec.model.characters:
            learned["characters"], learned["word_length"] = spelling.learn(counts, CHARACTERS)
    elif content == "text":
        chosen, bpe, size = vocabulary.learn(spec.data.tokens, seen.contents(seen.text), spec.data, keep_rare=keep_rare)
        learned = {"kind": spec.data.tokens, "vocabulary": chosen, "bpe": bpe, "size": size}
    elif content == "tokens":
        largest = max(int(ids.max(initial=-1)) for ids in seen.contents(ids_of))
        learned = {"kind": "int", "size": largest + 2}  # one for all that are larger
    elif spec.task == "language":
        raise DataError(f"{where}: a language model needs text or tokens, but the row has steps; use text, or task=forecasting")
    else:
        for _ in seen.contents(seen.steps):
            pass  # their moments are recorded
        width = seen.columns or 0
        mean, std = _scale(seen.features if spec.data.standardize is True else [], width)
        by_sequence = spec.data.standardize == "sequence"
        learned = {"columns": tuple(map(str, range(width))), "mean": mean, "std": std, "own_scale": by_sequence}
    if spec.task == "regression":
        learned["target_mean"], learned["target_std"] = _scale(seen.targets if spec.data.standardize else [], seen.outputs or 0)
    labels = seen.sets.labels if spec.data.multi_label else seen.labels
    types = set(labels.values())
    names = rows.known
    return Codec(
        spec.task,
        content,
        labels=_in_order(labels, rows, spec),
        label_kind=types.pop() if len(types) == 1 else "string",
        label_sets=seen.sets.form if spec.data.multi_label else label_sets.NONE,
        text_labels=spec.task == "transcription" and seen.text_labels,
        text_column=names.text,
        label_column=names.label,
        **learned,
    )


def _empty(rows: Rows) -> DataError:
    given = getattr(rows, "given", ())
    if not given:
        return DataError(f"{rows.name} is empty; use data with at least one row")
    fact = f"{rows.name} has no row with a sequence and a target (a row has {', '.join(given[:SHOWN])})"
    return DataError(f"{fact}; set data.text and data.label to the names of their columns")


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


words_of = partial(fields.tokens_of, words=True)  # a row's tokens, which must be words
ids_of = partial(fields.tokens_of, words=False)  # which must be whole numbers


def encode(
    rows: Rows,
    codec: Codec,
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
    told, several = tally is None, codec.label_sets != label_sets.NONE
    tally = tally or Tally(counted=codec.task != "transcription" and not several)
    shortest = 0 if join else 2 if codec.task == "language" and labelled else 1
    targeted, per_step = labelled and codec.task != "language", codec.task in RESETS
    outputs = len(codec.labels) if several else codec.outputs if codec.task == "regression" else None
    columns = len(codec.columns) if codec.kind is None else 1 + codec.word_length if codec.word_length else None
    dtype = np.float32 if codec.kind is None else token_dtype(max(codec.size, codec.character_codes))
    inputs: list[NDArray[Any]] = [np.empty((0,) if columns is None else (0, columns), dtype)]
    targets: list[NDArray[Any]] = [np.empty(0, np.int64) if outputs is None else np.empty((0, outputs), np.float32)]
    sizes, numbers = list[int](), list[int]()  # the steps and the labels of each row
    unread = list[str]()  # words that the vocabulary does not have, as often as they stand in the data
    resets, weights = list[Flags | None](), list[float | fields.Matrix | None]()
    for number, row in rows:
        where = rows.where(number)
        content = _content(codec, row, where, tally, unread)
        sizes.append(len(content))
        if sizes[-1] < shortest:
            raise DataError(f"{where}: {codec.field} has {sizes[-1]} steps, and needs {shortest}; extend the row, or remove it")
        inputs.append(np.array(content, dtype))  # a copy: whoever yields rows may reuse them
        if targeted:
            target = _target(codec, row, sizes[-1], where, tally)
            targets.append(target)
            numbers.append(len(target))
        if not per_step:
            fields.refuse_resets(row, where)
        resets.append(fields.resets_of(row, sizes[-1], where))
        weights.append(fields.weight_of(row, sizes[-1], where, per_step=per_step) if labelled else None)
    tally.left_out += getattr(rows, "left_out", 0)
    lengths = np.array(sizes, np.int64)
    if not (total := int(lengths.sum())) and not may_be_empty:
        raise _empty(rows)
    if join and total < (2 if labelled else 1):
        raise DataError(f"{rows.name} has 1 token, but a language model needs 2 to have a target; add more text")
    starts, made = np.cumsum(lengths) - lengths, np.concatenate(targets) if targeted else None
    begins = _each_step(resets, lengths, False, np.bool_)
    if join and documents:
        begins = np.zeros(total, np.bool_) if begins is None else begins.copy()
        begins[starts[lengths > 0]] = True
    by_step = _each_step(weights, lengths, 1.0, np.float32) if per_step else None
    listed = join or any(isinstance(weight, np.ndarray) for weight in weights)
    by_row = None if listed else _each_step(weights, np.ones_like(lengths), 1.0, np.float32)
    ends = np.cumsum(np.array(numbers, np.int64))
    return Sequences(
        np.concatenate(inputs),
        np.zeros(1, np.int64) if join else starts,
        np.array([total], np.int64) if join else lengths,
        labels=None if codec.task == "tagging" else made,
        tags=made if codec.task == "tagging" else None,
        resets=begins,
        weights=by_row,
        step_weights=by_step if listed else None,
        spans=np.stack([ends - numbers, ends], axis=1) if targeted and codec.task == "transcription" else None,
        unread=code_points_of(unread) if unread and codec.task in POOLED else None,
        notes=tuple(tally.lines(part or rows.name, train=part == "train")) if told else (),
    )


def code_points_of(words: Sequence[str]) -> NDArray[np.uint32]:
    """[words, characters]: the first characters of words, then 0."""
    return np.array(words, f"<U{LONGEST}").view(np.uint32).reshape(len(words), LONGEST)


def _each_step(values: Sequence[Any], lengths: Ints, default: float, dtype: DTypeLike) -> NDArray[Any] | None:
    """The values of rows as those of their steps, one for all or one for each; None if no row has any."""
    if all(value is None for value in values):
        return None
    each = (np.broadcast_to(default if value is None else value, many) for value, many in zip(values, lengths.tolist(), strict=True))
    return np.concatenate(list(each)).astype(dtype)


def _content(codec: Codec, row: Row, where: str, tally: Tally, unread: list[str]) -> NDArray[Any]:
    """Return a row's inputs: tokens [steps], those of words with the codes of their characters if they are read, or numbers
    [steps, features].
    """
    if codec.kind is None:
        # An array of whole numbers, which by itself would be tokens, is numbers where the training data had numbers.
        whole = row.get("steps") is None and isinstance(row.get("tokens"), np.ndarray)
        matrix = fields.steps_of({"steps": row["tokens"]} if whole else row, where, len(codec.columns))
        return standardise(matrix, *(scale_of(matrix) if codec.own_scale else (codec.mean, codec.std)))
    text = ended(fields.text_of(row, where), codec.task, codec.kind) if codec.field == "text" else ""
    if isinstance(codec.tokens, Words):
        words = split_words(text) if codec.field == "text" else words_of(row, where)
        ids = codec.tokens.word_ids(words)
        tally.read(ids, codec.tokens.unknown, words)
        strange = [words[place] for place in np.flatnonzero(ids == codec.tokens.unknown)]
        unread += map(str.lower, strange) if codec.lowercase else strange
        return codec.spelled(ids, words)
    unknown = codec.tokens.unknown
    ids = codec.tokens.ids(text) if codec.field == "text" else np.minimum(ids_of(row, where), unknown).astype(np.int32)
    tally.read(ids, unknown)
    return ids


def _target(codec: Codec, row: Row, steps: int, where: str, tally: Tally) -> NDArray[Any]:
    """Return a row's target, or those of its steps; a label that train does not have is counted."""
    if codec.label_sets != label_sets.NONE:
        sets = label_sets.sets_of(row, codec.task, where, steps)
        return label_sets.encode(sets, codec.label_sets, codec.label_numbers, where, tally.labels)
    if codec.task == "regression":
        return standardise(fields.target_of(row, where, codec.outputs), codec.target_mean, codec.target_std)[None]
    labels = [None if label is None else label[1] for label in fields.labels_of(row, codec.task, where, steps)]
    numbers = [fields.IGNORED if label is None else codec.label_numbers.get(label, UNSEEN) for label in labels]
    for place, label in enumerate(labels):
        if label is not None and numbers[place] == UNSEEN:
            tally.labels[label] += 1
            numbers[place] = UNSEEN_INSIDE if label.startswith(INSIDE) else UNSEEN
    return np.array([number for number in numbers if number >= 0] if codec.task == "transcription" else numbers, np.int64)
