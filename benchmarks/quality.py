"""Claim: with nothing but a task and its files, carrywave learns at least as much as plain PyTorch with its defaults, or a simple baseline.

Data sets × columns: in each cell the median of the metric over the seeds, the lowest and the highest, and the median of the seconds of
training, without evaluations; `--json` has a row for each cell. Defaults are chosen by this table.

- `ours`: what a user gets from the task and the files, and where the row's name has them, sizes and epochs (`peers/quality_data.py`);
- `recipe`: its recipe in examples/, where there is one;
- `torch`: `nn.Embedding`, `nn.LSTM`, `nn.Linear` and Adam as they are, with the sizes, batches and number of steps of `ours`
  (`peers/torch_defaults.py`). If `ours` is not among the columns, with the epochs of its spec;
- `simple`: the best of what takes no network (`peers/simple_baselines.py`); one run, since it draws nothing.

Every run is a process of its own, `carrywave train` for the first two columns. Figures of ours are those of the run, for the weights that
are best on valid: its row for test, or for valid where there is no test; of M4, those of `carrywave backtest` from the last origin. MASE is
relative to the seasonal change within the rows that are trained on. The peers read the data by carrywave, so that targets are the same.

`--data FOLDER` has the files (docs/benchmarks.md lists them); a data set whose files are not there is skipped with a line. `--rows` and
`--columns` pick, `--seeds N` says how often (3), `--at-once N` how many runs side by side (1): small networks leave a GPU idle.
`--set KEY=VALUE` changes the spec of `ours`, and sizes and batches of `torch` with it, to compare defaults.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.command import main
from benchmarks.peers import simple_baselines, torch_defaults
from benchmarks.peers.quality_data import DATA_SETS, EXAMPLES, DataSet, Files
from carrywave.data.files.arrays import MemoryAppender
from carrywave.data.prepare import prepare
from carrywave.data.python_inputs import series_of
from carrywave.data.tables import series
from carrywave.errors import RunError, UserError
from carrywave.launch.hardware import cores
from carrywave.spec.defaults import fitted
from carrywave.spec.load import load
from carrywave.tasks.task import Part, Task

COLUMNS = ("ours", "recipe", "torch", "simple")
QUICK = ("model.hidden=16", "model.layers=1", "train.epochs=1", "train.max_steps=3")
# How data is read for plain PyTorch and simple baselines, whatever carrywave's defaults are: values in units of train's deviations, and
# forecasts of the values themselves.
PLAIN = {
    "language": (),
    **dict.fromkeys(("classification", "tagging", "regression"), ("data.standardize=true",)),
    "forecasting": ("data.standardize=true", "data.residual=none", "data.channels=joint", "model.linear=0", "batch.windows=contiguous"),
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run for one cell of the table."""

    data_set: DataSet
    column: str
    seed: int
    words: tuple[str, ...]  # of the spec, after the recipe if there is one
    follows: str | None = None  # the file of train's series whose last horizon is the test, if that is how it is scored


@dataclass(frozen=True)
class Result:
    """What came of it: a figure, or a note that says why there is none."""

    cell: Cell
    figure: float | None = None
    seconds: float = 0.0  # of training, without evaluations
    steps: int | None = None
    note: str = ""


def run(
    *,
    quick: bool = False,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    data: Path = Path("data"),
    seeds: int | None = None,
    at_once: int = 1,
    set: Sequence[str] = (),
) -> list[Row]:
    """A row for each data set and column, and one for each data set that is skipped."""
    wanted = [name for name in COLUMNS if name in columns or not columns]
    chosen = [each for each in DATA_SETS if not rows or any(all(word in each.name for word in text.split()) for text in rows)]
    if not chosen or not wanted:
        raise UserError(f"nothing is picked; use {', '.join(each.name for each in DATA_SETS)}, and {', '.join(COLUMNS)}")
    chosen = chosen[:2] if quick and not rows else chosen
    with tempfile.TemporaryDirectory(prefix="carrywave-quality-") as name:
        work = Path(name)
        chains: list[list[Cell]] = []
        table: list[Row] = []
        for each in chosen:
            if missing := each.missing(data):
                note = f"skipped: {data / missing[0]} is not there; --data FOLDER says where files are"
                table.append(_row(each, "all", [], note))
                continue
            extra = [*(QUICK if quick else ()), f"data.cache={work / 'cache'}"]
            chains += _chains(each, each.ready(data, work), wanted, range(1, 1 + (seeds or (1 if quick else 3))), extra, set)
        results = run_chains(chains, work, at_once)
    return [*_rows(results, chosen, wanted), *table]


def _chains(
    data_set: DataSet, files: Files, columns: Sequence[str], seeds: Sequence[int], extra: Sequence[str], settings: Sequence[str]
) -> list[list[Cell]]:
    """The runs of a data set. Those of `torch` come after those of `ours`, whose number of steps they take."""
    recipe, follows = EXAMPLES / f"{data_set.recipe or data_set.name}.yaml", files.get("follows")
    ours = [f"data.{part}={path}" for part, path in files.items() if part != "follows"]
    of_test = None if follows is None else str(follows)
    chains = []
    for seed in seeds:
        named = (*ours, *extra, f"train.seed={seed}")
        plain = (*data_set.words, *named, *settings)
        chains.append([Cell(data_set, column, seed, plain, of_test) for column in ("ours", "torch") if column in columns])
        if "recipe" in columns and recipe.is_file():
            short = ("train.warmup=0",) if any(word.startswith("train.max_steps") for word in extra) else ()
            chains.append([Cell(data_set, "recipe", seed, (str(recipe), *named, *short), of_test)])
    if "simple" in columns:
        chains.append([Cell(data_set, "simple", 1, (*data_set.words, *ours, *extra), of_test)])
    return [chain for chain in chains if chain]


def run_chains(chains: Sequence[Sequence[Cell]], work: Path, at_once: int) -> list[Result]:
    """Run all cells, those of a chain one after another, so that plain PyTorch learns how many steps ours took."""
    threads = {} if at_once == 1 else {"OMP_NUM_THREADS": str(max(1, cores() // at_once))}

    def run_chain(chain: Sequence[Cell]) -> list[Result]:
        found: list[Result] = []
        for cell in chain:
            folder = work / f"{cell.data_set.name}-{cell.column}-{cell.seed}"
            folder.mkdir()
            try:
                steps = next((each.steps for each in found if each.steps is not None), None)
                found.append(_trained(cell, folder, threads) if cell.column in ("ours", "recipe") else _peer(cell, folder, threads, steps))
            except RunError as error:
                found.append(Result(cell, note=str(error)))
            told = f"{cell.data_set.metric} {found[-1].figure}, {found[-1].seconds:.1f} s; {found[-1].note}"
            print(f"{time.strftime('%H:%M:%S')} {cell.data_set.name} {cell.column} seed {cell.seed}: {told}", file=sys.stderr)
        return found

    with ThreadPoolExecutor(at_once) as pool:
        return [result for found in pool.map(run_chain, chains) for result in found]


def _call(folder: Path, threads: dict[str, str], *words: str) -> None:
    """Run a module; if it fails, its last line says why."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **threads}
    ended = subprocess.run([sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RunError(f"exit code {ended.returncode}: {(ended.stderr.strip() or 'no output').splitlines()[-1]}")


def _trained(cell: Cell, folder: Path, threads: dict[str, str]) -> Result:
    """Train by the command line. The figure is what the run says of the part that is scored."""
    _call(folder, threads, "carrywave", "train", *cell.words, "--run", "run")
    metrics, timing = (
        [json.loads(line) for line in (folder / "run" / f"{name}.jsonl").read_text().splitlines()] for name in ("metrics", "timing")
    )
    steps = max(row["step"] for row in metrics if row["split"] == "train")
    seconds = sum(row.get("seconds", 0.0) for row in timing if row["split"] == "train")
    if cell.follows is not None:
        told = ["--json", "scores.json", "-o", "forecasts.csv", "--svg", "forecasts.svg"]
        _call(folder, threads, "carrywave", "backtest", "run", "--data", cell.follows, "--origins", "1", *told)
        scored = json.loads((folder / "scores.json").read_text())[0]
    else:  # of test there is one row, of the weights that are best on valid
        scored = min((row for row in metrics if row["split"] == cell.data_set.part), key=lambda row: row["loss"])
    return Result(cell, scored[cell.data_set.metric], seconds, steps, f"{steps} steps")


def _peer(cell: Cell, folder: Path, threads: dict[str, str], steps: int | None) -> Result:
    job = {"name": cell.data_set.name, "column": cell.column, "words": cell.words, "steps": steps, "follows": cell.follows}
    (folder / "job.json").write_text(json.dumps(job))
    _call(folder, threads, __name__, "--peer", "job.json")
    return Result(cell, **json.loads((folder / "result.json").read_text()))


def peer(job: Row) -> Row:
    """In a process of its own: the figure of plain PyTorch or of the best simple baseline, its seconds and a note."""
    data_set = next(each for each in DATA_SETS if each.name == job["name"])
    task, parts = read(job["words"], job["follows"])
    begin = time.perf_counter()
    if job["column"] == "torch":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        reached = torch_defaults.train(task, parts, data_set.part, steps=job["steps"], device=device)
        return {"figure": reached.values[data_set.metric], "seconds": reached.seconds, "note": f"{reached.steps} steps"}
    found = simple_baselines.baselines(task, parts, data_set.part, data_set.metric, data_set.lags)
    name = (max if data_set.higher_is_better else min)(found, key=lambda each: found[each])
    note = "; ".join([name, *(f"{other} {figure:.4g}" for other, figure in found.items() if other != name)])
    return {"figure": found[name], "seconds": time.perf_counter() - begin, "note": note}


def read(words: Sequence[str], follows: str | None = None) -> tuple[Task, dict[str, Part]]:
    """The task and the parts of its data; `follows`: a file of train's series whose last horizon is the test."""
    spec = load(None, [*words, *PLAIN[load(None, words).task]])
    prepared = prepare(spec)
    spec = fitted(spec, prepared.facts)
    task = Task.of(spec, prepared.codec, prepared.facts, prepared.train)
    found = {"train": prepared.train, "valid": prepared.valid, "test": prepared.test}
    if follows is not None:
        whole = series.encoded(series_of(follows, prepared.codec, spec, labelled=True), prepared.codec, MemoryAppender)
        found["test"] = replace(whole, warm=whole.lengths - spec.data.horizon)
    return task, {name: task.part(name, data) for name, data in found.items() if data is not None}


def _rows(results: Sequence[Result], chosen: Sequence[DataSet], columns: Sequence[str]) -> list[Row]:
    """A row for each cell that has runs."""
    rows = []
    for data_set in chosen:
        for column in columns:
            own = [each for each in results if each.cell.data_set is data_set and each.cell.column == column]
            if own:
                failures = [f"seed {each.cell.seed} failed: {each.note}" for each in own if each.figure is None]
                rows.append(_row(data_set, column, own, failures[0] if failures else own[0].note))
    return rows


def _row(data_set: DataSet, column: str, results: Sequence[Result], note: str) -> Row:
    figures = [each.figure for each in results if each.figure is not None and not math.isnan(each.figure)]
    return {
        "data": data_set.name,
        "metric": f"{data_set.part} {data_set.metric}",
        "column": column,
        "median": round(statistics.median(figures), 4) if figures else None,
        "lowest": round(min(figures), 4) if figures else None,
        "highest": round(max(figures), 4) if figures else None,
        "seeds": len(figures),
        "seconds": round(statistics.median(each.seconds for each in results), 1) if figures else None,
        "note": note,
    }


def conclusions(rows: Sequence[Row]) -> list[str]:
    """A line for each cell in which ours is behind plain PyTorch or a simple baseline, or has no figure at all."""
    higher = {each.name: each.higher_is_better for each in DATA_SETS}
    ours = {row["data"]: row["median"] for row in rows if row["column"] == "ours"}
    lines = [f"{name}: ours has no figure" for name, figure in ours.items() if figure is None]
    for row in rows:
        own, theirs = ours.get(row["data"]), row["median"]
        if row["column"] not in ("torch", "simple") or own is None or theirs is None:
            continue
        if (own < theirs) if higher[row["data"]] else (own > theirs):
            lines.append(f"{row['data']}: ours {own:.4g} is behind {row['column']} {theirs:.4g}")
    return lines


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        Path("result.json").write_text(json.dumps(peer(json.loads(Path(sys.argv[2]).read_text()))))
    else:
        main("benchmarks.quality")
