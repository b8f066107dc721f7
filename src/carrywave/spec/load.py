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
from carrywave.spec.describe import Key, keys
from carrywave.spec.spec import Spec
from carrywave.spec.task_defaults import with_task_defaults
from carrywave.spec.yaml_text import dump_yaml, parse_word, parse_yaml

# Values that stand for a whole section; overriding a key inside the section replaces them.
OPENED_BY_OVERRIDE = {"plan": "auto", "train.class_weights": "balanced"}
TYPE_ERRORS = ("_type", "literal_error", "int_from_float")
SHOWN_CHARACTERS = 60
MOST_BYTES = 1 << 20  # upper limit on the size of a spec file
# Suffixes of data files that users pass in place of a spec, and the override that training on them also needs.
DATA_FILES = {
    **dict.fromkeys((".csv", ".tsv", ".parquet", ".pq"), "task=forecasting "),
    **dict.fromkeys((".jsonl", ".ndjson"), "task=classification "),
}
COMPRESSED = (".gz", ".zst")
ELSEWHERE = {  # what Keras, PyTorch, Darts or NeuralForecast call it: our keys
    "units": ("model.hidden",),
    "hidden_dim": ("model.hidden",),
    "learning_rate": ("train.lr",),
    "batch_size": ("batch.lanes", "batch.tokens"),
    "size": ("batch.lanes", "batch.tokens"),
    "bptt": ("batch.steps",),
    "seq_len": ("batch.steps",),
    "input_chunk_length": ("batch.steps",),
    "input_size": ("batch.steps",),
    "output_chunk_length": ("data.horizon",),
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
    values = read_values(path)
    spec = parse(values, defaults=False)
    _check_whole(path, values)
    return spec


def read_own(path: Path) -> dict[str, Any]:
    """The values in a spec that a run has written."""
    values = read_values(path)
    _check_whole(path, values)
    return values


def _check_whole(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse a run's own spec that has lost its end: what is missing would take its default without a word."""
    if "plan" not in values:  # the last section
        raise SpecError(f"{path} is damaged: its end is missing; restore it, for example from the metadata of weights.safetensors")


def parse(values: Mapping[str, Any], *, defaults: bool = True) -> Spec:
    """Validate a mapping of plain values, such as `{"model": {"hidden": 256}}`, as a spec, with the defaults of its task.

    Without `defaults`, a key that is not set has the default of its field, whatever the task; a spec that a run has written has all keys.
    """
    spec = _validated(values)
    return with_task_defaults(spec) if defaults else spec


def _validated(values: Mapping[str, Any]) -> Spec:
    # Via JSON, because strict validation of JSON accepts a list as a tuple, yet still rejects text or booleans as numbers.
    try:
        text = json.dumps({key: value for key, value in values.items() if value is not None}, default=_plain)  # None: an empty section
    except (TypeError, ValueError) as error:
        raise SpecError(f"the spec cannot be read: {error}; use numbers, text, lists and mappings") from None
    tree = json.loads(text)
    unknown = list(_unknown(tree))
    if unknown:
        raise SpecError(_first_of(unknown))
    try:
        spec = Spec.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise SpecError(_first_of(_explain(error, tree))) from None
    return spec


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
    kind = DATA_FILES.get(next((suffix for suffix in reversed(path.suffixes) if suffix.lower() not in COMPRESSED), "").lower())
    remedy = f"to train on it, pass {kind or ''}data.train={path} instead"
    try:
        if kind and path.exists():
            raise SpecError(f"{path} is a data file, not a spec; {remedy}")
        if path.is_dir():
            if (path / "spec.yaml").is_file():
                raise SpecError(f"{path} is a run, not a spec; pass it as --run {path}")
            raise SpecError(f"{path} is a folder, not a spec; pass the path of a spec file")
        if path.is_fifo() and not str(path).startswith("/dev/"):
            raise SpecError(f"{path} is a pipe, but every worker must read the spec; write it to a file first")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise SpecError(f"{path} is too large for a spec, which is a few lines of YAML; {remedy}")
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise SpecError(f"{path} does not exist; pass the path of a spec file, or key=value") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is not UTF-8 text; pass a spec file in YAML") from None
    except OSError as error:
        remedy = remedy_for(error, "make it readable" if isinstance(error, PermissionError) else "pass the path of a spec file")
        raise from_system(error, SpecError)(f"{path} cannot be read: {error.strerror}; {remedy}") from None
    tree = parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        write = "write keys such as model: {hidden: 256}"
        raise SpecError(f"{path} contains {_show(tree)}, not a mapping; {write if path.suffix in ('.yaml', '.yml') else remedy}")
    return tree


def _override(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key in place; later overrides win."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise SpecError(f"{short(override)!r} is not key=value; write for example model.hidden=256")
    problem = _check_dotted(dotted)
    if problem:
        raise SpecError(problem)
    value = parse_word(text, short(override), is_text=dotted in keys() and keys()[dotted].text)
    *parents, last = _split(dotted)
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


def _split(dotted: str) -> list[str]:
    """Split a dotted key; below a key with user-chosen names the rest is a single name, dots included."""
    for key in keys().values():
        if key.free and dotted.startswith(f"{key.name}."):
            return [*key.name.split("."), dotted[len(key.name) + 1 :]]
    return dotted.split(".")


def _check_dotted(dotted: str) -> str | None:
    parent = ".".join(_split(dotted)[:-1])
    if dotted in keys() or (parent in keys() and keys()[parent].free):
        return None
    return _suggest(dotted)


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


def _first_of(problems: Sequence[str]) -> str:
    return problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def _explain(error: ValidationError, tree: Mapping[str, Any]) -> list[str]:
    """One line per invalid field; for a union, only the error of the branch that matched best."""
    by_field: dict[str, list[tuple[str, object, ErrorDetails]]] = {}
    for detail in error.errors(include_url=False):
        name, place, value = _locate(detail["loc"], tree)
        by_field.setdefault(name, []).append((place, value, detail))
    problems = []
    for name, found in by_field.items():
        if any(other.startswith(f"{name}.") for other in by_field):
            continue  # error of the wrong union branch: the value is a section, and the real error is inside it
        nearest = max(found, key=lambda one: (len(one[0]), not _is_type_error(one[2])))
        problems.append(_sentence(name, *nearest))
    return problems


def _is_type_error(detail: ErrorDetails) -> bool:
    return detail["type"].endswith(TYPE_ERRORS)


def _locate(location: tuple[int | str, ...], tree: Mapping[str, Any]) -> tuple[str, str, object]:
    """The key an error refers to, the location in its value (`model.hidden[1]`), and the value found there.

    Pydantic inserts the name of the union branch into the location; any part that is not in the tree is such a name, and is skipped.
    """
    name, place, value = "", "", tree
    inside_value = False
    for step in location:
        if isinstance(value, dict) and step in value:
            value = value[step]
            place = f"{place}.{step}" if place else str(step)
            inside_value = inside_value or place not in keys()
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value, place, inside_value = value[step], f"{place}[{step}]", True
        if not inside_value:
            name = place
    return name, place, value


def _sentence(name: str, place: str, value: object, detail: ErrorDetails) -> str:
    if detail["type"] == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
        return message if not place or message.startswith(f"{place}.") else f"{place}.{message}"
    key = keys().get(name)
    if key is None:
        return f"the spec cannot be read: {detail['msg']}; use plain text, numbers, lists and sections"
    return f"{place} is {_show(value)}{_why(value, key, detail)}; use {key.takes}"


def _why(value: object, key: Key, detail: ErrorDetails) -> str:
    """An explanation of what is wrong where the value itself does not show it."""
    if "number" in key.takes and isinstance(value, str) and detail["type"] != "literal_error":
        return ", which is text"
    if detail["type"] == "string_type" and not isinstance(value, (dict, list)):
        return ", which is not text (quotes make it text)"
    if isinstance(value, float) and not math.isfinite(value):
        return ", which is not finite"
    if value == "tensorboard":
        return ", whose events every run writes to its folder tb"
    return ""


def _show(value: object) -> str:
    """A value on one line, as YAML writes it, truncated if long."""
    text = json.dumps(value, ensure_ascii=False, default=_plain)
    text = text.replace("NaN", "nan").replace("Infinity", "inf") if isinstance(value, float) else text
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
