"""What a search tries: choices and ranges for keys of a spec, from words such as `train.lr=1e-4..1e-2` or from Python."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from carrywave.errors import SpecError
from carrywave.spec.load import with_overrides
from carrywave.spec.spec import Spec
from carrywave.spec.yaml_text import NUMBER, parse_yaml

RANGE = re.compile(rf"\s*({NUMBER.pattern})\s*\.\.\s*({NUMBER.pattern})\s*")
DIGITS = 4  # of numbers that are drawn from a range
LOG_FACTOR = 10  # a range of positive numbers that spans this factor is searched by orders of magnitude
MOST_COMBINATIONS = 2000  # that are looked through for one that a spec accepts
# Keys that change what is measured, so that the values of two trials could not be compared, by task ("" for all) and by metric.
MEASURE = {
    "": (
        *("task", "train.best", "data.train", "data.valid", "data.test", "data.share", "data.split", "data.label", "data.text"),
        "data.weight",
    ),
    "language": ("data.tokens", "data.vocabulary", "data.min_count"),
    "forecasting": ("data.targets", "data.horizon", "data.quantiles", "data.standardize", "data.missing", "data.transform", "data.scale"),
    "regression": ("data.standardize", "data.targets", "data.each_step", "data.warmup"),
    "loss": ("train.loss", "train.class_weights", "train.label_smoothing", "data.distribution"),
}


@dataclass(frozen=True)
class Choices:
    """One of several values."""

    values: tuple[Any, ...]

    @property
    def samples(self) -> tuple[Any, ...]:
        """The values that are checked before the search."""
        return self.values

    def to_json(self) -> Any:
        """As a plain value."""
        return list(self.values)


@dataclass(frozen=True)
class Range:
    """Any number from `low` to `high`, a whole one if both are."""

    low: float
    high: float

    @property
    def samples(self) -> tuple[Any, ...]:
        """The values that are checked before the search."""
        return self.low, self.high

    @property
    def whole(self) -> bool:
        """True if only whole numbers are tried."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def log(self) -> bool:
        """True if orders of magnitude are equally likely, rather than numbers."""
        return self.low > 0 and self.high >= LOG_FACTOR * self.low

    def rounded(self, value: float) -> float:
        """The number with a few digits, within the range."""
        return value if self.whole else min(max(float(f"{value:.{DIGITS}g}"), float(self.low)), float(self.high))

    def to_json(self) -> Any:
        """As a plain value."""
        return {"low": self.low, "high": self.high}


Space = Mapping[str, Choices | Range]


def space_of(words: Sequence[str]) -> tuple[Space, list[str]]:
    """What is searched, from words `key=value,value` and `key=low..high`; and the words `key=value`, which are the same for all trials."""
    space: dict[str, Choices | Range] = {}
    fixed: list[str] = []
    for word in words:
        key, _, text = word.partition("=")
        found = RANGE.fullmatch(text)
        if found is not None:
            space[key] = _range(key, *(parse_yaml(each, word) for each in found.groups()))
            continue
        values = parse_yaml(f"[{text}]", word) if any(map(str.isalnum, text)) else []
        if isinstance(values, list) and len(values) > 1:
            space[key] = _choices(key, values)
        else:
            fixed.append(word)
    return space, fixed


def space_from(given: Mapping[str, Any]) -> Space:
    """What is searched, from Python: a list is choices, a tuple of two numbers is a range."""
    space: dict[str, Choices | Range] = {}
    for key, values in given.items():
        if isinstance(values, tuple) and len(values) == 2:
            space[key] = _range(key, *values)
        elif isinstance(values, list):
            space[key] = _choices(key, values)
        else:
            raise SpecError(f"{key} is {values!r:.60}; pass a list of choices, or a tuple (low, high)")
    return space


def _range(key: str, low: Any, high: Any) -> Range:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each) for each in (low, high))
    if not numbers or not low < high:
        raise SpecError(f"{key} has the range {low!r:.40} to {high!r:.40}; use two finite numbers, the lower one first")
    return Range(low, high)


def _choices(key: str, values: Sequence[Any]) -> Choices:
    try:
        written = [json.dumps(value, allow_nan=False) for value in values]
    except (TypeError, ValueError):
        raise SpecError(f"{key} has a choice that a spec cannot hold; use numbers, text, true, false and lists") from None
    if len(values) < 2 or len(set(written)) < len(written):
        raise SpecError(
            f"{key} has {'the same choice twice' if len(values) > 1 else 'fewer than two choices'}; list each once, at least two"
        )
    return Choices(tuple(values))


def read_space(values: Mapping[str, Any]) -> Space:
    """The space from what `to_json` wrote."""
    return {key: Choices(tuple(value)) if isinstance(value, list) else Range(value["low"], value["high"]) for key, value in values.items()}


def overrides_of(keys: Mapping[str, Any]) -> list[str]:
    """The values of a trial as `key=value`."""
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def check_space(base: Mapping[str, Any], space: Space) -> None:
    """Refuse, before anything is trained, unknown keys, values that the spec never accepts, and keys that change what is measured."""
    if not space:
        raise SpecError("nothing is searched; name keys with choices or a range, as in model.hidden=64,128 train.lr=1e-4..1e-2")
    for key, values in space.items():
        for value in values.samples:
            spec = _accepted(base, space, key, value)
        measure = spec.train.best
        stays = MEASURE[""] + MEASURE.get(spec.task, ()) + MEASURE.get(measure, ())
        if key == "train.seed" and spec.data.valid is None and not spec.streams:
            raise SpecError("train.seed also picks what is held out of train, so trials could not be compared; set data.valid")
        if key in stays:
            raise SpecError(f"{key} changes what {measure} measures, so trials could not be compared; search over other keys")


def _accepted(base: Mapping[str, Any], space: Space, key: str, value: Any) -> Spec:
    """The spec with a value, and any values of the other keys that go with it; raises what is wrong with the first ones otherwise."""
    others = [(each, values.samples) for each, values in space.items() if each != key]
    first: SpecError | None = None
    for some in islice(product(*(samples for _, samples in others)), MOST_COMBINATIONS):
        try:
            tried = {name: chosen for (name, _), chosen in zip(others, some, strict=True)}
            return spec_with(base, {**tried, key: value})
        except SpecError as error:
            first = first or error
    assert first is not None  # there is at least one combination
    raise first


def spec_with(base: Mapping[str, Any], keys: Mapping[str, Any]) -> Spec:
    """The spec of a trial."""
    return with_overrides(_copied(base), overrides_of(keys))


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy: overrides are set in place."""
    return dict(json.loads(json.dumps(values)))


def combinations(space: Space) -> Iterator[dict[str, Any]] | None:
    """Every combination of choices, in order; None if there is a range, of which there are too many."""
    if not all(isinstance(values, Choices) for values in space.values()):
        return None
    return (dict(zip(space, some, strict=True)) for some in product(*(values.samples for values in space.values())))
