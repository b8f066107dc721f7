"""Where each key of a spec acts. A key that is set where it acts on nothing is refused: whoever sets it expects something of it.

A resolved spec lists every key, so one that has its default value is no mistake. Runs are not held to this when they are opened again: an
older version may have written what is refused today.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set

from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec

Rule = Callable[[Spec], str | None]  # why the key acts on nothing, and what to do instead; None if it acts
LABELS = ("classification", "tagging")
BYTES, BUILTIN, DATASET = "bytes", "builtin", "dataset"  # formats of what is read as it is, and of what is no file
FORMATS = {"text": "text", BYTES: "raw bytes", "jsonl": "JSON lines", "csv": "CSV", "parquet": "Parquet"}
FORMATS |= {DATASET: "datasets", BUILTIN: "built-in text"}
READ_FROM = {  # keys about how files are read, and the formats that they act on
    "format": ("text", BYTES, "jsonl", "csv", "parquet"),
    "text": ("jsonl", "csv", "parquet", DATASET),
    "encoding": ("text", "jsonl", "csv"),
    "separator": ("csv",),
    "decimal": ("csv",),
    "read": ("csv",),
}


def _and(names: Sequence[str], word: str = "and") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"


def _tasks(*names: str) -> Rule:
    return lambda spec: None if spec.task in names else f"is for {_and(names)}, not for {spec.task}; remove it"


def _series(spec: Spec) -> str | None:
    """For tables of series."""
    if spec.task == "regression" and not spec.each_step:
        return "is for forecasting, and for targets at every step; set data.each_step=true, or remove it"
    return None if spec.reads_series else _tasks("forecasting")(spec)


def _each_step(spec: Spec) -> str | None:
    return None if spec.each_step else "is for regression with data.each_step; remove it"


def _not_forecasting(instead: str = "remove it") -> Rule:
    return lambda spec: (
        f"is for text and tokens, not for {'forecasting' if spec.task == 'forecasting' else 'data.each_step'}; {instead}"
        if spec.reads_series
        else None
    )


def _optimizers(*names: str) -> Rule:
    known, use = _and(names), f"remove it, or use train.optimizer={names[0]}"
    return lambda spec: None if spec.train.optimizer in names else f"is for {known}, not for {spec.train.optimizer}; {use}"


def _schedules(*names: str) -> Rule:
    known = _and(names, "or")
    return lambda spec: None if spec.train.schedule in names else f"is for train.schedule={known}, not for {spec.train.schedule}; remove it"


def _patience(spec: Spec) -> str | None:
    train = spec.train
    if train.schedule == "plateau":
        return None
    early = f"to stop after {train.patience} evaluations without improvement, set train.early_stop={train.patience} instead"
    return f"is for train.schedule=plateau, which lowers the learning rate, not for {train.schedule}; remove it, or {early}"


def _min_lr(spec: Spec) -> str | None:
    if spec.train.schedule != "constant" or spec.train.warmup:
        return None
    return "is the lowest learning rate of a schedule, but train.schedule=constant never lowers it; remove it, or set train.schedule"


def _loss(spec: Spec) -> str | None:
    if spec.task == "forecasting" and spec.data.distribution != "none":
        return "has no effect beside data.distribution, whose loss is its negative log-likelihood; remove it"
    if spec.task == "forecasting" and spec.data.quantiles is not None:
        return "has no effect beside data.quantiles, whose loss is the pinball loss; remove it"
    kinds = {"language": "cross entropy", "classification": "cross entropy", "tagging": "cross entropy", "transcription": "that of CTC"}
    return f"is for forecasting and regression; the loss of {spec.task} is {kinds[spec.task]}; remove it" if spec.task in kinds else None


def _share(spec: Spec) -> str | None:
    other = "data.split" if spec.data.split is not None else "data.valid" if spec.data.valid is not None else None
    if other is None or not spec.data.share:  # to hold nothing out is what happens then
        return None
    return f"is held out only without {other}, which says what valid is; remove one of them"


def _context(spec: Spec) -> str | None:
    if (why := _series(spec)) is not None:
        return why
    data = spec.data
    cut = data.split is not None or (data.valid is None and data.share > 0)
    return None if cut else "is for a part that is cut from the training file, and none is; remove it"


def _augment(spec: Spec) -> str | None:
    if (why := _tasks("classification", "regression", "tagging", "transcription")(spec)) is not None:
        return why
    return "is for separate sequences, not for streams; remove it, or set batch.tokens" if spec.streams else None


def _reset(spec: Spec) -> str | None:
    if (why := _tasks("language")(spec)) is not None:
        return why
    return None if spec.streams else "is for streams: separate sequences start anew in any case; remove it"


def _dropout(spec: Spec) -> str | None:
    model = spec.model
    own = (model.dropout_input, model.dropout_hidden, model.dropout_output)
    return None if None in own else "is the default of dropout_input, dropout_hidden and dropout_output, which are all set; remove it"


def _dropout_hidden(spec: Spec) -> str | None:
    return "is between layers, but model.layers=1; remove it, or use dropout_output" if spec.model.layers == 1 else None


def _front(spec: Spec) -> str | None:
    return "is for model.front, which is none; remove it, or set a front" if spec.model.front == "none" else None


def _locked(spec: Spec) -> str | None:
    model = spec.model
    some = model.dropout or model.dropout_hidden or model.dropout_input or model.dropout_output
    return None if some else "is for dropout, which is 0 everywhere; remove it, or set model.dropout"


def _init_bias(spec: Spec) -> str | None:
    if spec.model.softmax == "adaptive":
        return "is for the bias of a full softmax, but model.softmax=adaptive; remove it"
    return _tasks("language", "classification", "tagging")(spec)


_pool = _tasks("classification", "regression")


def _characters(spec: Spec) -> str | None:
    if spec.model.characters != "none" or spec.model.crf == "auto":
        return None  # or decided by the labels (`idle_with`)
    return "is for model.characters, which is none; remove it, or set model.characters=cnn"


ACTS: Mapping[str, Rule] = {
    **dict.fromkeys(("data.tokens", "data.vocabulary", "data.min_count"), _not_forecasting()),
    "data.text": _not_forecasting("set data.columns to the columns to read"),
    "data.label": _tasks("classification", "regression", "tagging", "transcription"),
    "data.multi_label": _tasks(*LABELS),
    "data.each_step": _tasks("regression"),
    "data.warmup": _each_step,
    "data.scheme": lambda spec: None if spec.model.crf else "is for model.crf, which is off; remove it, or set model.crf=true",
    "data.reset": _reset,
    "data.share": _share,
    "data.split": lambda spec: (
        None if spec.reads_series else f"is for forecasting, not for {spec.task}; set data.valid and data.test to files, or use data.share"
    ),
    **dict.fromkeys(("data.columns", "data.targets", "data.time", "data.series", "data.repeats", "data.frequency"), _series),
    **dict.fromkeys(("data.channels", "data.transform"), _tasks("forecasting")),
    **dict.fromkeys(("data.calendar", "data.categorical", "data.static", "data.missing"), _series),
    **dict.fromkeys(("data.horizon", "data.season", "data.residual", "data.scale", "data.known"), _tasks("forecasting")),
    **dict.fromkeys(("data.quantiles", "data.bands", "data.distribution"), _tasks("forecasting")),
    "data.lowercase": _not_forecasting(),
    "data.word_length": _characters,
    "data.context": _context,
    "data.augment": _augment,
    "data.standardize": _tasks("classification", "tagging", "transcription", "forecasting", "regression"),
    "model.embedding": _not_forecasting(),
    "model.dropout_words": _not_forecasting(),
    "model.dropout_rare": _not_forecasting(),
    "model.freeze_embedding": _not_forecasting(),
    "model.characters": lambda spec: _not_forecasting()(spec) or _tasks("classification", "regression", "tagging")(spec),
    **dict.fromkeys(("model.character_embedding", "model.character_width"), _characters),
    "model.dropout": _dropout,
    "model.dropout_hidden": _dropout_hidden,
    **dict.fromkeys(("model.front_dropout", "model.front_norm", "model.front_scales"), _front),
    "model.locked": _locked,
    "model.init_bias": _init_bias,
    "model.softmax": _tasks("language"),
    "model.pool": lambda spec: "is for one target per sequence, not for data.each_step; remove it" if spec.each_step else _pool(spec),
    "model.upsample": _tasks("transcription"),
    "model.linear": lambda spec: None if spec.mixes else _tasks("forecasting")(spec),
    "batch.windows": _series,
    "batch.warmup": lambda spec: None if spec.batch.windows == "random" else "is for batch.windows=random; remove it",
    "train.momentum": _optimizers("sgd"),
    "train.betas": _optimizers("adam", "adamw"),
    "train.nonmono": _optimizers("ntasgd"),
    "train.hold": _schedules("cosine", "linear"),
    "train.factor": _schedules("plateau", "step"),
    "train.patience": _patience,
    "train.every": _schedules("step"),
    "train.min_lr": _min_lr,
    **dict.fromkeys(("train.class_weights", "train.label_smoothing"), _tasks(*LABELS)),
    "train.threshold": lambda spec: None if spec.data.multi_label else "is for data.multi_label; remove it",
    "train.loss": _loss,
}
BY_LABELS = ("data.scheme", "data.word_length", "model.character_embedding", "model.character_width")  # whether they act, if left open
# Keys that act in any spec, or are refused by the section they are in. Those of train.sync are in `sync_keys`.
ALWAYS: Mapping[str, tuple[str, ...]] = {
    "data": ("train", "valid", "test", "format", "encoding", "separator", "decimal", "read", "weight", "cache"),
    "model": (
        *("hidden", "layers", "projection", "bidirectional", "dropout_input", "dropout_output", "weight_drop", "tie", "cutoffs"),
        *("crf", "word_scores"),
        *("recurrent_dropout", "zoneout", "cell_norm", "heads"),
        *("cell", "front", "layer_norm", "learned_carry", "init", "init_scale", "forget_bias", "pretrained"),
    ),
    "batch": ("lanes", "steps", "vary", "tokens", "eval_lanes"),
    "train": (
        *("optimizer", "lr", "weight_decay", "clip", "epochs", "max_steps", "accumulate", "precision"),
        *("seed", "schedule", "warmup", "alpha", "beta", "evaluate_every", "best", "weights", "early_stop", "on_nan", "log_every", "track"),
        *("snapshot_every", "keep", "sync", "ema"),
    ),
}


def is_set(spec: Spec, key: str) -> bool:
    """True if a key has another value than its default."""
    section, _, name = key.partition(".")
    values = getattr(spec, section)
    return bool(getattr(values, name) != type(values).model_fields[name].default)


def idle(spec: Spec, given: Collection[str]) -> dict[str, str]:
    """The keys among those given that have another value than their default and act on nothing, and why."""
    return {key: why for key, rule in ACTS.items() if key in given and is_set(spec, key) and (why := rule(spec)) is not None}


def idle_in_files(spec: Spec, formats: Set[str]) -> Iterator[str]:
    """Lines for keys that act on nothing in files of these formats. Beside objects, which have none, they act on files to predict from."""
    found = _and([name for kind, name in FORMATS.items() if kind in formats]) if formats else ""
    for key, acts_on in READ_FROM.items():
        if formats and is_set(spec, f"data.{key}") and not formats & set(acts_on):
            meant = "files" if key == "format" else _and([FORMATS[name] for name in acts_on])
            yield f"data.{key} is for {meant}, but the data is {found}; remove it"


def idle_with(spec: Spec, facts: DataFacts, *, text: bool, valid: bool, by_change: bool) -> Iterator[str]:
    """Lines for keys that act on nothing with the data at hand. `text`: it has to be cut into tokens; `valid`: there is validation data;
    `by_change`: series are scaled by their changes.
    """
    if spec.task == "forecasting" and spec.data.scale == "change" and not by_change:
        yield "data.scale=change is the unit of each of several series, but the data is one series, or not standardised; remove it"
    if not spec.reads_series:
        kind = "numbers" if not facts.vocabulary else "tokens already"
        by_default = spec.mixes and spec.data.tokens == "word"
        of_text = () if text or by_default else ("data.tokens",)
        names = ("embedding", "dropout_words", "dropout_rare", "freeze_embedding")
        of_tokens = () if facts.vocabulary else ("data.vocabulary", "data.min_count", *(f"model.{name}" for name in names))
        for key in (*of_text, *of_tokens):
            if is_set(spec, key):
                yield f"{key} is for text{' and tokens' * (key not in of_text)}, but the data is {kind}; remove it"
    for key, why in idle(spec, BY_LABELS).items():
        yield f"{key} {why}"
    if spec.model.front == "none" and is_set(spec, "model.front_dropout"):
        yield "model.front_dropout is for a front, which such short sequences lack unless it is set; set one, or remove it"
    if spec.task in ("regression", "forecasting") and not facts.vocabulary and not facts.categories and is_set(spec, "model.init_scale"):
        yield "model.init_scale is for embeddings and softmaxes, and this model has none; remove it"
    for key in ("data.standardize", "data.augment"):
        if facts.vocabulary and spec.task != "language" and is_set(spec, key):
            yield f"{key} is for numbers, but the data is tokens; remove it"
    if valid:
        return
    train = spec.train
    for setting, asked in (
        ("early_stop", bool(train.early_stop)),
        ("schedule=plateau", train.schedule == "plateau"),
        ("optimizer=ntasgd", train.optimizer == "ntasgd"),
        (f"best={train.best}", is_set(spec, "train.best")),
    ):
        if asked:
            yield f"train.{setting} goes by validation data, but there is none; set data.valid to a file, or data.share above 0"


def idle_beside_own(spec: Spec) -> Iterator[str]:
    """Lines for keys that describe the built-in model, if the user passes one of their own."""
    keys = (*(f"model.{name}" for name in type(spec.model).model_fields), "train.loss", "train.class_weights", "train.label_smoothing")
    for key in (*keys, "data.distribution"):
        if is_set(spec, key):
            yield f"{key} is for the model that a spec describes, but you pass a model of your own; remove it"
