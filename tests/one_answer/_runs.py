"""Runs through the command line: their data, written by arithmetic and so the same everywhere, and their words."""

from __future__ import annotations

import json
import math
import random
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

TEXT = "the carry is passed along, and work moves through layers and time as a wave; "
COLOURS = ("red", "green", "blue")


def write_data(folder: Path) -> None:
    """All files of the runs below."""
    draw = random.Random(7)
    words = TEXT.replace(",", "").replace(";", "").split()
    (folder / "text.txt").write_text("\n".join(" ".join(draw.choices(words, k=9)) for _ in range(60)) + "\n")

    def lines(name: str, rows: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    waves, digits, tags, films = [], [], [], []
    for number in range(40):
        steps, fast = draw.randint(6, 14), number % 2
        wave = [[round(math.sin(t * (0.9 if fast else 0.4) + number), 4), round(draw.uniform(-1, 1), 4)] for t in range(steps)]
        waves.append({"steps": wave, "label": "fast" if fast else "slow"})
        digits.append({"steps": wave, "label": [round(sum(row[0] for row in wave) / steps, 4)]})
        tokens = draw.choices([*COLOURS, "a", "cat", "sat"], k=draw.randint(3, 8))
        tags.append({"tokens": tokens, "labels": ["B-colour" if token in COLOURS else "O" for token in tokens]})
        films.append(("good" if fast else "bad", " ".join(draw.choices(["film", "plot", "fine" if fast else "dull", "cast"], k=6))))
    lines("waves.jsonl", waves)
    lines("numbers.jsonl", digits)
    lines("tags.jsonl", tags)
    spoken = [{"steps": [row for _ in row["tokens"] for row in [[1.0, 0.0], [0.0, 1.0]]], "labels": row["tokens"][:2]} for row in tags]
    lines("spoken.jsonl", spoken)
    (folder / "films.csv").write_text("label,text\n" + "".join(f"{label},{text}\n" for label, text in films))
    rows = ["unique_id,ds,y,price"]
    for shop in ("north", "south"):
        for day in range(150):
            value = 10 + 3 * math.sin(2 * math.pi * day / 7) + draw.random() + (shop == "south")
            rows.append(f"{shop},2024-{1 + day // 28:02d}-{1 + day % 28:02d},{value:.3f},{1 + day % 3}")
    (folder / "shops.csv").write_text("\n".join(rows) + "\n")


SMALL = ("model.hidden=8", "train.seed=3", "train.precision=fp64", "train.lr=0.02", "train.warmup=0", "--device", "cpu")
STREAM = ("batch.lanes=4", "batch.steps=10", "train.epochs=2")
SEQUENCES = ("batch.tokens=96", "train.epochs=3")
CHARACTERS = ("task=language", "data.train=text.txt", "data.tokens=char", *STREAM)
RUNS: dict[str, tuple[str, ...]] = {
    "characters": (*CHARACTERS, "model.layers=2", "model.dropout=0.3"),
    "words": ("task=language", "data.train=text.txt", "data.tokens=word", "model.tie=true", "train.optimizer=sgd", "train.clip=1", *STREAM),
    "signals": ("task=classification", "data.train=waves.jsonl", "model.front=none", "model.bidirectional=true", *SEQUENCES),
    "gru": ("task=classification", "data.train=waves.jsonl", "model.cell=gru", "model.pool=mean", "model.front=none", *SEQUENCES),
    "texts": ("task=classification", "data.train=films.csv", "data.tokens=word", *SEQUENCES),
    "tags": ("task=tagging", "data.train=tags.jsonl", "model.crf=true", *SEQUENCES),
    "numbers": ("task=regression", "data.train=numbers.jsonl", *SEQUENCES),
    "transcripts": ("task=transcription", "data.train=spoken.jsonl", *SEQUENCES),
    "forecasts": ("task=forecasting", "data.train=shops.csv", "data.horizon=7", "data.season=7", "train.epochs=2"),
    "quantiles": (
        *("task=forecasting", "data.train=shops.csv", "data.horizon=7", "data.quantiles=[0.1,0.5,0.9]", "data.known=[price]"),
        "train.epochs=2",
    ),
}


def carrywave(*words: str) -> int:
    """`carrywave WORDS` in this process; returns the exit code."""
    try:
        with mock.patch.object(sys, "argv", ["carrywave", *words]):
            runpy.run_module("carrywave", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def rows(run: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def last(run: str | Path, split: str) -> float:
    return float([row for row in rows(run) if row["split"] == split][-1]["loss"])
