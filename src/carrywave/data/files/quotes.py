"""Track the quotes of a CSV file block by block, as Arrow's parser does: an unclosed quote would swallow the rows that follow.

A quote opens a quoted cell only at the start of a cell; the cell may then contain separators, line ends and doubled quotes. A
quote in the middle of a cell is plain text.
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
REMEDY = 'close it, or quote the whole cell and double the quotes inside: "5"" pipe"'


def check_quotes(source: Source, separator: str) -> bool:
    """Reject a quote that is never closed, or only by a later row's opening quote. Return True if a cell contains a line end."""
    quotes = _Quotes(separator)
    for block in source.blocks():
        if not quotes.read(block):
            raise _refused(source, quotes.opened, closed=True)
    if quotes.inside:
        raise _refused(source, quotes.opened, closed=False)
    return quotes.any_lines


class _Quotes:
    """Parser state after the blocks read so far."""

    def __init__(self, separator: str) -> None:
        self.inside = False  # within a quoted cell
        self.opened = 0  # byte offset of the most recent opening quote
        self.any_lines = False  # some quoted cell contains a line end
        self._edges = LINE_ENDS + separator.encode()  # bytes that end a cell
        self._edge = re.compile(b"[" + re.escape(self._edges) + b'](?="|\\Z)')
        self._at_start = True  # at the start of a cell
        self._after = False  # after a quote within quotes: it closes the cell, or is the first of a doubled quote
        self._lines = False  # the current quoted cell contains a line end
        self._offset = 0  # bytes before this block

    def read(self, block: bytes) -> bool:
        """Process the next block; return False if a multi-line quoted cell ends with a quote that is followed by text."""
        skipped = len(BOM) if not self._offset and block.startswith(BOM) else 0
        if not self._plain(block) and not self._follow(block, skipped):
            return False
        self._offset += len(block)
        return True

    def _plain(self, block: bytes) -> bool:
        """Fast path for nearly all blocks: True if every quote opens or closes a whole cell, or is one of a doubled pair."""
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
        """Scan byte by byte around quotes, and jump from one to the next elsewhere."""
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
                edge = self._edge.search(block, at)
                self._at_start = edge is not None
                at = len(block) if edge is None else edge.end()
        return True


def _refused(source: Source, opened: int, *, closed: bool) -> DataError:
    """Build the error for a bad quote, with its row and line."""
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
    fact = "is closed only in a later row, by a quote that seems to open another cell" if closed else "is never closed"
    return DataError(f"{source.name}: row {ends} (line {ends + 1}) opens a quote that {fact}: {cell!r}; {REMEDY}")
