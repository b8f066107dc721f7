"""A zoo of small trained runs, one of each kind: trained when first asked for, once a session, and changed by no test.

A test that spoils a run copies it first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

ONE_LAYER = {"hidden": 10, "layers": 1}
Row = dict[str, Any]


def write(path: Path, rows: list[Row]) -> Path:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def labelled(number: int, seed: int) -> list[Row]:
    """Sequences of two numbers a step that lie high or low."""
    draw = np.random.default_rng(seed)
    rows = []
    for place in range(number):
        label = ["down", "up"][int(draw.integers(2))]
        steps = draw.normal(size=(int(draw.integers(1, 15)), 2)) + (2.0 if label == "up" else -2.0)
        rows.append({"steps": steps.round(3).tolist(), "label": label, "id": f"{place:03}"})
    return rows


def texts(number: int, seed: int) -> list[Row]:
    """Short texts with an id."""
    made = [("ab", "a"), ("cdcd", "c"), ("efef", "e"), ("abababab", "a")]
    return [{"text": made[place % 4][0], "label": made[place % 4][1], "id": f"{place:03}"} for place in range(number)]


def sentences(number: int, seed: int) -> list[Row]:
    """Words with a tag each."""
    draw = np.random.default_rng(seed)
    words = [[["cat", "dog", "runs", "sees"][i] for i in draw.integers(4, size=int(draw.integers(1, 12)))] for _ in range(number)]
    return [{"tokens": each, "labels": ["noun" if word in ("cat", "dog") else "verb" for word in each]} for each in words]


def spans(number: int, seed: int) -> list[Row]:
    """Steps with tags of spans: a B-x is followed by an I-x."""
    draw = np.random.default_rng(seed)
    kinds, rows = [["O"], ["B-x", "I-x"], ["B-y"]], list[Row]()
    for _ in range(number):
        labels = [label for kind in draw.integers(3, size=int(draw.integers(1, 6))) for label in kinds[kind]]
        rows.append({"steps": [[float(x == "O"), float(x[:1] == "B"), float(draw.normal())] for x in labels], "labels": labels})
    return rows


def numbers(number: int, seed: int) -> list[Row]:
    """Two numbers for a sequence: one that varies around 1000, and a constant."""
    draw = np.random.default_rng(seed)
    steps = [draw.normal(size=(int(draw.integers(3, 6)), 1)).round(3) for _ in range(number)]
    return [{"steps": each.tolist(), "label": [1000.0 + 50.0 * float(each.mean()), 3.0]} for each in steps]


def each_step(number: int, seed: int) -> list[Row]:
    """A number for every step."""
    draw = np.random.default_rng(seed)
    steps = [draw.normal(size=(9, 2)).round(3) for _ in range(number)]
    return [{"steps": each.tolist(), "labels": (each.sum(1) * 7 + 3).tolist()} for each in steps]


def several(number: int, seed: int) -> list[Row]:
    """Any number of labels for a sequence."""
    rows = labelled(number, seed)
    means = [np.mean(row["steps"], axis=0) > 0 for row in rows]
    return [{**row, "label": [name for name, here in zip("ab", mean, strict=True) if here]} for row, mean in zip(rows, means, strict=True)]


def spoken(number: int, seed: int) -> list[Row]:
    """Labels in a row, each of which lasts for some steps."""
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(number):
        labels = [int(label) for label in draw.integers(3, size=int(draw.integers(1, 5)))]
        steps = [np.eye(4)[label] for label in labels for label in (label, label, 3)]
        rows.append({"steps": np.array(steps).tolist(), "labels": ["xyz"[label] for label in labels]})
    return rows


def days(path: Path, number: int, names: tuple[str, ...] = ("small", "large")) -> Path:
    """Series of different scales with a season of a week."""
    levels = {"small": (3.0, 0.5), "large": (3000.0, 400.0), "new": (50.0, 5.0)}
    lines = ["unique_id,ds,y"]
    for name in names:
        level, swing = levels[name]
        values = level + swing * np.sin(np.arange(number) * np.pi / 3.5)
        lines += [f"{name},{np.datetime64('2024-01-01') + day},{value:.4f}" for day, value in enumerate(values)]
    path.write_text("\n".join(lines) + "\n")
    return path


def spec(task: str, data: Row | None = None, model: Row | None = None, *, batch: Row | None = None, **train: Any) -> Row:
    """A small spec."""
    return {"task": task, "data": data or {}, "model": ONE_LAYER | (model or {}), "batch": batch or {"tokens": 64}, "train": train}


CHARACTERS = {"tokens": "char"}
WEEKS = {"horizon": 7, "season": 7, "share": 0.2, "quantiles": [0.1, 0.5, 0.9]}
KINDS: dict[str, tuple[Any, Row]] = {  # how data is made, and the spec
    "text": ("abcdefgh\n" * 300, spec("language", batch={"lanes": 4, "steps": 20, "eval_lanes": 1}, epochs=4, lr=0.03, clip=1.0)),
    "labels": (labelled, spec("classification", epochs=6, lr=0.02)),
    "texts": (texts, spec("classification", CHARACTERS, epochs=1, lr=0.05)),
    "tags": (sentences, spec("tagging", batch={"tokens": 40}, epochs=8, lr=0.03)),
    "streamed tags": (sentences, spec("tagging", batch={"lanes": 3, "steps": 8}, epochs=8, lr=0.03)),
    "spans": (spans, spec("tagging", model={"crf": True}, epochs=4, best="span_f1")),
    "numbers": (numbers, spec("regression", epochs=15, lr=0.02)),
    "each step": (each_step, spec("regression", {"each_step": True}, batch={"lanes": 2, "steps": 4}, epochs=2)),
    "several": (several, spec("classification", {"multi_label": True}, epochs=4, lr=0.02)),
    "spoken": (spoken, spec("transcription", epochs=3, lr=0.02)),
    "series": (days, spec("forecasting", WEEKS, {"linear": 0}, batch={"lanes": 4, "steps": 14}, epochs=10, lr=0.01)),
}


class Zoo:
    """The runs, in folders of their own below one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, kind: str, seed: int = 1) -> Path:
        """The folder of a run. Those of another seed are of the same data, and hold out other rows of it."""
        from carrywave.spec.load import parse
        from carrywave.train.fit import train

        run = self.folder / f"{kind}-{seed}".replace(" ", "-")
        if not run.exists():
            values: Row = json.loads(json.dumps(KINDS[kind][1]))
            values["data"]["train"], values["train"]["seed"] = str(self.data(kind)), seed
            train(parse(values), run=run, device="cpu")
        return run

    def data(self, kind: str) -> Path:
        """The file that a run was trained on."""
        made = KINDS[kind][0]
        path = self.folder / f"{kind.replace(' ', '-')}{'.txt' if isinstance(made, str) else '.csv' if made is days else '.jsonl'}"
        if not path.exists():
            if isinstance(made, str):
                path.write_text(made)
            elif made is days:
                days(path, 120)
            else:
                write(path, made(80, 0))
        return path

    def rows(self, kind: str, number: int = 20) -> list[Row]:
        """Other rows of the same kind."""
        found: list[Row] = KINDS[kind][0](number, 7)
        return found
