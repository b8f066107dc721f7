"""Reads and writes YAML.

It is read with a `SafeLoader` that differs from PyYAML's in these ways: `3e-4` and `1e5` are numbers; only `true` and `false` are
booleans (a label may be called `no`); dates and keys are always text. It rejects duplicate keys, aliases (which can expand a few lines
into gigabytes), and numbers that YAML 1.1 reads differently from a person: `010` (octal, 8) and `1:30` (base 60, 90).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from carrywave.errors import SpecError, short

MOST_DIGITS = 100
QUOTES = ", or put text in quotes"
YAML_TAG = "tag:yaml.org,2002:"
NUMBER = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)
LEADING_ZERO = re.compile(r"[-+]?0_*[0-9]")
TRUTH = re.compile(r"true|True|TRUE|false|False|FALSE")


class _Loader(yaml.SafeLoader):
    """`SafeLoader` with the numbers, booleans and keys described at the top of this file."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise _refusal("an alias (*name) is not allowed; write the value out", self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number, writes lists on one line, and emits no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _refusal(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _resolvers(base: Mapping[str, list[tuple[str, Any]]]) -> dict[str, list[tuple[str, Any]]]:
    """PyYAML's resolvers without floats and booleans, which are redefined below, and without dates, merge keys and `=`."""
    dropped = tuple(f"{YAML_TAG}{kind}" for kind in ("float", "bool", "merge", "value", "timestamp"))
    return {first: [(tag, pattern) for tag, pattern in rules if tag not in dropped] for first, rules in base.items()}


_Loader.yaml_implicit_resolvers = _resolvers(yaml.SafeLoader.yaml_implicit_resolvers)
for _kind in (_Loader, _Dumper):
    # Integers are resolved first, so 10 stays an integer.
    _kind.add_implicit_resolver(f"{YAML_TAG}float", re.compile(f"^(?:{NUMBER.pattern})$"), list("-+0123456789."))
_Loader.add_implicit_resolver(f"{YAML_TAG}bool", re.compile(f"^(?:{TRUTH.pattern})$"), list("tTfF"))


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    _refuse_doubtful(node)
    if len(node.value) > MOST_DIGITS:
        problem = f"{node.value[:20]}… is a number of {len(node.value):,} digits; use one of at most {MOST_DIGITS}"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return int(loader.construct_yaml_int(node))


def _refuse_doubtful(node: yaml.ScalarNode) -> None:
    """Reject numbers that YAML 1.1 reads differently from a person."""
    if ":" in node.value:
        raise _refusal(f"{short(node.value)} is a base-60 number in YAML; write the number out{QUOTES}", node.start_mark)
    if LEADING_ZERO.match(node.value):
        raise _refusal(f"{short(node.value)} has a leading zero, which may mean octal; remove the zero{QUOTES}", node.start_mark)


def _number(loader: _Loader, node: yaml.ScalarNode) -> float | int:
    _refuse_doubtful(node)
    value = loader.construct_yaml_float(node)
    # Accept 1e5 as an integer, for example a number of steps, but not 1.0.
    whole = "." not in node.value and math.isfinite(value) and abs(value) < 2**53 and value == int(value)
    return int(value) if whole else float(value)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _refusal("a key must be plain text; write key: value", key_node.start_mark)
        if key_node.value in found:
            raise _refusal(f"key {short(key_node.value)} is given twice; remove one of them", key_node.start_mark)
        found[key_node.value] = loader.construct_object(value_node, deep=True)
    return found


def _refuse_tag(loader: _Loader, node: yaml.Node) -> None:
    tag = node.tag.replace(YAML_TAG, "!!", 1)
    raise _refusal(f"the tag {short(tag)} is not allowed; use plain values only", node.start_mark)


_Dumper.add_representer(list, lambda dumper, value: dumper.represent_sequence(f"{YAML_TAG}seq", value, flow_style=True))
_Loader.add_constructor(f"{YAML_TAG}float", _number)
_Loader.add_constructor(f"{YAML_TAG}int", _whole)
_Loader.add_constructor(f"{YAML_TAG}map", _mapping)
_Loader.add_constructor(None, _refuse_tag)


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text; `where` names its source in error messages."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark is not None and "\n" in text else ""
        problem = str(error.problem) if error.context is None else f"{error.context}, {error.problem}"
        remedy = "" if ";" in problem else "; correct the YAML, perhaps by putting text in quotes"
        raise SpecError(f"{where}{line}: {problem}{remedy}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{where}: {str(error).splitlines()[0]}; this is not YAML, save it as UTF-8 text") from None
    except RecursionError:
        raise SpecError(f"{where}: lists or mappings are nested too deeply; use keys such as model.hidden=256") from None
    except ValueError as error:
        fact = str(error).splitlines()[0].partition(";")[0]
        raise SpecError(f"{where}: {fact}; correct the YAML, perhaps by putting text in quotes") from None


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
        if isinstance(error.__context__, ScannerError | ParserError):
            return bare
        raise SpecError(str(error).removesuffix(QUOTES)) from None  # a shell would take them off


def dump_yaml(values: object) -> str:
    """Values as YAML text that `parse_yaml` reads as equal values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
