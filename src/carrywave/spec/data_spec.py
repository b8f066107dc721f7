"""The data and batch sections of the spec: which files there are, how they are read, what is forecast, and how much goes into a batch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from carrywave.spec.section import Positive, Section
from carrywave.spec.signal_spec import AugmentSpec

CalendarName = Literal["minute", "hour", "weekday", "weekend", "monthday", "yearday", "month", "quarter"]
Transform = Literal["none", "log", "log1p", "diff"]
Distribution = Literal["none", "normal", "student_t", "negative_binomial", "poisson"]

# What a model says of each value that it forecasts. The variance of a negative binomial is mean + dispersion · mean².
PARAMETERS: dict[str, tuple[str, ...]] = {
    "normal": ("location", "scale"),
    "student_t": ("location", "scale", "df"),
    "negative_binomial": ("mean", "dispersion"),
    "poisson": ("mean",),
}
COUNTS = ("negative_binomial", "poisson")
REPORTED = (0.1, 0.5, 0.9)  # quantiles of a distribution, if no others are asked for

BUILTIN_TEXT = "builtin:python-topics"


class DataSpec(Section):
    """Where the data is and how it is read."""

    train: str | None = Field(BUILTIN_TEXT, description="file to train on; builtin:python-topics ships with Python")
    valid: str | None = Field(None, description="file to validate on; without it, a share of train is held out")
    test: str | None = Field(None, description="file to test on after training")
    format: Literal["auto", "text", "jsonl", "csv", "parquet"] = Field("auto", description="file format; auto goes by the file name")
    encoding: str = Field("auto", description="encoding of text files; auto: utf-8, or what a byte-order mark says")
    decimal: Literal[".", ","] | None = Field(None, description="CSV: the mark before decimals; by default a comma where that is sure")
    read: dict[str, Any] | None = Field(
        None, description="tables: other arguments of pandas.read_csv, as in {skiprows: 3}; they are never guessed over"
    )
    text: str | None = Field(
        None,
        description="the column or field with the text, or its list of tokens; by default text, tokens or steps, or else the one with long "
        "texts",
    )
    label: str | None = Field(
        None,
        description="classification, regression, tagging, transcription: the column or field with the target; by default label, for "
        "tagging and transcription labels, or else the one with short values that recur. Columns without names are counted from 0; in "
        "files of words with their tags it is by default the last one, in CoNLL-U upos",
    )
    weight: str | None = Field(
        None,
        description="the column or field with the weight of each target in the loss: a number from 0 on for a row, or a list of one for "
        "each step; by default none has one. In tables of series, that of a row is of its own values as targets",
    )
    multi_label: bool = Field(
        False,
        description="classification, tagging: any number of labels may hold for a sequence, or for each step of it: a target is a list of "
        "labels, or a vector of 0 and 1",
    )
    each_step: bool = Field(
        False,
        description="regression: every step has a target, and may lack it; tables with data.targets, or JSON rows with steps and labels",
    )
    scheme: Literal["auto", "none", "bio", "bioes"] = Field(
        "auto",
        description="model.crf: which labels may follow which: bio (I-X only after B-X or I-X), bioes (also with E-X and S-X, or L and U), "
        "or none: any; auto goes by the names of the labels",
    )
    tokens: Literal["char", "word", "bpe", "byte"] = Field("char", description="how text becomes tokens")
    vocabulary: Positive | None = Field(
        None, description="number of most frequent tokens to keep, the rest become <unk>; for bpe, the size of the vocabulary"
    )
    min_count: Positive = Field(
        1,
        description="tokens that occur less often than this in the training file become <unk>; with 1, half of those that occur once, up "
        "to 1% of all tokens, unless the file has <unk> itself, or model.dropout_rare is set",
    )
    lowercase: bool = Field(False, description="words are read in lower case; their characters (model.characters) as they are spelled")
    reset: str | None = Field(
        None,
        description="language: what ends a document in a stream: a token, 'blank line', or 'row' (each row of a JSON, CSV or Parquet "
        "file); the next token starts from the initial state",
    )
    share: Annotated[float, Field(ge=0.0, le=0.5)] = Field(
        0.1,
        description="fraction of train held out when there is no valid file; 0 for none. The vocabulary and the labels come from the whole "
        "training file, means and standard deviations only from the rows that are trained on",
    )
    split: tuple[float, ...] | None = Field(
        None, description="forecasting, each_step: rows (or fractions) for train, valid and test in one file, in this order"
    )
    columns: tuple[str, ...] | None = Field(None, description="columns the model reads; by default all numeric ones")
    targets: tuple[str, ...] | None = Field(
        None,
        description="forecasting: columns to forecast; by default all that the model reads. each_step: columns to estimate, which it does "
        "not read",
    )
    channels: Literal["joint", "independent"] = Field(
        "joint",
        description="forecasting: the model reads and forecasts all targets of a row together, or each target column is a series of its "
        "own for one model (channel independence)",
    )
    transform: Transform = Field(
        "none",
        description="forecasting: what is forecast of the targets: their logarithms (log; log1p of 1 + value) or their changes from row to "
        "row (diff); forecasts are in the units of the file again",
    )
    time: str | None = Field(
        None, description="the column of times; by default the one, or those, that make the rows of each series regular"
    )
    series: tuple[str, ...] | None = Field(
        None, description="the columns that name the series in long format; by default the fewest that, with the time, tell rows apart"
    )
    repeats: Literal["mean", "first", "last"] | None = Field(
        None, description="what counts if a time comes more than once in a series; by default that is refused, unless the rows are equal"
    )
    known: tuple[str, ...] | None = Field(
        None,
        description="forecasting: columns whose values are known for the whole horizon, such as prices or holidays; the model reads them "
        "ahead, and a file to predict from has a row with them for each step ahead",
    )
    calendar: tuple[CalendarName, ...] | None = Field(
        None,
        description="forecasting, each_step: positions in the calendar that the model reads, from the column of times; weekend is 0 or 1",
    )
    categorical: tuple[str, ...] | None = Field(
        None,
        description="forecasting, each_step: columns of categories, each with an embedding; a value that is not in train counts as unknown",
    )
    static: tuple[str, ...] | None = Field(
        None, description="forecasting, each_step: columns with one value for each series, numbers or categories"
    )
    missing: Literal["none", "forward", "interpolate", "zero", "mask"] = Field(
        "none",
        description="forecasting, each_step: how empty cells and missing rows are filled. none: the model reads the value before, and what "
        "is missing of a target is not trained on and not scored; forward, interpolate, zero: with the value before, on a line between "
        "the values around, or with 0, all of which count as targets. mask (each_step): as none, and the model also reads whether each "
        "value was there and for how long it has not been. Targets of each_step are never filled",
    )
    warmup: Annotated[int, Field(ge=0)] = Field(
        0,
        description="each_step: steps at the beginning of each series that have no loss and are not scored; windows then come in random "
        "order, each after so many steps that bring its carry up to date",
    )
    frequency: str | Annotated[float, Field(gt=0.0)] | None = Field(
        None,
        description="forecasting, each_step: the interval between times, as pandas writes it: 15min, h, D, B (business days), W-MON, MS, "
        "or a number; by default inferred from all times; none: rows are counted, and forecasts have no times",
    )
    horizon: Positive = Field(24, description="forecasting: number of steps to forecast")
    season: Positive = Field(1, description="forecasting: steps in a season, for the seasonal-naive baseline")
    quantiles: tuple[Annotated[float, Field(gt=0.0, lt=1.0)], ...] | None = Field(
        None,
        description="forecasting: quantiles to forecast, in increasing order; with data.distribution, those that are reported of it, by "
        "default 0.1, 0.5 and 0.9",
    )
    bands: tuple[Annotated[float, Field(gt=0.0, lt=1.0)], ...] | None = Field(
        None,
        description="forecasting of single values: bands around them that are to hold these shares of what comes, as [0.8, 0.95]; as "
        "wide as the errors of the best weights on valid say",
    )
    distribution: Distribution = Field(
        "none",
        description="forecasting: the model forecasts a distribution of each value, trained by its likelihood: normal; student_t, with "
        "heavier tails; for counts, negative_binomial or poisson. Predictions are quantiles of it, or sample paths",
    )
    standardize: bool | Literal["sequence", "window"] = Field(
        True,
        description="standardise numeric features with the mean and deviation of train, which several series to forecast have each for "
        "itself, and those of each_step all together; sequence: with those of each sequence or series; "
        "window (forecasting): what the model reads, then also with those of the last values up to each step (model.linear of them, or 96)",
    )
    augment: AugmentSpec | None = Field(
        None,
        description="separate sequences of numbers: random changes to them in training; see docs/data.md",
    )
    cache: str | None = Field(None, description="folder for parsed data; by default $CARRYWAVE_CACHE or ~/.cache/carrywave")

    @field_validator("columns", "targets", "series", "known", "calendar", "categorical", "static", "quantiles", "bands", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        """A single name or number where a list may stand is a list of one."""
        return (value,) if isinstance(value, str | float) else tuple(value) if isinstance(value, list) else value

    @property
    def told(self) -> dict[str, Any]:
        """What pandas is told of a table."""
        return ({} if self.decimal is None else {"decimal": self.decimal}) | (self.read or {})

    @property
    def frequency_text(self) -> str | None:
        """The frequency as text."""
        return f"{self.frequency:g}" if isinstance(self.frequency, float) else self.frequency

    @property
    def counts(self) -> bool:
        """True if values are forecast as counts."""
        return self.distribution in COUNTS

    @property
    def levels(self) -> tuple[float, ...] | None:
        """The quantiles that are forecast, or reported of a distribution; None: forecasts are single values."""
        return REPORTED if self.quantiles is None and self.distribution != "none" else self.quantiles

    @field_validator("text", "label", "weight", mode="before")
    @classmethod
    def _name(cls, name: Any) -> Any:
        """Columns without names have numbers."""
        return str(name) if isinstance(name, int) and not isinstance(name, bool) else name

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.distribution != "none":
            self._check_distribution()
        if self.quantiles is not None and (
            not self.quantiles or any(a >= b for a, b in zip(self.quantiles, self.quantiles[1:], strict=False))
        ):
            raise ValueError(f"quantiles must increase, got {list(self.quantiles)}; list each once, from low to high")
        if self.bands is not None:
            self._check_bands(self.bands)
        if self.quantiles is not None and self.transform == "diff":
            raise ValueError("quantiles of changes do not add up to quantiles of values; use transform=none or log, or remove quantiles")
        try:
            "".encode("utf-8" if self.encoding == "auto" else self.encoding)  # refuses codecs that are not of text
        except LookupError:
            raise ValueError(f"encoding {self.encoding!r} is unknown; use for example utf-8, latin-1, cp1252 or utf-16") from None
        for name in ("known", "calendar", "categorical", "static"):
            given = getattr(self, name) or ()
            if len(set(given)) < len(given):
                raise ValueError(f"{name} {list(given)} names a column twice; list each once")
        for one, other, why in (
            ("targets", "known", "what is known needs no forecast"),
            ("targets", "categorical", "only numbers are forecast"),
            ("targets", "static", "it never changes"),
            ("known", "static", "a static column is known anyway"),
        ):
            both = sorted(set(getattr(self, one) or ()) & set(getattr(self, other) or ()))
            if both:
                raise ValueError(f"{one} and data.{other} both name {both[0]!r}, but {why}; remove it from one of them")
        if self.split is not None:
            if len(self.split) not in (2, 3) or any(part <= 0 for part in self.split):
                raise ValueError(f"split {list(self.split)} must have two or three positive parts: train, valid and optionally test")
            if any(part < 1 for part in self.split) and sum(self.split) > 1 + 1e-9:
                raise ValueError(f"split {list(self.split)} adds up to more than 1; use fractions that add up to at most 1, or whole rows")
            if all(part >= 1 for part in self.split) and any(part != int(part) for part in self.split):
                raise ValueError(f"split {list(self.split)} must be whole numbers of rows, or fractions below 1")
        return self

    def _check_bands(self, bands: tuple[float, ...]) -> None:
        if not bands or list(bands) != sorted(set(bands)):
            raise ValueError(f"bands must increase, got {list(bands)}; list each once, from narrow to wide, as in [0.8, 0.95]")
        other = "quantiles" if self.quantiles is not None else "distribution" if self.distribution != "none" else None
        if other is not None:
            raise ValueError(f"bands are put around single values, but data.{other} already says how values spread; remove one of them")

    def _check_distribution(self) -> None:
        kind = self.distribution
        if self.transform == "diff":
            raise ValueError(f"distribution={kind} of changes does not add up to one of values; use transform=none or log, or remove it")
        if not self.counts:
            return
        if self.transform != "none":
            raise ValueError(f"distribution={kind} is of counts, but transform={self.transform} makes other numbers of them; remove it")


class BatchSpec(Section):
    """How much goes into one batch: streams × window, or a budget of steps for separate sequences."""

    lanes: Positive | None = Field(
        None, description="contiguous streams trained side by side; by default as many as suit the data, up to 32"
    )
    steps: Positive | None = Field(
        None, description="steps of a window of back-propagation through time; the carry is kept between windows; by default 64"
    )
    vary: bool = Field(False, description="window lengths vary around steps, as in AWD-LSTM (keyed), and the learning rate with them")
    tokens: Positive | None = Field(
        None, description="separate sequences: steps in a batch, padding included; by default as many as suit the data"
    )
    eval_lanes: Positive | None = Field(None, description="streams in evaluation; by default batch.lanes")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tokens is not None and (self.lanes is not None or self.steps is not None):
            raise ValueError("batch.tokens is for separate sequences and batch.lanes/batch.steps for streams; set one or the other")
        return self
