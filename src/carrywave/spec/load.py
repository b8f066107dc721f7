"""Loads a spec: a YAML file, then `key=value` overrides, then validation. An error becomes one line with the problem and the remedy."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from carrywave.errors import SpecError, from_system, remedy_for, short
from carrywave.spec.describe import keys
from carrywave.spec.spec import Spec
from carrywave.spec.task_defaults import with_task_defaults
from carrywave.spec.yaml_text import dump_yaml, parse_word, parse_yaml

# Values that stand for a whole section; overriding a key inside the section replaces them.
OPENED_BY_OVERRIDE = {"plan": "auto", "train.class_weights": "balanced"}
DATA_FILES = (".csv", ".tsv", ".parquet", ".jsonl", ".txt")  # that people pass in place of a spec
SHOWN_CHARACTERS = 60
ELSEWHERE = {  # what Keras, PyTorch, Darts or NeuralForecast call it: our keys
    "units": ("model.hidden",),
    "hidden_dim": ("model.hidden",),
    "learning_rate": ("train.lr",),
    "batch_size": ("batch.lanes", "batch.tokens"),
    "bptt": ("batch.steps",),
    "seq_len": ("batch.steps",),
    "input_size": ("batch.steps",),
    "h": ("data.horizon",),
    "validation_split": ("data.share",),
    "monitor": ("train.best",),
}


def load(path: Path | None = None, overrides: Sequence[str] = ()) -> Spec:
    """Read a YAML file, apply `key=value` overrides, and validate. Without a file, start from all defaults.

    >>> import carrywave as cw
    >>> cw.load_spec(None, ["task=forecasting", "data.horizon=12"]).data.horizon
    12
    """
    return with_overrides({} if path is None else read_values(path), overrides)


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str], *, defaults: bool = True) -> Spec:
    """Apply `key=value` overrides to the values of a spec, and validate; `defaults` as in `parse`."""
    return parse(set_overrides(values, overrides), defaults=defaults)


def set_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The values of a spec with `key=value` overrides set in them, not yet validated."""
    tree = dict(values)
    for override in overrides:
        _override(tree, override)
    return tree


def load_own(path: Path) -> Spec:
    """Read a spec that a run has written."""
    return parse(read_own(path), defaults=False)


def read_own(path: Path) -> dict[str, Any]:
    """The values in a spec that a run has written; one that has lost its end is refused: what is missing would take its default."""
    values = read_values(path)
    if "plan" not in values:  # the last section
        raise SpecError(f"{path} is damaged: its end is missing; restore it, for example from the metadata of weights.safetensors")
    return values


def parse(values: Mapping[str, Any], *, defaults: bool = True) -> Spec:
    """Validate a mapping of plain values, such as `{"model": {"hidden": 256}}`, as a spec, with the defaults of its task.

    Without `defaults`, a key that is not set has the default of its field, whatever the task; a spec that a run has written has all keys.
    """
    # Via JSON, because strict validation of JSON accepts a list as a tuple, yet still rejects text or booleans as numbers.
    try:
        text = json.dumps({key: value for key, value in values.items() if value is not None}, default=_plain)  # None: an empty section
    except (TypeError, ValueError) as error:
        raise SpecError(f"the spec cannot be read: {error}; use numbers, text, lists and mappings") from None
    tree = json.loads(text)
    problems = list(_unknown(tree))
    if not problems:
        try:
            spec = Spec.model_validate_json(text, strict=True)
            return with_task_defaults(spec) if defaults else spec
        except ValidationError as error:
            problems = _explain(error, tree)
    raise SpecError(problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))


def _plain(value: object) -> object:
    """Convert what JSON cannot represent: a section object, a NumPy number, a path or a date."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    return value.item() if hasattr(value, "item") else str(value)


def dump(spec: Spec) -> str:
    """The fully resolved spec as YAML; `load` reads it back as an equal spec."""
    return dump_yaml(spec.model_dump(mode="json"))


def read_values(path: Path) -> dict[str, Any]:
    """The values in a spec file, as they stand there."""
    if path.is_dir():
        what, remedy = ("run", f"pass it as --run {path}") if (path / "spec.yaml").is_file() else ("folder", "pass the path of a spec file")
        raise SpecError(f"{path} is a {what}, not a spec; {remedy}")
    if path.exists() and set(path.suffixes) & set(DATA_FILES):
        raise SpecError(f"{path} is a data file, not a spec; to train on it, pass data.train={path} instead")
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8-sig"), str(path))
    except FileNotFoundError:
        raise SpecError(f"{path} does not exist; pass the path of a spec file, or key=value") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is not UTF-8 text; pass a spec file in YAML") from None
    except OSError as error:
        raise from_system(error, SpecError)(f"{path} cannot be read: {error.strerror}; {remedy_for(error, 'make it readable')}") from None
    if not isinstance(tree, dict | None):
        raise SpecError(f"{path} contains {_show(tree)}, not a mapping; write keys such as model: {{hidden: 256}}")
    return tree or {}


def _override(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key in place; later overrides win."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise SpecError(f"{short(override)!r} is not key=value; write for example model.hidden=256")
    # Below a key with names that users choose, the rest is a single name, dots included.
    free = next((key.name for key in keys().values() if key.free and dotted.startswith(f"{key.name}.")), None)
    if free is None and dotted not in keys():
        raise SpecError(_suggest(dotted))
    value = parse_word(text, short(override), is_text=dotted in keys() and keys()[dotted].text)
    *parents, last = dotted.split(".") if free is None else [*free.split("."), dotted[len(free) + 1 :]]
    section, name = tree, ""
    for parent in parents:
        name = f"{name}.{parent}" if name else parent
        below = section.get(parent)
        if below is None or below == OPENED_BY_OVERRIDE.get(name):
            below = section[parent] = {}
        if not isinstance(below, dict):
            raise SpecError(f"{name} is {_show(below)}, so {dotted} cannot be set; make {name} a section")
        section = below
    section[last] = value


def _unknown(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for field, value in tree.items():
        key = keys().get(prefix + field)
        if key is None:
            yield _suggest(prefix + field)
        elif key.section and isinstance(value, Mapping):
            yield from _unknown(value, f"{key.name}.")


def _suggest(dotted: str) -> str:
    """The message for an unknown key, with the closest known key."""
    section, _, last = dotted.rpartition(".")
    known = list(keys())
    beside = [name for name in known if name.rpartition(".")[0] == section] or [name for name in known if "." not in name]
    meant = (
        [name for name in known if name.rpartition(".")[2] == last]
        or list(ELSEWHERE.get(last, ()))
        or _nearest(last, beside)
        or difflib.get_close_matches(dotted, known, n=1, cutoff=0.75)
        or _nearest(last, known)
    )
    if meant:
        return f"unknown key {dotted}; did you mean {' or '.join(meant)}?"
    return f"unknown key {short(dotted)}; use one of {', '.join(beside)}"


def _nearest(last: str, names: Sequence[str]) -> list[str]:
    """The name whose last part is closest, if any; whole names would match on their common section prefix."""
    by_last_part = {name.rpartition(".")[2]: name for name in names}
    return [by_last_part[match] for match in difflib.get_close_matches(last, by_last_part, n=1)]


def _explain(error: ValidationError, tree: Mapping[str, Any]) -> list[str]:
    """One line per invalid field; of a union, only the error of the branch that matched best."""
    by_field: dict[str, list[tuple[bool, str, object, ErrorDetails]]] = {}
    for detail in error.errors(include_url=False):
        name, place, value = _locate(detail["loc"], tree)
        of_type = detail["type"].endswith(("_type", "literal_error", "int_from_float"))
        by_field.setdefault(name, []).append((not of_type, place, value, detail))
    # What is wrong inside of a section is not wrong with the section, whatever another branch of the union says.
    fields = [name for name in by_field if not any(other.startswith(f"{name}.") for other in by_field)]
    return [_sentence(name, *max(by_field[name], key=lambda one: (len(one[1]), one[0]))[1:]) for name in fields]


def _locate(location: tuple[int | str, ...], tree: Mapping[str, Any]) -> tuple[str, str, object]:
    """The key an error refers to, the location in its value (`model.hidden[1]`), and the value found there.

    Pydantic inserts the name of the union branch into the location; any part that is not in the tree is such a name, and is skipped.
    """
    name, place, value = "", "", tree
    for step in location:
        if isinstance(value, dict) and step in value:
            place, value = f"{place}.{step}" if place else str(step), value[step]
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            place, value = f"{place}[{step}]", value[step]
        if place in keys():
            name = place
    return name, place, value


def _sentence(name: str, place: str, value: object, detail: ErrorDetails) -> str:
    if detail["type"] == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
        return message if not place or message.startswith(f"{place}.") else f"{place}.{message}"
    key, why = keys().get(name), ""
    if key is None:
        return f"the spec cannot be read: {detail['msg']}; use plain text, numbers, lists and sections"
    if "number" in key.takes and isinstance(value, str) and detail["type"] != "literal_error":
        why = ", which is text"
    elif isinstance(value, float) and not math.isfinite(value):
        why = ", which is not finite"
    return f"{place} is {_show(value)}{why}; use {key.takes}"


def _show(value: object) -> str:
    """A value on one line, as YAML writes it, truncated if long."""
    text = json.dumps(value, ensure_ascii=False, default=_plain)
    text = text.replace("NaN", "nan").replace("Infinity", "inf") if isinstance(value, float) else text
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
