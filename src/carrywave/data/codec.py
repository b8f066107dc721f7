"""A `Codec` holds everything needed to read new data as the training data was read, and to decode predictions. Plain JSON, no pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from carrywave.data.files.label_sets import NONE, VECTORS
from carrywave.data.sequences import Sequences
from carrywave.data.tables.calendar import calendar_columns
from carrywave.data.text.spelling import FIRST, Spelling
from carrywave.data.text.tag_scheme import tags_of
from carrywave.data.text.tokenizers import Ids, TokenizerKind, Tokens
from carrywave.data.text.tokenizers import make as make_tokens
from carrywave.errors import DataError
from carrywave.spec.data_spec import COUNTS
from carrywave.spec.facts import DataFacts

HISTOGRAM_BINS = 64


@dataclass(frozen=True)
class Codec:
    """How the data of one task is read: vocabulary, labels, columns and their scale."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    task: str
    field: str  # what a row holds: steps, text or tokens; columns for a table
    kind: TokenizerKind | None = None  # None for numeric inputs
    vocabulary: tuple[str, ...] = ()  # characters or words
    bpe: str | None = None  # byte-pair tokenizer, as serialised by its library
    size: int = 0  # number of tokens; 0 for numeric inputs
    lowercase: bool = False  # words are looked up in lower case
    characters: tuple[str, ...] = ()  # of the words in train, if they are read beside the words
    word_length: int = 0  # how many characters of a word are read
    labels: tuple[str, ...] = ()
    label_kind: str = "string"  # string, whole number or boolean: the type labels have in the data, and are returned as
    label_sets: str = NONE  # several labels may hold: the form in which the data lists them
    text_labels: bool = False  # a transcription is a text, and its characters are the labels
    columns: tuple[str, ...] = ()  # names of the numeric features of a step, those of the calendar last
    targets: tuple[int, ...] = ()  # indices of the columns to forecast
    mean: tuple[float, ...] = ()  # per column; inputs are (value - mean) / std
    std: tuple[float, ...] = ()
    target_mean: tuple[float, ...] = ()  # per target value, if targets are numbers
    target_std: tuple[float, ...] = ()
    names: tuple[str, ...] = ()  # series in train, if there are several; each has its own mean and std
    means: tuple[tuple[float, ...], ...] = ()
    stds: tuple[tuple[float, ...], ...] = ()
    time: str | None = None
    series: tuple[str, ...] = ()  # the columns that name the series
    frequency: str | None = None  # spacing of times; None: unknown
    day_first: bool | None = None  # in dates that can be read in two ways
    scale_season: int = 0  # series are scaled by their mean absolute change over this many rows; 0: by their deviation
    own_scale: bool = False  # each sequence or series is standardised by its own mean and std
    known: tuple[str, ...] = ()  # columns, numeric or categorical, that are known for the whole horizon
    calendar: tuple[str, ...] = ()  # positions in the calendar that are read
    static: tuple[str, ...] = ()  # columns with one value per series
    categorical: tuple[str, ...] = ()  # columns of categories, in the order of their codes in a step: known ones first
    categories: tuple[tuple[str, ...], ...] = ()  # the values of each in train; the code of the first is 1, and 0 is any other value
    channels: tuple[str, ...] = ()  # columns of the data to forecast, if each is a series of its own; `targets` is then their one column
    transform: str = "none"  # of the columns to forecast, before they are standardised
    distribution: str = "none"  # that is forecast of them
    step_targets: tuple[str, ...] = ()  # columns that are estimated at every step from the others
    masked: tuple[str, ...] = ()  # columns that may be empty: whether each has a value, and how long ago it last had one, is read as well
    text_column: str | None = None  # the field of a row with the content, where the data has a name of its own for it
    label_column: str | None = None  # and that with the target
    spreads: tuple[tuple[float, ...], ...] = ()  # the deviation of each step target in each of `names`, in standardised units

    def to_json(self) -> str:
        """Serialise to JSON."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Codec:
        """Parse the output of `to_json`."""
        try:
            return _PARSER.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise DataError(f"the codec is damaged ({where}: {first['msg']}), or of another version; prepare the data again") from error

    @cached_property
    def tokens(self) -> Tokens:
        """The tokenizer for this vocabulary."""
        if self.kind is None:
            raise DataError(f"this {self.task} model takes numbers, not text; pass steps")
        return make_tokens(self.kind, self.vocabulary, self.bpe, self.size, lowercase=self.lowercase)

    @cached_property
    def spelling(self) -> Spelling | None:
        """The codes of characters, if they are read beside words."""
        return Spelling(self.characters, self.word_length) if self.characters else None

    @property
    def character_codes(self) -> int:
        """The number of different codes of characters; 0 if they are not read."""
        return FIRST + len(self.characters) if self.characters else 0

    @cached_property
    def label_numbers(self) -> dict[str, int]:
        """Index of each label."""
        return {label: number for number, label in enumerate(self.labels)}

    @property
    def measured(self) -> tuple[str, ...]:
        """The numeric columns that come from the data, as the calendar's do not, nor those that say what is missing."""
        return self.columns[: len(self.columns) - 2 * len(self.masked) - len(calendar_columns(self.calendar))]

    @property
    def read_columns(self) -> tuple[str, ...]:
        """The numeric columns of a file that are read: as `measured`, with each channel in place of the one column for all of them."""
        if not self.channels:
            return self.measured
        [target] = self.targets
        return (*self.measured[:target], *self.channels, *self.measured[target + 1 :])

    @property
    def forecast_columns(self) -> tuple[str, ...]:
        """The columns of the data that are forecast."""
        return self.step_targets or self.channels or tuple(self.columns[place] for place in self.targets)

    @cached_property
    def scale_of(self) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
        """The mean and std of each series in train, by name, if each has its own; of channels of a single series, by channel."""
        return {} if self.spreads else dict(zip(self.names, zip(self.means, self.stds, strict=True), strict=True))

    def knows_scale(self, name: str) -> bool:
        """True if the scale of a series of the data is known from train: its own, or that of all series."""
        scales = self.scale_of
        return not scales or self.names == self.channels or (f"{name}/{self.channels[0]}" if self.channels else name) in scales

    @property
    def fixed(self) -> tuple[str, ...]:
        """The numeric columns whose change since the last season says nothing: the calendar's, and static ones."""
        return (*(name for name in self.measured if name in self.static), *calendar_columns(self.calendar))

    @property
    def known_columns(self) -> tuple[int, ...]:
        """The places of the numeric columns that are known for the whole horizon."""
        return tuple(place for place, name in enumerate(self.columns) if name in self.known)

    @property
    def counted(self) -> tuple[int, ...]:
        """The places of the columns that are counts, and scaled by their mean alone."""
        return self.targets if self.distribution in COUNTS else ()

    @property
    def outputs(self) -> int:
        """Number of values in a target: regression outputs, or columns to forecast."""
        return len(self.targets) or len(self.target_mean)

    def label(self, number: int) -> str | int | bool:
        """Return a label in the type it has in the data."""
        name = self.labels[number]
        return int(name) if self.label_kind == "whole number" else name == "true" if self.label_kind == "boolean" else name

    def listed(self, holds: Sequence[bool]) -> list[str | int | bool]:
        """Return the labels that hold, in the form that lists of them have in the data."""
        if self.label_sets == VECTORS:
            return [int(each) for each in holds]
        return [self.label(number) for number, each in enumerate(holds) if each]

    def transcript(self, numbers: Sequence[int]) -> str | list[str | int | bool]:
        """Return labels in a row, in the form that they have in the data."""
        return "".join(self.labels[number] for number in numbers) if self.text_labels else [self.label(number) for number in numbers]

    def encode(self, text: str, where: str = "the text") -> Ids:
        """Encode a text as token ids; a token outside the vocabulary is <unk>."""
        try:
            return self.tokens.ids(text)
        except UnicodeEncodeError as error:
            raise DataError(f"{where} is not valid Unicode at character {error.start}; remove the lone surrogate there") from error

    def spelled(self, ids: Ids, words: Sequence[str]) -> Ids:
        """The ids of words [words], or [words, 1 + word_length] with the codes of their characters if these are read."""
        return ids if self.spelling is None else np.concatenate([ids[:, None], self.spelling.codes(words)], axis=1)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Decode token ids to text."""
        return self.tokens.decode(ids)

    def restore(self, values: NDArray[Any]) -> NDArray[Any]:
        """Convert predictions [..., outputs] to the units of the data, in float64: values may be tiny, or small relative to their mean."""
        restored: NDArray[Any] = values * np.array(self.target_std) + np.array(self.target_mean)
        return restored

    def facts(self, sequences: Sequences) -> DataFacts:
        """Return what the model and the plan need to know about the training data."""
        return DataFacts(
            vocabulary=self.size,
            features=len(self.columns),
            labels=self.labels,
            outputs=self.outputs,
            sequences=len(sequences),
            steps=int(sequences.lengths.sum()),
            longest=int(sequences.lengths.max(initial=0)),
            histogram=histogram(sequences.lengths),
            most_labels=0 if sequences.spans is None else int((sequences.spans[:, 1] - sequences.spans[:, 0]).max(initial=0)),
            known=len(self.known_columns),
            fixed=len(self.fixed),
            categories=tuple(len(values) + 1 for values in self.categories),
            known_categories=sum(name in self.known for name in self.categorical),
            characters=self.character_codes,
            word_length=self.word_length,
            spans=int(self.kind == "word" and tags_of(self.labels) is not None),
        )


_PARSER = TypeAdapter(Codec)


def histogram(lengths: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Return (upper bound of length, number of sequences) pairs: exact for few distinct lengths, else geometrically spaced bins."""
    if not len(lengths):
        return ()
    edges = np.unique(lengths)
    if len(edges) > HISTOGRAM_BINS:
        edges = np.unique(np.geomspace(edges[0], edges[-1], HISTOGRAM_BINS).round().astype(np.int64))
        edges[-1] = lengths.max()
    counts = np.bincount(np.searchsorted(edges, lengths), minlength=len(edges))
    return tuple((int(edge), int(count)) for edge, count in zip(edges, counts, strict=True))
