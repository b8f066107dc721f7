"""Describes every spec key in words: accepted values, default and meaning. Used by error messages and docs/spec.md.

python -m carrywave.spec.describe > docs/spec.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from carrywave.spec.spec import Spec

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Key:
    """One dotted key of the spec."""

    name: str
    takes: str  # accepted values, in words
    default: str  # as it would be written in YAML
    means: str
    section: bool = False  # contains further keys
    free: bool = False  # contains names chosen by the user
    text: bool = False  # takes text and nothing else


def schema() -> dict[str, Any]:
    """The JSON schema of a spec file, for editors that complete and validate YAML."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Spec.model_json_schema()}


@cache
def keys() -> Mapping[str, Key]:
    """All keys by dotted name, each section before the keys in it."""
    whole = schema()
    found: dict[str, Key] = {}
    _collect("", whole, Spec().model_dump(mode="json"), whole["$defs"], found)
    return found


def _collect(prefix: str, section: Schema, defaults: Mapping[str, Any], definitions: Mapping[str, Schema], found: dict[str, Key]) -> None:
    for field, schema_of_field in section["properties"].items():
        name = prefix + field
        default = defaults.get(field) if isinstance(defaults, Mapping) else None
        inner = _section(schema_of_field, definitions)
        means = schema_of_field.get("description") or (inner or {}).get("description", "")
        free = any("additionalProperties" in choice for choice in _choices(schema_of_field))
        text = all(choice.get("type") in ("string", "null") for choice in _choices(schema_of_field))
        found[name] = Key(
            name, _takes(schema_of_field, definitions), _show(default), means, section=inner is not None, free=free, text=text
        )
        if inner is not None:
            # A section that defaults to "auto" has no values; once the user opens it, the defaults of its fields apply.
            values = default if isinstance(default, Mapping) else {k: v.get("default") for k, v in inner["properties"].items()}
            _collect(f"{name}.", inner, values, definitions, found)


def _choices(schema_of_field: Schema) -> Sequence[Schema]:
    choices: Sequence[Schema] = schema_of_field.get("anyOf", (schema_of_field,))
    return choices


def _section(schema_of_field: Schema, definitions: Mapping[str, Schema]) -> Schema | None:
    for choice in _choices(schema_of_field):
        if "$ref" in choice:
            return definitions[choice["$ref"].rsplit("/", 1)[-1]]
    return None


def _takes(field: Schema, definitions: Mapping[str, Schema]) -> str:
    """The accepted values in words: `a whole number >= 1`, `one of a, b`, `text`."""
    if "anyOf" in field:
        # Null only marks an omitted key in a resolved spec; do not advise using it.
        return ", or ".join(_takes(choice, definitions) for choice in field["anyOf"] if choice.get("type") != "null")
    if "$ref" in field:
        inner = definitions[field["$ref"].rsplit("/", 1)[-1]]
        return f"a section with {', '.join(inner['properties'])}"
    if "const" in field:
        return str(field["const"])
    if "enum" in field:
        return f"one of {', '.join(str(choice) for choice in field['enum'])}"
    kind = field.get("type")
    if kind == "array":
        if "prefixItems" in field:
            return f"a list of {len(field['prefixItems'])} numbers, each {_takes(field['prefixItems'][0], definitions)}"
        return f"a list, each item {_takes(field['items'], definitions)}"
    if kind == "object":
        values = field["additionalProperties"]
        return "a mapping of names to values" + (f", each {_takes(values, definitions)}" if isinstance(values, Mapping) else "")
    words = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}[str(kind)]
    bounds = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
    limits = [f"{sign} {_bound(field[bound])}" for bound, sign in bounds if bound in field]
    return f"{words} {' and '.join(limits)}".strip()


def _bound(limit: float) -> str:
    return "2^63" if limit == 2**63 else f"{limit:g}"


def _show(value: object) -> str:
    if isinstance(value, Mapping):
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def reference() -> str:
    """The text of docs/spec.md: one table per section."""
    lines = [
        "# The spec",
        "",
        "Generated from the fields by `python -m carrywave.spec.describe > docs/spec.md`; do not edit it by hand.",
        "",
        "A spec is a YAML file. Every key is optional; an empty file means the default run. A key can also be set on the command line, as",
        "`model.hidden=650`, where the value is YAML as well (`train.betas=[0.9, 0.99]`), or text if the key takes only text or YAML has",
        "no value for it (`data.reset=#`). `carrywave schema -o spec.schema.json` writes a JSON schema for editors.",
        "Where the task matters, the default of a key that is not set depends on it: [choosing a model](models.md); the default below",
        "is then that of a `Spec` made in Python. The `spec.yaml` of a run lists what was used.",
        "Relative paths are relative to the current directory, wherever the spec file is. A key that is set where it acts on nothing, such",
        "as `train.patience` without `train.schedule=plateau`, has no effect; of the commonest of these a line says so.",
        "",
        "Numbers may be written `3e-4`, `1e5`, `.5`, `1_000`, `0x1f` or `0b1`; `010` is ten and `1:30` is text, unlike in YAML 1.1.",
        "Only `true` and `false` are booleans, dates are text, and text that looks like a number needs quotes in a file.",
        "",
    ]
    sections = [""] + [key.name for key in keys().values() if key.section]
    for section in sections:
        lines += [f"## {section or 'top level'}", ""]
        if section:
            lines += [keys()[section].means, ""]
        lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
        for key in keys().values():
            if key.name.rpartition(".")[0] == section:
                takes = "a section, see below" if key.section and not key.default else key.takes.replace("|", "\\|")
                default = f"`{key.default}`" if key.default else ""
                lines.append(f"| `{key.name}` | {takes} | {default} | {key.means.replace('<', '&lt;')} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(reference(), end="")
