"""Read a text file as one long stream of tokens, in two passes over blocks: the first learns the vocabulary, the second encodes.

A block may end anywhere, even inside a word or a line; text is cut into pieces only where that does not change the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.files.arrays import NewArray, token_dtype
from carrywave.data.files.source import Source
from carrywave.data.text import vocabulary
from carrywave.data.text.tally import Tally
from carrywave.data.text.tokenizers import TokenizerKind
from carrywave.errors import DataError
from carrywave.spec.data_spec import DataSpec

BORDERS = {"word": " \n\t\r", "bpe": "\n"}
WORD_BLOCK_BYTES = 2 << 20  # a list of words takes about 20 times the memory of the text


def learn_stream(source: Source, data: DataSpec, task: str, *, keep_rare: bool = False) -> Codec:
    """Learn the codec of a text file."""
    vocabulary.check_keys(data.tokens, data)
    texts = iter(()) if data.tokens == "byte" else pieces(source, data.tokens)
    words, bpe, size = vocabulary.learn(data.tokens, texts, data, keep_rare=keep_rare)
    return Codec(task, "text", data.tokens, words, bpe, size, lowercase=data.lowercase)


def encode_stream(source: Source, codec: Codec, new: NewArray, tally: Tally | None = None) -> NDArray[Any]:
    """Encode a text file as one array of tokens; `tally` counts those that the vocabulary lacks."""
    if codec.kind is None or codec.kind == "int":
        raise DataError(f"this {codec.task} model was not trained on text; pass a file in the format of its training data")
    tokens, tally, count = new(token_dtype(codec.size), None), tally or Tally(), 0
    if codec.kind == "byte":
        for block in source.blocks():
            tokens.append(np.frombuffer(block, np.uint8))
            count += len(block)
    else:
        for piece in pieces(source, codec.kind):
            ids = codec.tokens.ids(piece)
            tally.read(ids, codec.tokens.unknown, piece)
            tokens.append(ids)
            count += len(ids)
    if not count:
        raise DataError(f"{source.name} is empty; use a file that contains text")
    return tokens.close()


def pieces(source: Source, kind: TokenizerKind) -> Iterator[str]:
    """Yield pieces of the text whose tokens, concatenated, are those of the whole; for words, an unterminated last line gets a line end."""
    if kind == "char":
        return source.texts()
    small = replace(source, block_bytes=min(source.block_bytes, WORD_BLOCK_BYTES))
    return cut(finished(small.texts()) if kind == "word" else small.texts(), BORDERS[kind])


def cut(texts: Iterable[str], borders: str) -> Iterator[str]:
    """Yield the same text in pieces that end with a border, except possibly the last."""
    held: list[str] = []  # text since the last border
    for text in texts:
        end = max(text.rfind(border) for border in borders) + 1
        if end:
            yield "".join((*held, text[:end]))
            held = []
        held.append(text[end:])
    if rest := "".join(held):
        yield rest


def finished(texts: Iterable[str]) -> Iterator[str]:
    """Yield the same text, and a final line end if it lacks one."""
    last = "\n"
    for text in texts:
        yield text
        last = text[-1]
    if last != "\n":
        yield "\n"
