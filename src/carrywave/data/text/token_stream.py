"""A text as one long stream of tokens: its vocabulary is learned, then it is encoded, in pieces that do not change the tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.files.source import Source
from carrywave.data.sequences import token_dtype
from carrywave.data.text import vocabulary
from carrywave.data.text.tally import Tally
from carrywave.data.text.tokenizers import TokenizerKind
from carrywave.errors import DataError
from carrywave.spec.data_spec import DataSpec

BORDERS = {"word": re.compile(r"[ \n\t\r]"), "bpe": re.compile(r"\n")}
PIECE = 2 << 20  # characters: a list of words takes about 20 times the memory of the text


def learn_stream(source: Source, data: DataSpec, task: str, *, keep_rare: bool = False) -> Codec:
    """Learn the codec of a text file."""
    vocabulary.check_keys(data.tokens, data)
    texts = iter(()) if data.tokens == "byte" else pieces(source.text, data.tokens)
    words, bpe, size = vocabulary.learn(data.tokens, texts, data, keep_rare=keep_rare)
    return Codec(task, "text", data.tokens, words, bpe, size, lowercase=data.lowercase)


def encode_stream(source: Source, codec: Codec, tally: Tally) -> NDArray[Any]:
    """Encode a text file as one array of tokens; `tally` counts those that the vocabulary lacks."""
    if codec.kind is None or codec.kind == "int":
        raise DataError(f"this {codec.task} model was not trained on text; pass a file in the format of its training data")
    if not source.content:
        raise DataError(f"{source.name} is empty; use a file that contains text")
    if codec.kind == "byte":
        return np.frombuffer(source.content, np.uint8)
    parts = []
    for piece in pieces(source.text, codec.kind):
        ids = codec.tokens.ids(piece)
        tally.read(ids, codec.tokens.unknown, piece)
        parts.append(ids.astype(token_dtype(codec.size)))
    return np.concatenate(parts)


def pieces(text: str, kind: TokenizerKind, size: int = PIECE) -> Iterator[str]:
    """Yield pieces of the text whose tokens, concatenated, are those of the whole; for words, an unterminated last line gets a line end."""
    text = text + "\n" if kind == "word" and not text.endswith("\n") else text
    start = 0
    while start < len(text):
        border = BORDERS[kind].search(text, start + size) if kind in BORDERS else None
        end = len(text) if border is None else border.end()
        yield text[start:end]
        start = end
