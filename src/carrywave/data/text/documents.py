"""`DocumentEnds`: where one document of a stream of tokens ends and the next begins, so that nothing of the one is known in the other.

A document ends with a token, or with an empty line; the token after it starts from the initial state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.text.tokenizers import END
from carrywave.errors import SpecError

BLANK_LINE = "blank line"
ROW = "row"  # each row of a file is a document: known where rows are read
BLOCK = 1 << 24  # tokens that are looked at at once


@dataclass(frozen=True, eq=False)
class DocumentEnds:
    """Which tokens end a document: one of `last`, if `before` is None or the token before it is one of `before`."""

    last: NDArray[np.bool_]  # [V]
    before: NDArray[np.bool_] | None = None  # [V] tokens that end a line

    @staticmethod
    def of(reset: str | None, codec: Codec) -> DocumentEnds | None:
        """Those that `data.reset` names; None if it names no tokens."""
        if reset is None or reset == ROW:
            return None
        texts = [codec.tokens.decode([number]) for number in range(codec.size)]
        # A line end is a token of its own among words.
        wanted = "\n" if reset == BLANK_LINE or (reset == END and codec.kind == "word") else reset
        last = np.array([text == wanted for text in texts], np.bool_)
        if not last.any():
            raise SpecError(
                f"data.reset={reset!r} is not a token of the vocabulary (data.tokens={codec.kind}); set it to one token, to "
                f"{BLANK_LINE!r} if line ends are tokens, or to {ROW!r}"
            )
        return DocumentEnds(last, np.array([text.endswith("\n") for text in texts]) if reset == BLANK_LINE else None)

    def begins(self, tokens: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """True for each row with which a document begins, by the tokens before it."""
        begins: NDArray[np.bool_] = (rows > 0) & self.last[tokens[np.maximum(rows - 1, 0)]]
        if self.before is None:
            return begins
        # Of several empty lines, only the last is followed by a document.
        begins &= (rows > 1) & self.before[tokens[np.maximum(rows - 2, 0)]] & ~self.last[tokens[rows]]
        return begins

    def any_in(self, tokens: NDArray[Any]) -> bool:
        """True if more than one document begins in a stream."""
        blocks = (np.arange(first, min(first + BLOCK, len(tokens))) for first in range(0, len(tokens), BLOCK))
        return any(bool(self.begins(tokens, rows).any()) for rows in blocks)
