"""Writes the data of two recipes from the source of Python's standard library, which is on every machine that runs this.

    python examples/python_data.py                 # data/python/functions-*.jsonl and data/python/tags-*.jsonl

A function is cut into tokens by Python's own `tokenize`. In `functions-*.jsonl` its label is the package it is from; in `tags-*.jsonl` each
token has a tag that says what part it plays. Strings are told by their quotes only. An eighth of the functions is for testing, chosen by a
checksum, so that a function that occurs twice is never in both parts. The source is under the licence of the Python Software Foundation.
"""

from __future__ import annotations

import ast
import io
import json
import keyword
import sys
import sysconfig
import textwrap
import tokenize
import zlib
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "urllib", "xml")
LEAST, MOST = 8, 100  # tokens of a function; longer ones are cut
SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def main(folder: str = "data/python") -> dict[str, int]:
    """Write the four files, and return how many functions each has."""
    parts: dict[str, list[str]] = {f"{kind}-{part}": [] for kind in ("functions", "tags") for part in ("train", "test")}
    for package, source in functions():
        tokens, tags = tagged(source)
        if len(tokens) < LEAST:
            continue
        part = "test" if zlib.crc32(source.encode()) % 8 == 0 else "train"
        parts[f"functions-{part}"].append(json.dumps({"tokens": tokens[:MOST], "label": package}))
        parts[f"tags-{part}"].append(json.dumps({"tokens": tokens[:MOST], "labels": tags[:MOST]}))
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, lines in parts.items():
        (Path(folder) / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    counts = {name: len(lines) for name, lines in parts.items()}
    print(", ".join(f"{name}: {count} functions" for name, count in counts.items()))
    return counts


def functions() -> Iterator[tuple[str, str]]:
    """Every function of the packages, with its package, in the same order on every machine."""
    library = Path(sysconfig.get_path("stdlib"))
    for package in PACKAGES:
        for path in sorted((library / package).rglob("*.py")):
            if "test" in path.parts or "tests" in path.parts:
                continue
            text = path.read_text(encoding="utf-8")
            lines = text.split("\n")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield package, textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]) + "\n")


def tagged(source: str) -> tuple[list[str], list[str]]:
    """The tokens of a function, and what part each plays."""
    try:
        found = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in SKIPPED]
    except (tokenize.TokenError, IndentationError):  # its lines were indented unevenly
        return [], []
    kept = (tokenize.NAME, tokenize.NUMBER, tokenize.OP)
    words = [token.string if token.type in kept else token.string[:1] or "'" for token in found]
    tags, depth = [], 0
    for place, token in enumerate(found):
        before, after = words[place - 1] if place else "", words[place + 1] if place + 1 < len(words) else ""
        depth += (token.string in "([{") - (token.string in ")]}") if token.type == tokenize.OP else 0
        tags.append(_tag(token, before, after, inside=depth > 0))
    return words, tags


def _tag(token: tokenize.TokenInfo, before: str, after: str, *, inside: bool) -> str:
    if token.type == tokenize.NUMBER:
        return "number"
    if token.type != tokenize.NAME:
        return "operator" if token.type == tokenize.OP else "string"
    if keyword.iskeyword(token.string):
        return "keyword"
    if before in ("def", "class"):
        return "definition"
    if before == ".":
        return "method" if after == "(" else "attribute"
    if after == "=" and inside:
        return "argument"
    return "call" if after == "(" else "name"


if __name__ == "__main__":
    main(*sys.argv[1:2])
