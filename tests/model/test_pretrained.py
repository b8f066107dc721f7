"""Pretrained embeddings: GloVe's and word2vec's text, and what is wrong with a file, by line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from carrywave.errors import DataError
from carrywave.model.pretrained.embeddings import load_pretrained

WORDS = ["<unk>", "cat", "new york", "3"]


def load(path: Path) -> tuple[int, list[list[float]]]:
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    found = load_pretrained(path, WORDS, weight)
    return found, weight.tolist()


@pytest.mark.parametrize("header", ["", "5 2\n"])
def test_reads_tokens_with_and_without_header(tmp_path: Path, header: str) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text(header + "cat 1 -2.5\ndog 9 9\nnew york 3 4 \n3 5e-1 6\ncat 7 7\n", encoding="utf-8")
    assert load(path) == (3, [[0.0, 0.0], [1.0, -2.5], [3.0, 4.0], [0.5, 6.0]])


def test_a_token_that_is_not_there_is_looked_up_in_lower_case(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("cat 1 2\ncat 8 8\nDog 3 4\nDOG 5 6\n", encoding="utf-8")
    weight = torch.nn.Parameter(torch.zeros(6, 2))
    assert load_pretrained(path, ["CAT", "Cat", "cat", "Dog", "DOG", "dog"], weight) == 5
    assert weight.tolist() == [[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cat 1 2\ndog 1\n", r"vectors.txt:2: 1 numbers, but the embedding has width 2"),
        (b"cat 1 2 3\n", r":1: 3 numbers, but the embedding has width 2; set model.embedding=3"),
        (b"100 3\ncat 1 2 3\n", r":1: vectors of width 3, but the embedding has 2"),
        (b"dog 1 2\ncat 1 x\n", r":2: 'x' is not a number"),
        (b"cat 1 nan\n", r":1: a number is not finite"),
        (b"cat 1 2\n\n", r":2: 0 numbers"),
        (b"cat 1 2\n\xff\xfe 1 2\n", r":2: not UTF-8"),
    ],
)
def test_wrong_lines_are_named_and_nothing_is_changed(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "vectors.txt"
    path.write_bytes(content)
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    with pytest.raises(DataError, match=message):
        load_pretrained(path, WORDS, weight)
    assert not weight.any()
