"""Reads the objects of a JSON array one at a time, however long the array: only a block of the file and one object are held in memory."""

from __future__ import annotations

import codecs
import json
from codecs import BOM_UTF8 as BOM
from collections.abc import Callable, Iterator
from typing import Any

from carrywave.data.files.source import Source
from carrywave.errors import DataError

SPACE = " \t\r\n"
NEAR_END = 16  # a mistake this close to the end of what was read may be a value that is cut off there
EXAMPLE = '[{"steps": [[0.1, 0.2], …], "label": "a"}, …]'


class GivenTwice(ValueError):
    """An object has two fields of one name, of which Python would silently take the last."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise GivenTwice(f"field {next(name for name in names if names.count(name) > 1)!r:.60} is given twice; remove one of them")
    return fields


PARSER = json.JSONDecoder(object_pairs_hook=_object)


def is_array(source: Source) -> bool:
    """True if the content begins as an array does."""
    return source.head().removeprefix(BOM).lstrip().startswith(b"[")


def objects(source: Source, where: Callable[[int], str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of an array; `where` locates the one with this number, from 1, in messages."""
    text = _Text(source)
    text.take("[")
    number = 1
    while text.next() != "]":
        if number > 1 and not text.take(","):
            raise DataError(f"{where(number)}: there is no comma before it, and no end of the array; write an array of objects: {EXAMPLE}")
        if text.next() != "{":
            what = f"begins with {text.next()!r}" if text.next() else "is missing, and so is the end of the array"
            raise DataError(f"{where(number)} {what}; write an array of objects: {EXAMPLE}")
        try:
            yield text.value()
        except GivenTwice as error:
            raise DataError(f"{where(number)}: {error}") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where(number)} is not JSON ({str(error)[:100]}); write an array of objects: {EXAMPLE}") from error
        number += 1
    text.take("]")
    if text.next():
        raise DataError(f"{source.name} goes on after the end of its array; write one array, or one object per line in a .jsonl file")


class _Text:
    """What was read and not used yet."""

    def __init__(self, source: Source) -> None:
        self._source, self._blocks = source, source.blocks()
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._bytes = "", 0, 0

    def next(self) -> str:
        """The next character that is not white space; nothing at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def take(self, wanted: str) -> bool:
        """Go past a character, if it is the next one."""
        if self.next() != wanted:
            return False
        self._at += 1
        return True

    def value(self) -> dict[str, Any]:
        """The object that begins here; ValueError if it is not JSON."""
        while True:
            try:
                parsed, self._at = PARSER.raw_decode(self._text, self._at)
                return dict(parsed)
            except json.JSONDecodeError as error:
                cut_off = error.pos >= len(self._text) - NEAR_END or error.msg.startswith("Unterminated string")
                if not cut_off or not self._more():
                    raise ValueError(error.msg) from error

    def _more(self) -> bool:
        """Read on; False at the end."""
        block = next(self._blocks, b"")
        try:
            added = self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            at = self._bytes + error.start
            raise DataError(f"{self._source.name}: about byte {at} is not valid utf-8; set data.encoding") from error
        self._bytes += len(block)
        self._text, self._at = self._text[self._at :] + added, 0
        return bool(block)
