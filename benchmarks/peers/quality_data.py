"""The data sets of `quality`: what a user would tell carrywave about each, where its files are, and by which metric it is judged.

Files are looked for in one folder, by the places of `data_sets`. What can be made on any machine is made: text that ships with Python,
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
TEXT_BYTES = 100_000
WAVES = {"train": 600, "test": 200}

Files = Mapping[str, Path]  # by what they are: train, valid, test, follows; all: what is to be split


@dataclass(frozen=True, eq=False)
class DataSet:
    """A row of the table."""

    name: str
    kind: str  # that picks it among others
    words: tuple[str, ...]  # the task and what else a user would say, as key=value, without the files
    metric: str
    files: Files = field(default_factory=dict)  # part: place in the folder of data
    make: Callable[[Mapping[str, Path], Path], Files] | None = None  # writes what has no file, from the files, to a folder
    recipe: str | None = None  # the name of its recipe in examples/, if it is not that of the row
    part: str = "test"  # that is scored

    @property
    def labels(self) -> bool:
        """Whether sequences have one label each."""
        return self.words[0] == CLASSES[0]

    @property
    def example(self) -> Path:
        """The place of its recipe, if there is one."""
        return EXAMPLES / f"{self.recipe or self.name}.yaml"

    def missing(self, folder: Path) -> list[Path]:
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


def _parts(place: str, *parts: str) -> Files:
    return {part: Path(place.format(part)) for part in parts or ("train", "test")}


def _shuffled(files: Files, folder: Path) -> Files:
    """The lines of a file as `label text`: by a shuffle with one seed, a tenth of them is the test."""
    lines = [line.split(" ", 1) for line in files["all"].read_text("latin-1").split("\n") if " " in line]
    order, held = np.random.default_rng(0).permutation(len(lines)), len(lines) // 10
    for part, rows in (("test", order[:held]), ("train", order[held:])):
        rows_of_part = [json.dumps({"text": lines[row][1], "label": lines[row][0]}) for row in rows]
        (folder / f"{part}.jsonl").write_text("\n".join(rows_of_part) + "\n", encoding="utf-8")
    return {part: folder / f"{part}.jsonl" for part in ("train", "test")}


def _forecast(horizon: int, *words: str) -> tuple[str, ...]:
    return ("task=forecasting", f"data.horizon={horizon}", "data.season=24", *words)


ETT: Files = {"train": Path("ett/ETTh1.csv")}
TEXTS = {"MR": "rt-polarity", "SUBJ": "subj", "CR": "custrev", "MPQA": "mpqa"}  # by their names in harvardnlp/sent-conv-torch
WIKITEXT = ("task=language", "data.tokens=word", "model.hidden=200", "train.epochs=6")
MONTHS = "data.split=[8640,2880,2880]"  # 12, 4 and 4 months
CLASSES = ("task=classification",)


def data_sets(folder: Path) -> list[DataSet]:
    """All data sets: signals are those whose files are in the folder."""
    theirs = published(folder)
    signals = [path.name.removesuffix(".train.jsonl.gz") for path in sorted(folder.glob("ucr/*.train.jsonl.gz"))]
    return [
        DataSet("m4-hourly", "m4", _forecast(48), "mase", files=_parts("m4-hourly/{}.csv.gz"), make=_joined),
        *(
            DataSet(name, "texts", CLASSES, "accuracy", files={"all": Path(f"texts/{file}.all")}, make=_shuffled)
            for name, file in TEXTS.items()
        ),
        *(
            DataSet(name, "ucr" if name in theirs else "signals", CLASSES, "accuracy", files=_parts(f"ucr/{name}.{{}}.jsonl.gz"))
            for name in signals
        ),
        DataSet("japanese-vowels", "vowels", CLASSES, "accuracy", files=_parts("japanese-vowels/{}.jsonl")),
        DataSet("etth1-24", "ett", _forecast(24, MONTHS), "mae", files=ETT, recipe="etth1"),
        DataSet("etth1-96", "ett", _forecast(96, MONTHS), "mae", files=ETT),
        DataSet("readme", "words", ("task=language", "data.train=builtin:python-topics"), "bits", part="valid", recipe="characters"),
        DataSet("small-text", "words", ("task=language", "model.hidden=64", "train.epochs=2"), "perplexity", make=_beginning, part="valid"),
        DataSet("wikitext-2", "words", WIKITEXT, "perplexity", files=_parts("wikitext-2/{}.txt", "train", "valid", "test")),
        DataSet("waves", "made", ("task=regression",), "mae", make=_waves),
        DataSet("python-functions", "made", CLASSES, "accuracy", make=_of_library("functions")),
        DataSet("python-tags", "made", ("task=tagging",), "accuracy", make=_of_library("tags")),
    ]


def published(folder: Path) -> Mapping[str, Mapping[str, float]]:
    """By data set, the figures of others."""
    file = folder / "ucr" / "published.json"
    found: Mapping[str, Mapping[str, float]] = json.loads(file.read_text()) if file.is_file() else {}
    return found
