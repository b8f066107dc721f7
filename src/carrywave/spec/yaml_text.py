"""Reads and writes YAML as YAML 1.2 has it: `3e-4` and `1e5` are numbers, only `true` and `false` are booleans (a label may be called
`no`), `010` is ten, and `1:30`, dates and keys are text. A key that is given twice is refused.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from carrywave.errors import SpecError, short

TAG = "tag:yaml.org,2002:"
WHOLE = re.compile(r"[-+]?(?:0x[0-9a-fA-F_]+|0b[01_]+|[0-9][0-9_]*)")
NUMBER = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)
TRUTH = re.compile(r"true|True|TRUE|false|False|FALSE")
NOTHING = re.compile(r"~|null|Null|NULL|")


class _Loader(yaml.SafeLoader):
    """`SafeLoader` with the numbers, booleans and keys of the docstring above."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number, writes lists on one line, and emits no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("int", WHOLE, "-+0123456789"),
    ("float", NUMBER, "-+.0123456789"),
    ("bool", TRUTH, "tTfF"),
    ("null", NOTHING, ["~", "n", "N", ""]),
):
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(f"{TAG}{_kind}", re.compile(f"^(?:{_pattern.pattern})$"), list(_first))


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    return int(text, 0) if text.lstrip("-+")[:2] in ("0x", "0b") else int(text)


def _number(loader: _Loader, node: yaml.ScalarNode) -> float | int:
    value = float(loader.construct_yaml_float(node))
    # 1e5 may be a number of steps, but 1.0 is not.
    return int(value) if "." not in node.value and abs(value) < 2**53 and value.is_integer() else value


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        problem = None if isinstance(key_node, yaml.ScalarNode) else "a key must be plain text; write key: value"
        if problem is None and key_node.value in found:
            problem = f"key {short(key_node.value)} is given twice; remove one of them"
        if problem is not None:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
        found[key_node.value] = loader.construct_object(value_node, deep=True)
    return found


def _refuse_tag(loader: _Loader, node: yaml.Node) -> None:
    problem = f"the tag {short(node.tag.replace(TAG, '!!', 1))} is not allowed; use plain values only"
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


_Dumper.add_representer(list, lambda dumper, value: dumper.represent_sequence(f"{TAG}seq", value, flow_style=True))
for _kind, _read in (("int", _whole), ("float", _number), ("map", _mapping)):
    _Loader.add_constructor(f"{TAG}{_kind}", _read)
_Loader.add_constructor(None, _refuse_tag)


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text; `where` names its source in error messages."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None and "\n" in text else ""
        problem = str(getattr(error, "problem", None) or str(error).splitlines()[0].partition(";")[0])
        remedy = "" if ";" in problem else "; correct the YAML, perhaps by putting text in quotes"
        raise SpecError(f"{where}{line}: {problem}{remedy}") from error


def parse_word(text: str, where: str, *, is_text: bool) -> Any:
    """Parse a value of the command line: as YAML, or as the text that it is where YAML sees no value in it, or where only text is taken
    (`is_text`), unless that is in quotes or brackets.
    """
    bare = text.strip()
    is_yaml = (bare in ("", "null", "~") and text == bare) or bare.startswith(("'", '"', "[", "{"))
    if not is_yaml and (is_text or not any(map(str.isalnum, bare))):
        return bare or text
    try:
        return parse_yaml(text, where)
    except SpecError as error:
        if isinstance(error.__cause__, ScannerError | ParserError):
            return bare
        raise


def dump_yaml(values: object) -> str:
    """Values as YAML text that `parse_yaml` reads as equal values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
