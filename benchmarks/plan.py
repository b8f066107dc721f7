"""Claim: the plan that training chooses by real steps is close to the fastest, and the prediction of `carrywave plan` to what a step takes.

Ten recipes of examples/ with data made up in the sizes of theirs, by the commands that a user has: `carrywave train --devices N` (2 by
default) chooses a plan, and `carrywave plan` predicts that one and others; each of them, and one device, is then trained for a few steps.
The median of the steps counts, without the first. `of_best` is the time relative to the fastest plan of the recipe, targets: 1.05 for the
one chosen; `error` is that of the prediction.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.harness.command import main
from benchmarks.harness.workers import printed
from carrywave.errors import RunError, UserError

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS, QUICK_STEPS, RIVALS = 12, 3, 3
SMALL = ("model.hidden=16", "train.warmup=0")

Row = dict[str, Any]
Maker = Callable[[np.random.Generator, bool], Mapping[str, str]]  # (draw, small) -> the text of each file, by its part


def _text(draw: np.random.Generator, small: bool) -> Mapping[str, str]:
    vocabulary, count = (50, 2_000) if small else (33_278, 400_000)
    words = np.concatenate([np.arange(vocabulary), draw.integers(vocabulary, size=count)])  # every word occurs
    lines = (" ".join(f"w{word}" for word in words[at : at + 25]) for at in range(0, len(words), 25))
    text = "\n".join(lines) + "\n"
    return {"train": text, "valid": text[:20_000], "test": text[:20_000]}


def _rows(lengths: Sequence[int], count: int, row: Callable[[np.random.Generator, int], Mapping[str, Any]]) -> Maker:
    """JSON lines of sequences; `lengths` are quantiles, from the shortest to the longest."""

    def make(draw: np.random.Generator, small: bool) -> Mapping[str, str]:
        places = np.linspace(0, 1, 40 if small else count)
        drawn = draw.permutation(np.interp(places, np.linspace(0, 1, len(lengths)), lengths).round().astype(int))
        text = "".join(json.dumps(row(draw, min(length, 60) if small else length)) + "\n" for length in drawn.tolist())
        few = "".join(text.splitlines(keepends=True)[:30])
        return {"train": text, "valid": few, "test": few}

    return make


def _table(columns: Sequence[str], rows: int, series: int = 1) -> Maker:
    """A CSV file of random numbers, hour by hour or, with several series, day by day."""

    def make(draw: np.random.Generator, small: bool) -> Mapping[str, str]:
        start, unit = np.datetime64("2000-01-01T00"), "h" if series == 1 else "D"
        lines = [",".join((["basin"] if series > 1 else []) + ["date", *columns])]
        for name in range(series):
            fixed = draw.normal(size=len(columns))
            for row in range(rows):
                values = [f"{fixed[at] if each[0] == 's' else draw.normal():.4f}" for at, each in enumerate(columns)]
                lines.append(",".join([f"b{name}"] * (series > 1) + [str(start + np.timedelta64(row, unit)), *values]))
        return {"train": "\n".join(lines) + "\n"}

    return make


def _signal(draw: np.random.Generator, length: int) -> Row:
    return {"steps": draw.normal(size=(length, 1)).round(3).tolist(), "label": f"c{draw.integers(6)}"}


def _tags(draw: np.random.Generator, length: int) -> Row:
    return {
        "tokens": [f"word{number}" for number in draw.integers(870, size=length)],
        "labels": [f"B-{number}" for number in draw.integers(127, size=length)],
        "weight": 1,
    }


def _spelling(draw: np.random.Generator, length: int) -> Row:
    sounds = draw.integers(39, size=max(1, round(0.85 * length)))
    return {"tokens": [chr(97 + number) for number in draw.integers(26, size=length)], "labels": [f"s{number}" for number in sounds]}


def _notes(draw: np.random.Generator, length: int) -> Row:
    played = draw.random((length + 1, 88)) < 0.05
    return {"steps": played[:-1].astype(int).tolist(), "labels": played[1:].astype(int).tolist()}


STATIC = [f"s{number}" for number in range(27)]
RECIPES: Mapping[str, tuple[Maker | None, tuple[str, ...]]] = {  # with the keys that made-up data needs
    "awd-lstm": (_text, ()),
    "awd-lstm-90": (_text, ()),
    "wikitext-2-650": (_text, ()),
    "characters": (None, ()),
    "osuleaf": (_rows([427], 200, _signal), ()),
    "etth1": (_table(list("abcdefg"), 14_400), ()),
    "atis-slots": (_rows([1, 6, 8, 9, 10, 11, 12, 13, 14, 17, 46], 4478, _tags), ()),
    "cmudict": (_rows([1, 5, 6, 6, 7, 7, 8, 8, 9, 10, 22], 40_000, _spelling), ()),
    "streamflow": (_table(["flow", *"abcde", *STATIC], 7305, 18), (f"data.static={json.dumps(STATIC)}",)),
    "nottingham": (_rows([40, 130, 160, 190, 200, 220, 240, 260, 300, 400, 1788], 694, _notes), ()),
}


def run(*, quick: bool = False, rows: Sequence[str] = (), devices: int = 2, device: str = "auto") -> list[Row]:
    """A row for each recipe and plan; `rows` names recipes."""
    names = [name for name in RECIPES if name in rows or not rows]
    if not names:
        raise UserError(f"no recipe {' or '.join(rows)}; use some of {', '.join(RECIPES)}")
    found: list[Row] = []
    for name in names[5:6] if quick and not rows else names:
        with tempfile.TemporaryDirectory(prefix="carrywave-plan-") as folder:
            found += printed(_compared(name, Path(folder), devices, device, quick=quick))
    return found


def _compared(name: str, folder: Path, devices: int, device: str, *, quick: bool) -> list[Row]:
    maker, keys = RECIPES[name]
    spec = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    words = [str(EXAMPLES / f"{name}.yaml"), *keys, *(SMALL if quick else ())]
    for part, text in (maker(np.random.default_rng(1), quick) if maker else {}).items():
        path = folder / f"{part}{'.csv' if spec['task'] in ('forecasting', 'regression') else '.jsonl' if text[0] == '{' else '.txt'}"
        path.write_text(text, encoding="utf-8")
        words.append(f"data.{part}={path.name}")
    _step_ms(folder, words, {}, devices, "chosen", device, 1)
    known = json.loads((folder / "chosen" / "plan.json").read_text())
    keys = ("replicas", "stages", "cuts", "chunk_steps", "micro_batches", "share_head", "recompute")
    asked = "plan=" + json.dumps({key: known[key] for key in keys if known[key]})
    _call(folder, "plan", *words, asked, "--devices", str(devices), "--device", device, "--json", "plan.json")
    choice = json.loads((folder / "plan.json").read_text())
    plans = {json.dumps({"replicas": 1, "stages": 1}): None, json.dumps(choice["plan"]): choice["step_seconds"]}
    for rival in choice["alternatives"][:RIVALS]:
        plans.setdefault(json.dumps(rival["plan"]), rival["step_seconds"])
    table: list[Row] = []
    for number, (plan, predicted) in enumerate(plans.items()):
        row: Row = {"recipe": name, "plan": plan, "chosen": "chosen" if plan == json.dumps(choice["plan"]) else ""}
        row |= {"predicted_ms": None if predicted is None else round(1e3 * predicted, 2), "measured_ms": None, "note": ""}
        try:
            asked = json.loads(plan)
            workers = asked.get("replicas", 1) * asked.get("stages", 1)
            row["measured_ms"] = _step_ms(folder, words, asked, workers, f"run-{number}", device, QUICK_STEPS if quick else STEPS)
        except RunError as error:
            row["note"] = str(error)
        table.append(row)
    best = min((row["measured_ms"] for row in table if row["measured_ms"]), default=None)
    for row in table:
        measured, predicted = row["measured_ms"], row["predicted_ms"]
        row["of_best"] = round(measured / best, 3) if measured and best else None
        row["error"] = round(predicted / measured - 1, 3) if measured and predicted else None
    return table


def _step_ms(folder: Path, words: Sequence[str], plan: Row, devices: int, run: str, device: str, steps: int) -> float:
    """Milliseconds of a step of this plan, or of the one that training chooses: the median over those of a run, without the first."""
    keys = [f"train.max_steps={steps}", "train.log_every=1", "train.snapshot_every=0", "train.warmup=0"]
    keys += [f"plan={json.dumps(plan)}"] if plan else []
    _call(folder, "train", *words, *keys, "--devices", str(devices), "--device", device, "--run", run)
    lines = [json.loads(line) for line in (folder / run / "timing.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if line["split"] == "train" and "seconds" in line]
    return round(1e3 * statistics.median(seconds[1:] or seconds), 2)


def _call(folder: Path, *words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "carrywave", *words]
    ended = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RunError((ended.stderr.strip() or "no output").splitlines()[-1])


if __name__ == "__main__":
    main("benchmarks.plan")
