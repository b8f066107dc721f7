"""Data that is not the same everywhere is refused, with the file, the ranks and the hosts."""

from __future__ import annotations

import pytest

from carrywave.train.start.reading import FilesSeen, difference

ONE, TWO = "1" * 64, "2" * 64


def seen(host: str, digest: str, name: str = "train.txt", **more: str) -> FilesSeen:
    return FilesSeen(host, {"data.train": (name, digest), **{key: ("valid.txt", value) for key, value in more.items()}})


def test_the_same_content_under_other_names_is_the_same() -> None:
    assert difference([seen("a", ONE), seen("b", ONE, "/elsewhere/train.txt")]) is None
    assert difference([seen("a", ONE)]) is None


@pytest.mark.parametrize(
    ("others", "who"),
    [
        (["b"], "rank 1 on b"),
        (["b", "b"], "ranks 1, 2 on b"),
        (["b", "c"], "ranks 1, 2 on b, c"),
        (["b"] * 12, "ranks 1, 2, 3, 4, 5, 6, 7, 8, … on b"),
    ],
)
def test_a_difference_names_the_file_the_ranks_and_the_hosts(others: list[str], who: str) -> None:
    verb = "has" if len(others) == 1 else "have"
    said = difference([seen("a", ONE), *(seen(host, TWO) for host in others), seen("a", ONE)])
    assert said == (
        f"data.train=train.txt is not the same file everywhere: {who} {verb} SHA-256 222222222222…, rank 0 on a has 111111111111…; "
        "copy one of them to every host"
    )


def test_a_part_that_one_worker_lacks_is_a_difference() -> None:
    said = difference([seen("a", ONE, **{"data.valid": TWO}), seen("b", ONE)])
    assert said is not None
    assert said.startswith("data.valid=valid.txt is not the same file everywhere: rank 1 on b has SHA-256 nothing…")


def test_a_file_that_is_missing_elsewhere_is_told_with_its_host() -> None:
    missing = FilesSeen("b", failure="data.train=train.txt: file not found in /home; use the path of an existing file")
    assert difference([seen("a", ONE), missing]) == f"rank 1 on b: {missing.failure}"
    assert difference([missing, seen("b", ONE)]) is None  # reading it on rank 0 gives the error
