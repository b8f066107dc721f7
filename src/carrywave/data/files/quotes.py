"""Quotes of a CSV file, followed block by block as Arrow's parser follows them: one that is left open would swallow the rows after it.

A quote counts at the start of a cell; there it may hold separators, line ends and doubled quotes. In the middle of a cell it is text.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from carrywave.data.files.source import BOM, Source
from carrywave.errors import DataError

QUOTE = ord('"')
LINE_ENDS = b"\r\n"
SHOWN_BYTES = 24
REMEDY = 'close it, or put the whole cell in quotes and double those inside, "5"" pipe"'


def check_quotes(source: Source, separator: str) -> bool:
    """Refuses a quote that is never closed, or only by the one that opens a cell in a later row. Says whether a cell holds a line end."""
    quotes = _Quotes(separator)
    for block in source.blocks():
        if not quotes.read(block):
            raise _refused(source, quotes.opened, closed=True)
    if quotes.inside:
        raise _refused(source, quotes.opened, closed=False)
    return quotes.any_lines


class _Quotes:
    """Where in a cell the file is, after the blocks so far."""

    def __init__(self, separator: str) -> None:
        self.inside = False  # a quote is open
        self.opened = 0  # the byte at which the last one was opened
        self.any_lines = False  # a quoted cell held a line end
        self._edges = LINE_ENDS + separator.encode()  # what cells end with
        self._edge = re.compile(b"[" + re.escape(self._edges) + b'](?="|\\Z)')
        self._at_start = True  # of a cell
        self._after = False  # a quote in quotes: the last of the cell, or the first of two
        self._lines = False  # in the quotes that are open
        self._offset = 0  # bytes before the block

    def read(self, block: bytes) -> bool:
        """Takes the next block; False where quotes over several lines end with one that is followed by text."""
        skipped = len(BOM) if not self._offset and block.startswith(BOM) else 0
        if not self._plain(block) and not self._follow(block, skipped):
            return False
        self._offset += len(block)
        return True

    def _plain(self, block: bytes) -> bool:
        """Whether every quote of the block opens or closes a whole cell, or is one of two; by far the most are, and this is quick."""
        if self.inside or self._after:
            return False
        content: NDArray[np.uint8] = np.frombuffer(block, np.uint8)
        quotes = np.flatnonzero(content == QUOTE)
        if len(quotes):
            if len(quotes) % 2 or quotes[0] == 0 or quotes[-1] == len(content) - 1:
                return False
            allowed = np.isin(np.arange(256), [*self._edges, QUOTE])
            if not (allowed[content[quotes[0::2] - 1]].all() and allowed[content[quotes[1::2] + 1]].all()):
                return False
            ends = np.flatnonzero((content == LINE_ENDS[0]) | (content == LINE_ENDS[1]))
            self.any_lines = self.any_lines or bool((np.searchsorted(quotes, ends) % 2).any())
        self._at_start = block[-1] in self._edges
        return True

    def _follow(self, block: bytes, at: int) -> bool:
        """Byte by byte where a quote is, from one to the next elsewhere."""
        while at < len(block):
            if self.inside:
                close = block.find(b'"', at)
                end = len(block) if close < 0 else close
                self._lines = self._lines or block.find(b"\n", at, end) >= 0 or block.find(b"\r", at, end) >= 0
                at, self.inside, self._after = end + 1, close < 0, close >= 0
            elif self._after and block[at] == QUOTE:
                at, self.inside, self._after = at + 1, True, False
            elif self._after:
                self.any_lines = self.any_lines or self._lines
                if self._lines and block[at] not in self._edges + b" ":
                    return False
                self._after = False
            elif self._at_start and block[at] == QUOTE:
                self.opened, self._lines = self._offset + at, False
                at, self.inside, self._at_start = at + 1, True, False
            else:
                found = self._edge.search(block, at)
                self._at_start = found is not None
                at = len(block) if found is None else found.end()
        return True


def _refused(source: Source, opened: int, *, closed: bool) -> DataError:
    """The error about a quote, with its row and line."""
    ends, offset, shown = 0, 0, b""
    for block in source.blocks():
        before = block[: max(opened - offset, 0)]
        ends += before.count(b"\n") or before.count(b"\r")
        if opened < offset + len(block):
            shown += block[len(before) :][:SHOWN_BYTES]
        offset += len(block)
        if len(shown) >= SHOWN_BYTES:
            break
    cell = shown.splitlines()[0].decode(errors="replace")
    fact = "is closed only in a later row, by what seems to open another cell" if closed else "is never closed"
    return DataError(f"{source.name}: row {ends} (line {ends + 1}) opens a quote that {fact}, {cell!r}; {REMEDY}")
