"""Warnings, given before the first step, about runs that are valid but probably a waste of time; one line each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.files.label_sets import NONE
from carrywave.data.order import Order
from carrywave.data.sequences import Sequences
from carrywave.data.text.tokenizers import UNKNOWN
from carrywave.spec.spec import Spec

MOST_SEQUENCES, MOST_ROWS = 4096, 1 << 22  # at most this many are examined
FLAT = 0.01  # a standardised sequence with a smaller standard deviation is nearly constant
MANY_FLAT = 0.1  # fraction of nearly constant sequences that is worth a warning
MANY_UNKNOWN, MANY_UNTRAINED = 0.1, 0.01  # fraction of valid worth a warning: <unk>; and tokens, <unk> included, that train never shows


def warnings_of(spec: Spec, codec: Codec, order: Order, train: Sequences, valid: Sequences | None) -> list[str]:
    """Return all warnings that apply."""
    if codec.word_length:
        train = replace(train, inputs=train.tokens)
        valid = None if valid is None else replace(valid, inputs=valid.tokens)
    lines = [one_step(spec, order), too_few_epochs(spec, order), one_label(codec), flat_sequences(spec, codec, train)]
    lines += [] if spec.model.dropout_rare else [unknown_tokens(codec, train, valid)]  # <unk> is learned from rare words
    lines += [untrained_tokens(codec, train, valid), single_words(spec, codec, train)]
    return [each for each in lines if each is not None]


def single_words(spec: Spec, codec: Codec, train: Sequences) -> str | None:
    """Warn if most texts with one label each are single words, as names are, and texts in scripts without spaces."""
    if not spec.mixes or codec.kind != "word" or np.median(train.lengths) > 1:
        return None
    return "most texts are a single word, since words are separated by white space; set data.tokens=char to read their characters"


def one_step(spec: Spec, order: Order) -> str | None:
    """Warn if an epoch is a single step, and epochs alone say how many there are."""
    if spec.train.max_steps is not None or -(-order.num_steps(0) // spec.train.accumulate) > 1:
        return None
    if order.num_steps(0) > 1:
        smaller = f"train.accumulate={spec.train.accumulate}"
    else:
        smaller = f"batch.lanes={spec.lanes} or batch.steps={spec.steps}" if spec.streams else f"batch.tokens={spec.tokens}"
    return f"an epoch is a single step, so train.epochs={spec.train.epochs} is also the number of steps; make {smaller} smaller"


def too_few_epochs(spec: Spec, order: Order) -> str | None:
    """Warn if the last epoch ends before train.max_steps."""
    epochs, most = spec.train.epochs, spec.train.max_steps
    if most is None:
        return None
    counted = epochs if spec.batch.vary else 1  # windows of varying length: epochs differ
    steps = sum(-(-order.num_steps(epoch) // spec.train.accumulate) for epoch in range(counted)) * epochs // counted
    if steps >= most:
        return None
    ends = f"train.epochs={epochs} ends the run after {steps:,} step{'s' * (steps != 1)}"
    return f"{ends}, before train.max_steps={most}; raise train.epochs to reach it"


def one_label(codec: Codec) -> str | None:
    """Warn if there is nothing to tell apart."""
    if len(codec.labels) != 1 or codec.label_sets != NONE:  # of several, one alone may hold or not
        return None
    return (
        f"every label in train is {codec.labels[0]!r}, so there is nothing to learn; add rows with other labels, or name another data.label"
    )


def flat_sequences(spec: Spec, codec: Codec, train: Sequences) -> str | None:
    """Warn if many sequences are nearly constant once scaled by statistics over all sequences."""
    if spec.reads_series or codec.size or codec.own_scale or not codec.columns:
        return None
    spread = [float(rows.std(axis=0).max()) for rows in _some(train) if len(rows) > 1]
    flat = sum(value < FLAT for value in spread)
    if not spread or flat < MANY_FLAT * len(spread):
        return None
    scaled = "after scaling" if spec.data.standardize else "without scaling"
    share = f"{flat / len(spread):.0%} of the sequences in train are nearly constant {scaled} (standard deviation below {FLAT})"
    return f"{share}; if their size does not matter, set data.standardize=sequence"


def unknown_tokens(codec: Codec, train: Sequences, valid: Sequences | None) -> str | None:
    """Warn if the vocabulary hardly covers valid."""
    if UNKNOWN not in codec.vocabulary or valid is None:
        return None
    number = codec.vocabulary.index(UNKNOWN)
    in_valid, in_train = _share(valid, number), _share(train, number)
    if in_valid < (MANY_UNKNOWN if in_train else MANY_UNTRAINED):
        return None
    why = f"against {in_train:.1%} in train" if in_train else "but train has none, so nothing is learned about it"
    remedy = "set a larger data.vocabulary" if in_train else "set model.dropout_rare=0.5 or data.min_count=2"
    return f"{in_valid:.1%} of the tokens in valid are {UNKNOWN}, {why}; {remedy}, or data.tokens=bpe"


def untrained_tokens(codec: Codec, train: Sequences, valid: Sequences | None) -> str | None:
    """Warn if valid has many tokens that are in the vocabulary, which is learned from the whole file, but never occur in train."""
    if not codec.size or codec.kind in ("byte", "bpe") or valid is None:
        return None
    if len(train) > MOST_SEQUENCES or int(train.lengths.sum()) > MOST_ROWS:
        return None  # a sample of train says nothing about the rest
    trained = np.zeros(codec.size, np.bool_)
    for start, length in zip(train.starts, train.lengths, strict=True):
        trained[train.inputs[start : start + length]] = True
    if UNKNOWN in codec.vocabulary:
        trained[codec.vocabulary.index(UNKNOWN)] = True  # reported by `unknown_tokens`
    counts = [(int((~trained[rows.astype(np.int64)]).sum()), len(rows)) for rows in _some(valid)]
    share = sum(count for count, _ in counts) / max(sum(total for _, total in counts), 1)
    if share < MANY_UNTRAINED:
        return None
    remedy = "; set data.min_count=2 to learn <unk> instead" if codec.kind == "word" else "; use more data"
    return f"{share:.1%} of the tokens in valid never occur in train, so nothing is learned about them{remedy}"


def short_of_season(spec: Spec, rows: NDArray[np.int64]) -> str | None:
    """Return a line if some forecasts have less than a season of rows before them, though the model adds to the last season."""
    short, data = int((rows < spec.data.season).sum()), spec.data
    if spec.starts_from != "season" or not short:
        return None
    many = f"{short:,} of {len(rows):,} forecasts have" if len(rows) > 1 else "the forecast has"
    fact = f"{many} less than a season ({data.season} rows) before the first step, so the last value stands for the last season"
    return f"{fact}, which the model has hardly seen; pass earlier rows too"


def _some(data: Sequences) -> Iterator[NDArray[np.float64]]:
    """Yield the rows of evenly spaced sequences, as many as can be examined quickly."""
    rows = 0
    for number in np.unique(np.linspace(0, len(data) - 1, min(len(data), MOST_SEQUENCES)).astype(np.int64)):
        start, length = int(data.starts[number]), int(data.lengths[number])
        yield np.asarray(data.inputs[start : start + min(length, MOST_ROWS)], dtype=np.float64)
        rows += length
        if rows >= MOST_ROWS:
            return


def _share(data: Sequences, token: int) -> float:
    counts = [(int((rows == token).sum()), len(rows)) for rows in _some(data)]
    return sum(count for count, _ in counts) / max(sum(total for _, total in counts), 1)
