"""What a search tries: Optuna's distributions for keys of a spec, from words such as `train.lr=1e-4..1e-2` or from Python.

A choice is held as JSON, since Optuna's choices are plain values and a spec's may be lists.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import islice, product
from types import ModuleType
from typing import TYPE_CHECKING, Any

from carrywave.errors import SpecError, UserError
from carrywave.spec.load import with_overrides
from carrywave.spec.spec import Spec
from carrywave.spec.yaml_text import NUMBER, parse_yaml

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

RANGE = re.compile(rf"\s*({NUMBER.pattern})\s*\.\.\s*({NUMBER.pattern})\s*")
LOG_FACTOR = 10  # a range of positive numbers that spans this factor is searched by orders of magnitude
MOST_COMBINATIONS = 2000  # that are looked through for one that a spec accepts
# Keys that change what is measured, so that the values of two trials could not be compared, by task ("" for all) and by metric.
MEASURE = {
    "": (
        *("task", "train.best", "data.train", "data.valid", "data.test", "data.share", "data.split", "data.label", "data.text"),
        "data.weight",
    ),
    "language": ("data.tokens", "data.vocabulary", "data.min_count"),
    "forecasting": ("data.targets", "data.horizon", "data.quantiles", "data.standardize", "data.missing", "data.transform"),
    "regression": ("data.standardize", "data.targets", "data.each_step", "data.warmup"),
    "loss": ("train.loss", "train.class_weights", "train.label_smoothing", "data.distribution"),
}

Space = Mapping[str, "BaseDistribution"]


def library() -> ModuleType:
    """Optuna, silent."""
    try:
        import optuna
    except ImportError as error:
        raise UserError("a search needs the package optuna, which is not installed; pip install 'carrywave[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def space_of(words: Sequence[str]) -> tuple[Space, list[str]]:
    """What is searched, from words `key=value,value` and `key=low..high`; and the words `key=value`, which are the same for all trials."""
    space: dict[str, BaseDistribution] = {}
    fixed: list[str] = []
    for word in words:
        key, _, text = word.partition("=")
        found = RANGE.fullmatch(text)
        values = parse_yaml(f"[{text}]", word) if found is None and any(map(str.isalnum, text)) else []
        if found is not None:
            space[key] = _range(key, *(parse_yaml(each, word) for each in found.groups()))
        elif isinstance(values, list) and len(values) > 1:
            space[key] = _choices(key, values)
        else:
            fixed.append(word)
    return space, fixed


def space_from(given: Mapping[str, Any]) -> Space:
    """What is searched, from Python: a list is choices, a tuple of two numbers is a range."""
    space: dict[str, BaseDistribution] = {}
    for key, values in given.items():
        if isinstance(values, tuple) and len(values) == 2:
            space[key] = _range(key, *values)
        elif isinstance(values, list):
            space[key] = _choices(key, values)
        else:
            raise SpecError(f"{key} is {values!r:.60}; pass a list of choices, or a tuple (low, high)")
    return space


def _range(key: str, low: Any, high: Any) -> BaseDistribution:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each) for each in (low, high))
    if not numbers or not low < high:
        raise SpecError(f"{key} has the range {low!r:.40} to {high!r:.40}; use two finite numbers, the lower one first")
    whole, log = isinstance(low, int) and isinstance(high, int), low > 0 and high >= LOG_FACTOR * low
    kinds = library().distributions
    made: BaseDistribution = kinds.IntDistribution(low, high, log=log) if whole else kinds.FloatDistribution(low, high, log=log)
    return made


def _choices(key: str, values: Sequence[Any]) -> BaseDistribution:
    try:
        written = [json.dumps(value, allow_nan=False) for value in values]
    except (TypeError, ValueError):
        raise SpecError(f"{key} has a choice that a spec cannot hold; use numbers, text, true, false and lists") from None
    if len(values) < 2 or len(set(written)) < len(written):
        fact = "the same choice twice" if len(values) > 1 else "fewer than two choices"
        raise SpecError(f"{key} has {fact}; list each once, at least two")
    made: BaseDistribution = library().distributions.CategoricalDistribution(written)
    return made


def samples_of(values: BaseDistribution) -> list[Any]:
    """Some of what may be drawn: every choice, or the ends of a range."""
    choices = getattr(values, "choices", None)
    return [values.low, values.high] if choices is None else [json.loads(each) for each in choices]  # type: ignore[attr-defined]


def value_of(values: BaseDistribution, drawn: Any) -> Any:
    """What a key is set to for what was drawn: a number of a range has four digits."""
    if hasattr(values, "choices"):
        return json.loads(drawn)
    return drawn if isinstance(drawn, int) else min(max(float(f"{drawn:.4g}"), values.low), values.high)  # type: ignore[attr-defined]


def combinations(space: Space) -> list[dict[str, Any]] | None:
    """Every combination of choices, as Optuna draws them; None if there is a range, of which there are too many."""
    if not all(hasattr(values, "choices") for values in space.values()):
        return None
    return [dict(zip(space, some, strict=True)) for some in product(*(values.choices for values in space.values()))]  # type: ignore[attr-defined]


def overrides_of(keys: Mapping[str, Any]) -> list[str]:
    """The values of a trial as `key=value`."""
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def spec_with(base: Mapping[str, Any], keys: Mapping[str, Any]) -> Spec:
    """The spec of a trial."""
    return with_overrides(_copied(base), overrides_of(keys))


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy: overrides are set in place."""
    return dict(json.loads(json.dumps(values)))


def check_space(base: Mapping[str, Any], space: Space) -> Spec:
    """Refuse, before anything is trained, unknown keys, values that the spec never accepts, and keys that change what is measured; returns
    the spec with one of the values.
    """
    if not space:
        raise SpecError("nothing is searched; name keys with choices or a range, as in model.hidden=64,128 train.lr=1e-4..1e-2")
    for key, values in space.items():
        for value in samples_of(values):
            spec = _accepted(base, space, key, value)
        measure = spec.train.best
        if key == "train.seed" and spec.data.valid is None and not spec.streams:
            raise SpecError("train.seed also picks what is held out of train, so trials could not be compared; set data.valid")
        if key in MEASURE[""] + MEASURE.get(spec.task, ()) + MEASURE.get(measure, ()):
            raise SpecError(f"{key} changes what {measure} measures, so trials could not be compared; search over other keys")
    if spec.data.valid is None and spec.data.split is None and not spec.data.share:
        raise SpecError("trials are judged on validation data, and the spec has none; set data.valid, or data.share above 0")
    if spec.data.train is None:
        raise SpecError("trials are trained by processes of their own, which read the data from files; set data.train")
    return spec


def _accepted(base: Mapping[str, Any], space: Space, key: str, value: Any) -> Spec:
    """The spec with a value, and any values of the other keys that go with it; raises what is wrong with the first ones otherwise."""
    others = [(each, samples_of(values)) for each, values in space.items() if each != key]
    first: SpecError | None = None
    for some in islice(product(*(samples for _, samples in others)), MOST_COMBINATIONS):
        try:
            return spec_with(base, {name: chosen for (name, _), chosen in zip(others, some, strict=True)} | {key: value})
        except SpecError as error:
            first = first or error
    assert first is not None  # there is at least one combination
    raise first
