"""A text file as one long stream of tokens, in two passes over blocks: one learns the vocabulary, one writes the tokens.

A block may end anywhere, even inside a word or a line; pieces are cut only where the tokens stay those of the whole file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec, first_unknown, unknown_token
from carrywave.data.files.arrays import NewArray, token_dtype
from carrywave.data.files.source import Source
from carrywave.data.text import vocabulary
from carrywave.data.text.tokenizers import Kind, split_words
from carrywave.errors import DataError
from carrywave.spec.spec import DataSpec

BORDERS = {"word": " \n\t\r", "bpe": "\n"}
WORD_BLOCK_BYTES = 2 << 20  # a list of words takes some 20 times the bytes of their text
LONGEST_CHARS = 64 << 20  # between two borders


def learn_stream(source: Source, data: DataSpec, task: str) -> Codec:
    """The codec of a text file."""
    texts = iter(()) if data.tokens == "byte" else pieces(source, data.tokens)
    words, bpe, size = vocabulary.learn(data.tokens, texts, data)
    return Codec(task, "text", data.tokens, words, bpe, size)


def encode_stream(source: Source, codec: Codec, new: NewArray) -> NDArray[Any]:
    """All tokens of a text file, end to end."""
    tokens = new(token_dtype(codec.size), None)
    count = 0
    if codec.kind == "byte":
        for block in source.blocks():
            tokens.append(np.frombuffer(block, np.uint8))
            count += len(block)
    else:
        line = 1
        for piece in pieces(source, _kind(codec)):
            ids = codec.tokens.ids(piece)
            unknown = first_unknown(ids)
            if unknown is not None:
                place = line + _lines_before(piece, unknown, codec)
                raise DataError(unknown_token(codec.tokens.name(piece, unknown), f"{source.name}:{place}"))
            tokens.append(ids)
            count += len(ids)
            line += piece.count("\n")
    if not count:
        raise DataError(f"{source.name} is empty; give a file that holds text")
    return tokens.close()


def pieces(source: Source, kind: Kind) -> Iterator[str]:
    """The text in pieces whose tokens, laid end to end, are those of the whole; for words the last line always ends."""
    if kind == "char":
        return source.texts()
    small = replace(source, block_bytes=min(source.block_bytes, WORD_BLOCK_BYTES))
    return cut(finished(small.texts()) if kind == "word" else small.texts(), BORDERS[kind], source.name)


def cut(texts: Iterable[str], borders: str, name: str) -> Iterator[str]:
    """The same text, each piece but the last ending with a border."""
    held: list[str] = []  # no border in them yet
    held_chars = 0
    for text in texts:
        end = max(text.rfind(border) for border in borders) + 1
        if end:
            yield "".join((*held, text[:end]))
            held, held_chars, text = [], 0, text[end:]
        held.append(text)
        held_chars += len(text)
        if held_chars > LONGEST_CHARS:
            unit = "line" if borders == "\n" else "word"
            raise DataError(f"{name} holds a {unit} of more than {LONGEST_CHARS} characters; break it up, or use data.tokens=char")
    rest = "".join(held)
    if rest:
        yield rest


def finished(texts: Iterable[str]) -> Iterator[str]:
    """The same text, with a line end at its end."""
    last = "\n"
    for text in texts:
        yield text
        last = text[-1]
    if last != "\n":
        yield "\n"


def _lines_before(piece: str, index: int, codec: Codec) -> int:
    """Line ends of a piece before its token `index`."""
    if codec.kind != "word":
        return piece[:index].count("\n")
    for number, line in enumerate(piece.split("\n")):
        index -= len(split_words(line)) + 1
        if index < 0:
            return number
    raise IndexError(index)


def _kind(codec: Codec) -> Kind:
    if codec.kind is None or codec.kind == "int":
        raise DataError(f"the training data of this {codec.task} model is not text; give a file of the same form")
    return codec.kind
