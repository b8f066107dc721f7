"""A `Codec` holds everything needed to read new data as the training data was read, and to decode predictions. Plain JSON, no pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from carrywave.data.files.label_sets import NAMES, NONE, VECTORS
from carrywave.data.sequences import Sequences
from carrywave.data.tables.calendar import FEATURES, calendar_columns
from carrywave.data.text.spelling import FIRST, Spelling
from carrywave.data.text.tokenizers import UNKNOWN, Ids, TokenizerKind, Tokens
from carrywave.data.text.tokenizers import make as make_tokens
from carrywave.errors import DataError
from carrywave.spec.data_spec import COUNTS, Distribution, Transform
from carrywave.spec.facts import DataFacts

HISTOGRAM_BINS = 64
TRANSFORMS, DISTRIBUTIONS = get_args(Transform), get_args(Distribution)
# Left out if they have their default: hashes stay.
LATER = (
    "day_first",
    "channels",
    "transform",
    "scale_season",
    "label_sets",
    "lowercase",
    "characters",
    "word_length",
    "text_labels",
    "distribution",
    "step_targets",
    "masked",
    "spreads",
    "text_column",
    "label_column",
)
SINGLE: dict[str, Any] = {
    "task": str,
    "field": str,
    "kind": str | None,
    "bpe": str | None,
    "size": int,
    "scale_season": int,
    "word_length": int,
    "time": str | None,
    "frequency": str | None,
    "transform": str,
    "distribution": str,
    "label_sets": str,
    "text_column": str | None,
    "label_column": str | None,
}
MANY: dict[str, Any] = {
    "vocabulary": str,
    "characters": str,
    "labels": str,
    "columns": str,
    "targets": int,
    "series": str,
    "names": str,
    "means": tuple,
    "stds": tuple,
    "known": str,
    "calendar": str,
    "static": str,
    "categorical": str,
    "categories": tuple,
    "channels": str,
    "step_targets": str,
    "masked": str,
    "spreads": tuple,
    **dict.fromkeys(("mean", "std", "target_mean", "target_std"), float | int),
}


@dataclass(frozen=True)
class Codec:
    """How the data of one task is read: vocabulary, labels, columns and their scale."""

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
        values = asdict(self)
        for field in fields(self):
            if field.name in LATER and values[field.name] == field.default:
                del values[field.name]
        return json.dumps(values, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Codec:
        """Parse the output of `to_json`."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"the codec is not JSON ({error}); prepare the data again") from error
        names = {field.name for field in fields(Codec)}
        if not isinstance(values, dict) or not {"task", "field"} <= set(values) <= names:
            raise DataError("the codec was not written by this version; prepare the data again")
        frozen: dict[str, Any] = {name: _frozen(value) for name, value in values.items()}
        codec = Codec(**frozen)
        if (problem := codec.problem()) is not None:
            raise DataError(f"the codec is damaged: {problem}; prepare the data again")
        return codec

    def problem(self) -> str | None:
        """Return what is inconsistent in a codec read from a file, or None."""
        for name in ("own_scale", "lowercase", "text_labels"):
            if not isinstance(getattr(self, name), bool):
                return f"{name} is {getattr(self, name)!r:.40}"
        for name, kind in SINGLE.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                return f"{name} is {value!r:.40}"
        for name, item in MANY.items():
            values = getattr(self, name)
            if not isinstance(values, tuple) or any(not isinstance(value, item) or isinstance(value, bool) for value in values):
                return f"{name} is {values!r:.40}"
        if self.kind not in (None, *get_args(TokenizerKind)):
            return f"kind is {self.kind!r}"
        if self.kind in ("char", "word") and (self.size != len(self.vocabulary) or UNKNOWN not in self.vocabulary):
            return f"size is {self.size} for a vocabulary of {len(self.vocabulary)} tokens, in which {UNKNOWN} must be"
        if self.kind == "char" and any(len(token) != 1 and token != UNKNOWN for token in self.vocabulary):
            return "a token of its character vocabulary is longer than one character"
        if any(len(character) != 1 for character in self.characters) or (self.word_length > 0) != bool(self.characters):
            return f"{self.word_length} of {len(self.characters)} characters of a word are read, some of which may be several"
        if not len(self.mean) == len(self.std) == len(self.columns) or len(self.target_mean) != len(self.target_std):
            return f"{len(self.columns)} columns have {len(self.mean)} means and {len(self.std)} deviations"
        if self.spreads and (len(self.spreads) != len(self.names) or any(len(each) != len(self.step_targets) for each in self.spreads)):
            return f"{len(self.names)} series have the deviations of {len(self.spreads)}"
        if self.step_targets and len(self.step_targets) != len(self.target_mean):
            return f"step_targets is {list(self.step_targets)} for {len(self.target_mean)} means"
        if self.spreads:
            pass  # all series have one scale
        elif not len(self.names) == len(self.means) == len(self.stds) or any(
            len(scale) != len(self.columns) or any(not isinstance(value, float | int) for value in scale)
            for scale in self.means + self.stds
        ):
            return f"{len(self.names)} series have {len(self.means)} means and {len(self.stds)} deviations"
        if len(self.categorical) != len(self.categories) or any(
            not isinstance(value, str) for values in self.categories for value in values
        ):
            return f"{len(self.categorical)} categorical columns have the values of {len(self.categories)}"
        if self.channels and (len(self.targets) != 1 or len(self.names) % len(self.channels)):
            return f"channels is {list(self.channels)} for {len(self.targets)} targets"
        if self.label_sets not in (NONE, NAMES, VECTORS):
            return f"label_sets is {self.label_sets!r:.40}"
        if self.transform not in TRANSFORMS:
            return f"transform is {self.transform!r:.40}"
        if self.distribution not in DISTRIBUTIONS:
            return f"distribution is {self.distribution!r:.40}"
        unknown = [name for name in self.known if name not in (*self.columns, *self.categorical)]
        if unknown or any(name not in FEATURES for name in self.calendar):
            return f"known is {list(self.known)} and calendar is {list(self.calendar)}"
        if any(not 0 <= target < len(self.columns) for target in self.targets) or (self.task == "forecasting" and not self.targets):
            return f"targets is {list(self.targets)} for {len(self.columns)} columns"
        return None

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
        )


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


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
