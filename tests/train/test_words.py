"""Tagging words by how they are spelled: words that train does not have, vectors from elsewhere, and the same answer in other runtimes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import carrywave as cw
from carrywave.prediction.saved_run import open_run


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Sentences of made-up words; what a word is, its ending tells. Hardly any word occurs twice."""
    draw = random.Random(seed)
    endings = {"ing": "verb", "ous": "adjective", "ly": "adverb"}
    made = []
    for _ in range(count):
        ends = draw.choices(list(endings), k=draw.randint(2, 6))
        words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))).title() + end for end in ends]
        made.append({"tokens": words, "labels": [endings[end] for end in ends]})
    return made


def fitted(run: Path, characters: int, *, more: dict[str, Any] | None = None, **sections: Any) -> cw.Result:
    model = {"hidden": 16, "layers": 1, "embedding": 8, "dropout": 0.1, "characters": characters, **(more or {})}
    how: dict[str, Any] = {"task": "tagging", "batch": {"tokens": 128}, "train": {"lr": 0.02, "epochs": 4}, **sections}
    return cw.fit(model, {"train": rows(150, 1), "valid": rows(40, 2)}, run=run, device="cpu", **how)


def outputs(run: Path, data: list[dict[str, Any]]) -> list[list[str]]:
    return [row["labels"] for row in cw.predict(run, [{"tokens": row["tokens"]} for row in data], device="cpu")]


def test_words_that_train_does_not_have_are_known_by_their_characters(tmp_path: Path) -> None:
    fitted(tmp_path / "run", 12, more={"dropout_rare": 0.5})
    new = rows(30, 3)
    right = [a == b for got, row in zip(outputs(tmp_path / "run", new), new, strict=True) for a, b in zip(got, row["labels"], strict=True)]
    assert sum(right) > 0.95 * len(right)


def test_unknown_words_are_learned_from_rare_ones_or_mean_nothing(tmp_path: Path) -> None:
    """A random vector would stand for something."""
    for share in (0.0, 0.5):
        run = tmp_path / f"run{share}"
        fitted(run, 0, more={"dropout_rare": share}, train={"lr": 0.02, "epochs": 1})
        saved = open_run(run, "cpu", None, whole=True)
        assert bool(saved.model.encoder.weight[-1].any())
        words = {word for row in rows(150, 1) for word in row["tokens"]}
        assert (words < set(saved.task.codec.vocabulary)) == bool(share)  # without it, some of those that occur once have no place
    no_rare_words = [{"tokens": ["Ann", "runs"], "labels": ["name", "verb"]}] * 10
    small = cw.fit({"hidden": 4}, no_rare_words, task="tagging", train={"epochs": 1}, run=tmp_path / "small", device="cpu")
    assert not bool(small.model.encoder.weight[-1].any())
