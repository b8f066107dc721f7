"""Loads pretrained embeddings from text in GloVe or word2vec format: a token and its numbers per line, after an optional `N D` line."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from carrywave.errors import DataError


def load_pretrained(path: str | Path, vocabulary: Sequence[str], weight_VE: Tensor) -> int:
    """Copy the vectors of the vocabulary's tokens into the rows of the matrix, and return how many were found.

    A token that the file does not have gets the vector that it has in lower case, if any. The matrix is unchanged if the file has any
    error. If a token occurs twice, its first line counts.
    """
    if weight_VE.shape[0] < len(vocabulary):
        raise DataError(
            f"the embedding has {weight_VE.shape[0]} rows for a vocabulary of {len(vocabulary)} tokens; make it as large as the vocabulary"
        )
    rows = {token: row for row, token in enumerate(vocabulary)}
    others: dict[str, list[int]] = {}  # rows by how their tokens are written in lower case, if that is otherwise
    for token, row in rows.items():
        if token.lower() != token:
            others.setdefault(token.lower(), []).append(row)
    vectors: dict[int, list[float]] = {}
    lowered: dict[int, list[float]] = {}
    width = weight_VE.shape[1]
    opener = gzip.open if str(path).endswith(".gz") else open
    number = 0
    try:
        with opener(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                fields = line.decode("utf-8").rstrip().split(" ")
                if number == 1 and width > 1 and len(fields) == 2 and all(field.isdigit() for field in fields):
                    if int(fields[1]) != width:
                        raise DataError(
                            f"{path}:1: vectors of width {fields[1]}, but the embedding has {width}; set model.embedding={fields[1]}"
                        )
                    continue
                token = _token(fields, width, path, number)
                if token not in rows and token not in others:
                    continue
                values = _numbers(fields[-width:], path, number)
                if token in rows:
                    vectors.setdefault(rows[token], values)
                for other in others.get(token, ()):
                    lowered.setdefault(other, values)
    except UnicodeDecodeError:
        raise DataError(f"{path}:{number}: not UTF-8 text; use a text file with a token and its numbers on each line") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); pass a text file of embeddings") from None
    vectors = lowered | vectors
    if vectors:
        with torch.no_grad():
            weight_VE[list(vectors)] = torch.tensor(list(vectors.values()), dtype=weight_VE.dtype, device=weight_VE.device)
    return len(vectors)


def _token(fields: list[str], width: int, path: str | Path, line: int) -> str:
    """The token before the numbers. It may contain spaces, but surplus fields that are all numbers mean another width, not a long token."""
    extra = len(fields) - 1 - width
    if extra < 0 or (extra and all(_is_number(field) for field in fields[1 : 1 + extra])):
        shown = len(fields) - 1
        raise DataError(
            f"{path}:{line}: {shown} numbers, but the embedding has width {width}; set model.embedding={shown} or use another file"
        )
    return " ".join(fields[: 1 + extra])


def _numbers(fields: list[str], path: str | Path, line: int) -> list[float]:
    try:
        values = [float(field) for field in fields]
    except ValueError:
        bad = next(field for field in fields if not _is_number(field))
        raise DataError(f"{path}:{line}: {bad!r} is not a number; every line needs a token and {len(fields)} numbers") from None
    if not all(math.isfinite(value) for value in values):
        raise DataError(f"{path}:{line}: a number is not finite; every line needs a token and {len(fields)} finite numbers")
    return values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
