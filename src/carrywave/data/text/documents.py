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
        if reset == BLANK_LINE:
            texts = _texts(codec)
            ends_line = np.array([text.endswith("\n") for text in texts])
            empty = np.array([text == "\n" for text in texts])
            if not empty.any():
                raise SpecError("data.reset is an empty line, but no token of the vocabulary is a line end; set it to a token")
            return DocumentEnds(empty, ends_line)
        number = _number(reset, codec)
        if number is None:
            raise SpecError(
                f"data.reset={reset!r} is not a token of the vocabulary (data.tokens={codec.kind}); set it to one token, to "
                f"{BLANK_LINE!r}, or to {ROW!r}"
            )
        last = np.zeros(codec.size, np.bool_)
        last[number] = True
        return DocumentEnds(last)

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


def _texts(codec: Codec) -> list[str]:
    """What each token stands for in the text."""
    if codec.kind == "word":
        return ["\n" if word == END else word for word in codec.vocabulary]
    if codec.kind == "char":
        return list(codec.vocabulary)
    return [codec.tokens.decode([number]) for number in range(codec.size)] if codec.kind in ("byte", "bpe") else []


def _number(token: str, codec: Codec) -> int | None:
    if codec.kind in ("char", "word"):
        return codec.vocabulary.index(token) if token in codec.vocabulary else None
    ids = codec.tokens.ids(token)
    return int(ids[0]) if len(ids) == 1 and ids[0] >= 0 else None
