"""Defines the spec as frozen pydantic models. Torch-free, so a laptop can validate a spec for a cluster.

Every field that affects the result is here. `PlanSpec` says how the work is split, which affects speed and memory only.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from carrywave.errors import SpecError
from carrywave.spec.best_metric import BestMetric, check_best
from carrywave.spec.sync_keys import check_sync

TaskName = Literal["language", "classification", "tagging", "forecasting", "regression"]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, Field(ge=1)]
WIDEST, DEEPEST = 1 << 16, 4096  # a float32 matrix with this many rows and columns is 16 GiB

CalendarName = Literal["minute", "hour", "weekday", "weekend", "monthday", "yearday", "month", "quarter"]

BUILTIN_TEXT = "builtin:python-topics"
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY = f"(?:{'|'.join(WEEKDAYS)})"
# A number, a list of weekdays, or a pandas frequency alias. The anchor of an alias (-SUN) is ignored: the times themselves show where a
# week or a year begins.
FREQUENCY = re.compile(
    r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)"
    rf"|(?P<days>{_DAY}(?: {_DAY})*)"
    r"|(?P<times>[1-9]\d*)?(?P<unit>us|ms|s|S|sec|min|T|h|H|d|D|b|B|w|W|[MQYA][SE]?)(?:-[A-Z]{3})?"
)


class Section(BaseModel):
    """A section of the spec: frozen; rejects unknown keys and non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=False)


class DataSpec(Section):
    """Where the data is and how it is read."""

    train: str | None = Field(BUILTIN_TEXT, description="file to train on; builtin:python-topics ships with Python")
    valid: str | None = Field(None, description="file to validate on; without it, a share of train is held out")
    test: str | None = Field(None, description="file to test on after training")
    format: Literal["auto", "text", "jsonl", "csv", "parquet"] = Field("auto", description="file format; auto goes by the file name")
    encoding: str = Field("auto", description="encoding of text files; auto: utf-8, or what a byte-order mark says")
    separator: str | None = Field(
        None, description="CSV: the character between columns, or tab; by default the one that the first lines show"
    )
    decimal: Literal["auto", ".", ","] = Field(
        "auto", description="CSV: the mark before decimals; auto: a comma if that cannot be mistaken"
    )
    text: str | None = Field(None, description="the column or field with the text, or its list of tokens; by default text, tokens or steps")
    label: str | None = Field(
        None,
        description="classification, regression, tagging: the column or field with the target; by default label, for tagging labels",
    )
    tokens: Literal["char", "word", "bpe", "byte"] = Field("char", description="how text becomes tokens")
    vocabulary: Positive | None = Field(
        None, description="number of most frequent tokens to keep, the rest become <unk>; for bpe, the size of the vocabulary"
    )
    min_count: Positive = Field(1, description="tokens that occur less often than this in the training file become <unk>")
    share: Annotated[float, Field(ge=0.0, le=0.5)] = Field(
        0.1,
        description="fraction of train held out when there is no valid file; 0 for none. The vocabulary and the labels come from the whole "
        "training file, means and standard deviations only from the rows that are trained on",
    )
    split: tuple[float, ...] | None = Field(
        None, description="forecasting: rows (or fractions) for train, valid and test in one file, in this order"
    )
    columns: tuple[str, ...] | None = Field(None, description="columns the model reads; by default all numeric ones")
    targets: tuple[str, ...] | None = Field(None, description="forecasting: columns to forecast; by default all that the model reads")
    time: str | None = Field(
        None, description="the column of times; by default ds, date, datetime, timestamp, time or the first column of dates"
    )
    series: str | None = Field(None, description="the column that names the series in long format; by default unique_id")
    known: tuple[str, ...] | None = Field(
        None,
        description="forecasting: columns whose values are known for the whole horizon, such as prices or holidays; the model reads them "
        "ahead, and a file to predict from has a row with them for each step ahead",
    )
    calendar: tuple[CalendarName, ...] | None = Field(
        None, description="forecasting: positions in the calendar that the model reads, from the column of times; weekend is 0 or 1"
    )
    categorical: tuple[str, ...] | None = Field(
        None, description="forecasting: columns of categories, each with an embedding; a value that is not in train counts as unknown"
    )
    static: tuple[str, ...] | None = Field(None, description="forecasting: columns with one value for each series, numbers or categories")
    missing: Literal["error", "forward", "interpolate", "zero"] = Field(
        "error",
        description="forecasting: how empty cells and missing rows are filled: with the value before, on a line between the values around, "
        "or with 0; error: empty cells are refused, and rows on either side of a gap count as neighbours",
    )
    frequency: str | Annotated[float, Field(gt=0.0)] | None = Field(
        None,
        description="forecasting: the interval between times, as 15min, h, D, B (business days), W, MS or a number; by default inferred "
        "from all times; none: rows are counted, and forecasts have no times",
    )
    horizon: Positive = Field(24, description="forecasting: number of steps to forecast")
    season: Positive = Field(1, description="forecasting: steps in a season, for the seasonal-naive baseline")
    residual: Literal["none", "last", "season"] = Field(
        "last", description="forecasting: the model forecasts the difference from this naive forecast"
    )
    quantiles: tuple[Annotated[float, Field(gt=0.0, lt=1.0)], ...] | None = Field(
        None, description="forecasting: quantiles to forecast, in increasing order"
    )
    context: Positive | None = Field(None, description="forecasting: rows before a valid or test part that warm up the carry")
    standardize: bool | Literal["sequence"] = Field(
        True,
        description="standardise numeric features with the mean and deviation of train; sequence: with those of each sequence or series",
    )
    cache: str | None = Field(None, description="folder for parsed data; by default $CARRYWAVE_CACHE or ~/.cache/carrywave")

    @property
    def mark(self) -> str | None:
        """The character between the columns of a CSV file; None: to be found."""
        return "\t" if self.separator in ("tab", "\\t") else self.separator

    @property
    def rhythm(self) -> str | None:
        """The frequency as text."""
        return f"{self.frequency:g}" if isinstance(self.frequency, float) else self.frequency

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.quantiles is not None and (
            not self.quantiles or any(a >= b for a, b in zip(self.quantiles, self.quantiles[1:], strict=False))
        ):
            raise ValueError(f"quantiles must increase, got {list(self.quantiles)}; list each once, from low to high")
        try:
            "".encode("utf-8" if self.encoding == "auto" else self.encoding)  # refuses codecs that are not of text
        except LookupError:
            raise ValueError(f"encoding {self.encoding!r} is unknown; use for example utf-8, latin-1, cp1252 or utf-16") from None
        if self.mark is not None and (len(self.mark) != 1 or not self.mark.isascii() or self.mark.isalnum() or self.mark in "\"\r\n.-+'"):
            raise ValueError(f"separator {self.separator!r} cannot separate columns; use one character such as ; or |, or tab")
        if isinstance(self.frequency, str) and self.frequency != "none" and FREQUENCY.fullmatch(self.frequency.strip()) is None:
            raise ValueError(f"frequency {self.frequency!r} is unknown; use for example 15min, h, D, B, W, MS, a number, or none")
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


class ModelSpec(Section):
    """The network: encoder, stacked LSTM, head."""

    hidden: Positive | tuple[Positive, ...] = Field(128, description="hidden units of each layer; a list gives each layer its own width")
    layers: Positive = Field(2, description="number of LSTM layers")
    embedding: Positive | None = Field(None, description="width of the token embedding; by default that of the first layer")
    projection: Annotated[int, Field(ge=0)] = Field(0, description="width each layer's output is projected to (proj_size); 0 for none")
    bidirectional: bool = Field(False, description="read separate sequences in both directions")
    dropout: Share = Field(0.0, description="dropout on the token embedding, between layers and before the head")
    dropout_input: Share | None = Field(
        None, description="dropout on the encoder's output; by default model.dropout for tokens, 0 for numbers"
    )
    dropout_hidden: Share | None = Field(None, description="dropout between layers; by default model.dropout")
    dropout_output: Share | None = Field(None, description="dropout before the head; by default model.dropout")
    dropout_words: Share = Field(0.0, description="dropout of whole rows of the embedding")
    weight_drop: Share = Field(0.0, description="dropout of recurrent weights, the same for all steps of a batch")
    locked: bool = Field(False, description="use the same dropout mask at every step of a batch (variational dropout)")
    tie: bool = Field(False, description="language: softmax and embedding share one matrix")
    softmax: Literal["full", "adaptive"] = Field(
        "full",
        description="language: score all tokens at every step, or rare ones only in clusters, which is another model and cheaper if the "
        "vocabulary is large",
    )
    cutoffs: tuple[Positive, ...] | None = Field(
        None,
        description="adaptive softmax: first token of each cluster, by frequency; by default a twentieth and a quarter of the vocabulary",
    )
    layer_norm: bool = Field(False, description="normalise each layer's output")
    learned_carry: bool = Field(False, description="learn the carry at the start of a sequence instead of starting from zero")
    init: Literal["torch", "orthogonal", "xavier"] = Field("torch", description="how the LSTM weights are initialised")
    forget_bias: float | None = Field(None, description="initial bias of the forget gate")
    pool: Literal["last", "mean"] = Field(
        "last", description="classification, regression: the last real step, or the mean of all real steps"
    )
    pretrained: str | None = Field(
        None,
        description="pretrained embeddings, as text with a token and its numbers on each line, or the layers of an LSTM from elsewhere: "
        "torch.nn.LSTM (.safetensors), Keras 3 (.weights.h5, .keras)",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.layers > DEEPEST:
            raise ValueError(f"layers is {self.layers}; use at most {DEEPEST}")
        if isinstance(self.hidden, tuple) and len(self.hidden) != self.layers:
            raise ValueError(f"hidden lists {len(self.hidden)} widths for {self.layers} layers; list one width for each layer")
        for name, given in (("hidden", max(self.widths)), ("embedding", self.embedding or 0)):
            if given > WIDEST:
                raise ValueError(f"{name} is {given}; use at most {WIDEST}")
        widths = self.widths
        if self.projection and self.projection >= min(widths):
            raise ValueError(f"projection {self.projection} must be smaller than hidden {min(widths)}")
        if self.cutoffs is not None and self.softmax != "adaptive":
            raise ValueError("cutoffs are for softmax=adaptive; set it, or remove them")
        if self.cutoffs is not None and (not self.cutoffs or list(self.cutoffs) != sorted(set(self.cutoffs))):
            raise ValueError(f"cutoffs must increase, got {list(self.cutoffs)}; list each once, from low to high")
        if self.softmax == "adaptive" and self.tie:
            raise ValueError("tie needs one matrix for all tokens, which softmax=adaptive does not have; remove one of them")
        return self

    @property
    def widths(self) -> tuple[int, ...]:
        """Hidden units of each layer."""
        return self.hidden if isinstance(self.hidden, tuple) else (self.hidden,) * self.layers

    def cutoffs_of(self, vocabulary: int) -> tuple[int, ...]:
        """The first tokens of the clusters of an adaptive softmax."""
        cutoffs = self.cutoffs or (max(1, vocabulary // 20), max(2, vocabulary // 4))
        if cutoffs[-1] >= vocabulary:
            raise SpecError(
                f"model.cutoffs={list(cutoffs)}, but the vocabulary has {vocabulary} tokens; use smaller ones, or model.softmax=full"
            )
        return cutoffs


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


class TrainSpec(Section):
    """The optimisation."""

    optimizer: Literal["sgd", "adam", "adamw", "ntasgd"] = Field(
        "adam", description="update rule; ntasgd is SGD that averages its weights once it stops improving"
    )
    lr: Annotated[float, Field(gt=0.0)] = Field(2e-3, description="learning rate")
    momentum: Share = Field(0.0, description="sgd only")
    betas: tuple[Share, Share] = Field((0.9, 0.999), description="adam and adamw")
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="pulls weights towards zero; adamw applies it apart from the gradient, the others through it"
    )
    nonmono: Positive = Field(5, description="ntasgd: evaluations without improvement before averaging starts")
    clip: Annotated[float, Field(gt=0.0)] | None = Field(None, description="clip gradients to this norm, taken over all of them together")
    epochs: Positive = Field(5, description="passes over train")
    max_steps: Positive | None = Field(None, description="stop after this many optimizer steps")
    accumulate: Positive = Field(1, description="batches per optimizer step")
    precision: Literal["auto", "fp32", "tf32", "fp64", "bf16", "fp16"] = Field(
        "auto",
        description="arithmetic; with bf16 and fp16, parameters and optimizer state stay in fp32. auto: bf16 if all devices are GPUs made "
        "for it (compute capability 8.0 or higher), otherwise fp32; the spec in a run's folder says which",
    )
    reproducible: bool = Field(
        False, description="bitwise identical results on 1, 2, 4 and 8 replicas, at a cost that is printed; see docs/reliability.md"
    )
    shard_optimizer: bool = Field(
        False,
        description="each replica of a stage keeps and updates only its part of the optimizer state, and the replicas exchange the new "
        "weights: less memory, the same result; see docs/parallel.md",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(1, description="seed of all randomness: weights, order, dropout")
    schedule: Literal["constant", "cosine", "plateau", "step", "linear"] = Field("constant", description="learning-rate schedule")
    warmup: Annotated[int, Field(ge=0)] = Field(0, description="steps of linear warm-up, in any schedule")
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(0.25, description="plateau and step multiply the learning rate by this")
    patience: Annotated[int, Field(ge=0)] = Field(0, description="plateau: evaluations without improvement that are tolerated")
    every: Positive = Field(10, description="step: epochs between reductions")
    min_lr: Annotated[float, Field(ge=0.0)] = Field(0.0, description="no schedule lowers the learning rate below this")
    alpha: Annotated[float, Field(ge=0.0)] = Field(0.0, description="activation regularisation")
    beta: Annotated[float, Field(ge=0.0)] = Field(0.0, description="temporal activation regularisation")
    evaluate_every: Positive | None = Field(None, description="optimizer steps between evaluations; by default at the end of each epoch")
    best: BestMetric = Field(
        "loss",
        description="metric of valid that picks the best weights, and that early_stop and plateau look at: accuracies and macro_f1 better "
        "if higher, the others if lower",
    )
    early_stop: Positive | None = Field(None, description="stop after this many evaluations without improvement of train.best")
    class_weights: Literal["balanced"] | dict[str, Annotated[float, Field(gt=0.0)]] | None = Field(
        None,
        description="classification, tagging: weights of the labels in the loss, by default 1; balanced: the same for each in total",
    )
    loss: Literal["mse", "mae"] = Field("mse", description="regression, forecasting without quantiles: the loss")
    on_nan: Literal["stop", "skip", "back"] = Field(
        "stop",
        description="what to do when a loss or gradient is not finite: stop the run, skip the step, or go back to the last snapshot with "
        "half the learning rate; see docs/reliability.md",
    )
    log_every: Positive = Field(50, description="optimizer steps between lines in metrics.jsonl")
    track: tuple[Literal["mlflow", "wandb"], ...] = Field(
        (), description="trackers that get a copy of metrics.jsonl, such as [mlflow]; nothing is sent to any other; see docs/python.md"
    )
    snapshot_every: Annotated[int, Field(ge=0)] | None = Field(
        1000, description="optimizer steps between snapshots within an epoch; 0: only at the end of each epoch, where one is always taken"
    )
    keep: Positive = Field(2, description="snapshots to keep, in addition to the best one")
    sync: Literal["step", "local", "diloco", "async"] = Field(
        "step",
        description="when replicas exchange: at every step, as one device would compute; or, each another algorithm for slow links, see "
        "docs/sync.md: local averages weights every sync_every steps, diloco takes an outer step on their difference, async pushes "
        "gradients whenever they are ready, with a result that depends on timing",
    )
    sync_every: Positive = Field(
        50, description="local, diloco: optimizer steps that a replica takes on its own between exchanges; async: between meetings"
    )
    sync_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="local, diloco: what travels between replicas; fp32 is fp64 in fp64 runs"
    )
    sync_fragments: Positive = Field(
        1, description="diloco: parts of the weights that are exchanged in turn, each every sync_every steps, so that less travels at once"
    )
    block_momentum: Share = Field(0.0, description="local: momentum of the averaged weights from exchange to exchange (BMUF)")
    block_nesterov: bool = Field(False, description="local: replicas start ahead by the block momentum (Nesterov)")
    outer_lr: Annotated[float, Field(gt=0.0)] = Field(1.0, description="diloco: learning rate of the outer step")
    outer_momentum: Share = Field(0.5, description="diloco: Nesterov momentum of the outer step")
    max_staleness: Annotated[int, Field(ge=0)] = Field(
        4, description="async: optimizer steps that a replica may be ahead of the slowest before it waits"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}; lower min_lr")
        check_sync(dict(self), {name: field.default for name, field in TrainSpec.model_fields.items()})
        return self


class PlanSpec(Section):
    """How the work is split. Changes speed and memory, never the result."""

    replicas: Positive | None = Field(None, description="copies of the model that share the lanes; by default workers ÷ stages")
    stages: Positive = Field(1, description="consecutive parts into which the layers are split, one per worker")
    chunk_steps: Positive | None = Field(
        None, description="steps of a time chunk; by default the whole window, or 16 with several stages and one micro-batch"
    )
    micro_batches: Positive = Field(1, description="parts into which the lanes are split, which follow each other through the stages")
    cuts: tuple[Positive, ...] | None = Field(
        None, description="first layer of each stage after the first, counted from 1; the head comes after the last layer"
    )
    recompute: bool | Literal["twice"] = Field(
        False,
        description="keep only the input and the carry of each chunk, and recompute the rest in backward; twice: keep few of the carries, "
        "and recompute the others too, for very long sequences. Needs chunk_steps to save memory on one device",
    )
    kernel: Literal["auto", "reference", "aten", "manual", "persistent"] = Field(
        "auto", description="backend of the LSTM, see docs/kernels.md; the environment variable CARRYWAVE_KERNEL takes precedence"
    )
    share_head: bool = Field(False, description="split the head's work over the stages; for a large vocabulary")
    split_vocabulary: bool = Field(
        False, description="split the rows of embedding and softmax over the replicas; for a vocabulary that is too large for one device"
    )


class Spec(Section):
    """One complete training run.

    >>> import carrywave as cw
    >>> cw.Spec.model_validate({"task": "forecasting", "data": {"horizon": 12}}).data.horizon
    12
    """

    task: TaskName = Field(
        "language",
        description="what to predict: the next token, a label per sequence, a label per step, the next values, numbers per sequence",
    )
    data: DataSpec = DataSpec()
    model: ModelSpec = ModelSpec()
    batch: BatchSpec = BatchSpec()
    train: TrainSpec = TrainSpec()
    plan: Literal["auto"] | PlanSpec = "auto"

    @model_validator(mode="after")
    def _check(self) -> Self:
        streams = self.streams
        if self.model.tie:
            if self.task != "language":
                raise ValueError(f"model.tie is for language models, not for {self.task}; remove it")
            last = self.model.projection or self.model.widths[-1]
            first = self.model.embedding or self.model.widths[0]
            if last != first:
                raise ValueError(
                    f"model.tie needs an embedding as wide as the last layer, got {first} and {last}; set model.embedding={last}"
                )
        if self.model.softmax != "full" and self.task != "language":
            raise ValueError(f"model.softmax is for language models, not for {self.task}; remove it")
        if self.model.bidirectional and (streams or self.task in ("language", "forecasting")):
            raise ValueError(
                "model.bidirectional cannot read a stream backwards; "
                "use separate sequences (classification, tagging or regression with batch.tokens)"
            )
        if self.task == "forecasting" and self.batch.tokens is not None:
            raise ValueError("forecasting reads streams; set batch.lanes and batch.steps instead of batch.tokens")
        if self.task in ("classification", "regression") and streams:
            raise ValueError(f"{self.task} reads separate sequences; set batch.tokens instead of batch.lanes and batch.steps")
        if not streams and (self.batch.vary or self.batch.eval_lanes is not None):
            raise ValueError("batch.vary and batch.eval_lanes are for streams, not for separate sequences; remove them")
        if self.train.betas != TrainSpec.model_fields["betas"].default and self.train.optimizer not in ("adam", "adamw"):
            raise ValueError(f"train.betas are for adam and adamw, not for {self.train.optimizer}; remove them")
        if self.train.momentum and self.train.optimizer != "sgd":
            raise ValueError(f"train.momentum is for sgd, not for {self.train.optimizer}; remove it, or use train.optimizer=sgd")
        if self.train.class_weights is not None and self.task not in ("classification", "tagging"):
            raise ValueError(f"train.class_weights is for classification and tagging, not for {self.task}; remove it")
        for name in ("known", "calendar", "categorical", "static"):
            if getattr(self.data, name) is not None and self.task != "forecasting":
                raise ValueError(f"data.{name} is for forecasting, not for {self.task}; remove it")
        if self.data.missing != "error" and self.task != "forecasting":
            raise ValueError(f"data.missing is for forecasting, not for {self.task}; remove it")
        if self.data.quantiles is not None and self.task != "forecasting":
            raise ValueError(f"data.quantiles is for forecasting, not for {self.task}; remove it")
        check_best(self.train.best, self.task, self.data.quantiles)
        if self.train.optimizer == "ntasgd" and self.train.schedule == "plateau":
            raise ValueError("train.optimizer=ntasgd averages weights instead of lowering the learning rate; use train.schedule=constant")
        return self

    @property
    def streams(self) -> bool:
        """True if the data is cut into contiguous streams whose carry is kept, rather than into separate sequences."""
        if self.batch.tokens is not None:
            return False
        if self.batch.lanes is not None or self.batch.steps is not None:
            return True
        return self.task in ("language", "forecasting")

    @property
    def lanes(self) -> int:
        """Parallel streams in training."""
        return self.batch.lanes or 32

    @property
    def steps(self) -> int:
        """Steps per window of a stream."""
        return self.batch.steps or 64

    @property
    def tokens(self) -> int:
        """Steps in a batch of separate sequences, padding included."""
        return self.batch.tokens or 4096

    @property
    def plans_itself(self) -> bool:
        """True if the split is left to the planner; naming only a kernel does not change that."""
        return self.plan == "auto" or not self.plan.model_fields_set - {"kernel"}

    @property
    def plan_spec(self) -> PlanSpec:
        """The plan section; `auto` becomes one in which nothing is set."""
        return PlanSpec() if self.plan == "auto" else self.plan
