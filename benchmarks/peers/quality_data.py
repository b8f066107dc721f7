"""The data sets of `quality`: what a user would tell carrywave about each, where its files are, and by which metric it is judged.

Files are looked for in one folder, by the places of `DATA_SETS`. What can be made on any machine is made: text that ships with Python,
the functions of its standard library, and noisy sine waves whose frequency is to be found.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from carrywave.data.files.source import builtin_text

EXAMPLES = Path(__file__).parents[2] / "examples"
HIGHER = ("accuracy",)  # metrics that are better if higher; of the others, lower is better
TEXT_BYTES = 100_000
WAVES = {"train": 600, "test": 200}

Files = Mapping[str, Path]  # by what they are: train, valid, test, follows


@dataclass(frozen=True)
class DataSet:
    """A row of the table."""

    name: str
    words: tuple[str, ...]  # the task and what else a user would say, as key=value, without the files
    metric: str
    files: Mapping[str, str] = field(default_factory=dict)  # part: place in the folder of data
    make: Callable[[Mapping[str, Path], Path], Files] | None = None  # writes what has no file, from the files, to a folder
    recipe: str | None = None  # the name of its recipe in examples/, if it is not that of the row
    part: str = "test"  # that is scored
    lags: int = 96  # forecasting: values that the ridge regression reads

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger figure is a better one."""
        return self.metric in HIGHER

    def missing(self, folder: Path) -> list[str]:
        """The files that are not in the folder of data."""
        return [place for place in self.files.values() if not (folder / place).is_file()]

    def ready(self, folder: Path, work: Path) -> Files:
        """The paths of all files; those that have to be made are written to a folder of their own in `work`."""
        found = {part: (folder / place).absolute() for part, place in self.files.items()}
        if self.make is None:
            return found
        own = work / self.name
        own.mkdir(parents=True, exist_ok=True)
        return self.make(found, own)


def read_long(path: Path) -> dict[str, list[list[str]]]:
    """The rows of a long CSV file, possibly compressed, by its first column."""
    found: dict[str, list[list[str]]] = {}
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        rows = csv.reader(lines)
        next(rows)
        for row in rows:
            found.setdefault(row[0], []).append(row)
    return found


def _joined(files: Files, folder: Path) -> Files:
    """Each series of train, continued by that of test: forecasts are made from where train ends.

    Hours are counted so that all series end in the same one: an origin is a moment, and the files have a number in place of one.
    """
    train, test = read_long(files["train"]), read_long(files["test"])
    whole = {name: [*rows, *test.get(name, [])] for name, rows in train.items()}
    longest = max(map(len, whole.values()))
    path = folder / "train-and-test.csv"
    with path.open("w", encoding="utf-8", newline="") as out:
        lines = csv.writer(out, lineterminator="\n")
        lines.writerow(["unique_id", "ds", "y"])
        for name, rows in whole.items():
            lines.writerows([name, longest - len(rows) + place, row[2]] for place, row in enumerate(rows, start=1))
    return {"train": files["train"], "follows": path}


def _beginning(_: Files, folder: Path) -> Files:
    """The first bytes of the text that ships with Python."""
    path = folder / "train.txt"
    path.write_bytes(builtin_text().encode()[:TEXT_BYTES])
    return {"train": path}


def _waves(_: Files, folder: Path) -> Files:
    """Noisy sine waves of 40 to 120 steps with any amplitude and phase; the target is the number of cycles in 100 steps, from 2 to 10."""
    draw = np.random.default_rng(0)
    found = {}
    for part, count in WAVES.items():
        lines = []
        for _number in range(count):
            cycles, size, phase = draw.uniform(2, 10), draw.uniform(0.5, 2.0), draw.uniform(0, 2 * math.pi)
            steps = np.arange(draw.integers(40, 121))
            values = size * np.sin(2 * math.pi * cycles * steps / 100 + phase) + draw.normal(0, 0.3, len(steps))
            lines.append(json.dumps({"steps": [[round(float(value), 4)] for value in values], "label": round(float(cycles), 4)}))
        found[part] = folder / f"{part}.jsonl"
        found[part].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return found


def _of_library(kind: str) -> Callable[[Files, Path], Files]:
    """The functions of Python's standard library, as the example writes them."""

    def make(_: Files, folder: Path) -> Files:
        program = f"import python_data; python_data.main({str(folder)!r})"
        subprocess.run([sys.executable, "-c", program], cwd=EXAMPLES, check=True, capture_output=True)
        return {part: folder / f"{kind}-{part}.jsonl" for part in ("train", "test")}

    return make


def _forecast(horizon: int, *words: str) -> tuple[str, ...]:
    return ("task=forecasting", f"data.horizon={horizon}", "data.season=24", *words)


ETT = {"train": "ett/ETTh1.csv"}
MONTHS = "data.split=[8640,2880,2880]"  # 12, 4 and 4 months
CLASSES = ("task=classification",)
DATA_SETS = (
    DataSet("readme", ("task=language", "data.train=builtin:python-topics"), "bits", part="valid", recipe="characters"),
    DataSet("small-text", ("task=language", "model.hidden=64", "train.epochs=2"), "perplexity", make=_beginning, part="valid"),
    DataSet(
        "wikitext-2",
        ("task=language", "data.tokens=word", "model.hidden=200", "train.epochs=6"),
        "perplexity",
        files={part: f"wikitext-2/{part}.txt" for part in ("train", "valid", "test")},
    ),
    DataSet("etth1-24", _forecast(24, MONTHS), "mae", files=ETT, recipe="etth1"),
    DataSet("etth1-96", _forecast(96, MONTHS), "mae", files=ETT),
    DataSet(
        "m4-hourly",
        _forecast(48),
        "mase",
        files={part: f"m4-hourly/{part}.csv.gz" for part in ("train", "test")},
        make=_joined,
        lags=336,
    ),
    *(
        DataSet(name, CLASSES, "accuracy", files={part: f"ucr/{name}.{part}.jsonl.gz" for part in ("train", "test")})
        for name in ("acsf1", "osuleaf", "basicmotions")
    ),
    DataSet("japanese-vowels", CLASSES, "accuracy", files={part: f"japanese-vowels/{part}.jsonl" for part in ("train", "test")}),
    DataSet("waves", ("task=regression",), "mae", make=_waves),
    DataSet("python-functions", CLASSES, "accuracy", make=_of_library("functions")),
    DataSet("python-tags", ("task=tagging",), "accuracy", make=_of_library("tags")),
)
