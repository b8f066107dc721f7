"""Claim: with nothing but a task and its files, carrywave is ahead of what a user would pick instead.

Data sets × columns; a row of `--json` has one figure. Defaults are chosen by this table.

- `ours`: what a user gets from the task and the files, and where a data set has them, sizes and epochs (`peers/quality_data.py`): the mean
  over the seeds;
- `ensemble`: the average of what the runs of all seeds predict (labels, with `--seeds 2` and more);
- `linear`: the linear part of these runs alone; `naive`, `last`, `ridge`: the baselines that a run prints beside its forecasts;
- `recipe`: its recipe in examples/, where there is one, if `--columns recipe` asks for it;
- `svm`: texts: words and pairs of words, a linear support vector machine, where scikit-learn is installed;
- others: as published (`ucr/published.json`).

Below the table, for the sets of the UCR archive: mean, mean rank and wins of each column, the five sets that are farthest behind the best
column, and all that are more than 0.02 below their own linear part; for other sets, where ours is behind.

Figures are those of a run for test, or for valid where there is no test; of M4, those of a backtest from the last origin. `--data FOLDER`
has the files (docs/benchmarks.md lists them); a data set whose files are not there is skipped with a line. `--sets` picks by name or kind
(`ucr`, `texts`, `m4`, …), `--seeds N` says how often (1), `--at-once N` how many runs side by side (1), each process on one core.
After `--minutes N` no run is begun: all sets are run with the first seed before any is with the second, so that what is told is told of
all. `--set KEY=VALUE` changes the spec of `ours`, to compare defaults.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.harness.command import main
from benchmarks.peers import ngram_svm
from benchmarks.peers.quality_data import DataSet, Files, data_sets, published
from carrywave.errors import RunError, UserError
from carrywave.prediction.evaluate import evaluate_run
from carrywave.spec.load import load
from carrywave.tasks.baselines import BASELINES
from carrywave.train.backtest import Rolling, backtest_run
from carrywave.train.fit import train

COLUMNS = ("ours", "recipe", "ensemble", "svm")
BEHIND = 0.02  # accuracy by which a set may be below its own linear part
QUICK = ("model.hidden=16", "model.layers=1", "train.epochs=1", "train.max_steps=3")

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What one process does at a time: train and score one run, score several as one, or fit a peer."""

    data_set: DataSet
    column: str
    seed: int
    folder: Path  # of the runs of this data set
    files: Files
    words: tuple[str, ...] = ()  # of the spec


def run(
    *,
    quick: bool = False,
    sets: Sequence[str] = (),
    columns: Sequence[str] = (),
    data: Path = Path("data"),
    seeds: int = 1,
    at_once: int = 1,
    minutes: int = 600,
    set: Sequence[str] = (),
) -> list[Row]:
    """A row for each data set and column, and one for each data set that is skipped."""
    known = data_sets(data)
    chosen = [each for each in known if not sets or any(word in (each.kind, each.name) for word in sets)]
    wanted = columns or [name for name in COLUMNS if name != "recipe"]
    if not chosen or not {*wanted} <= {*COLUMNS}:
        raise UserError(f"nothing is picked; use {', '.join(dict.fromkeys(each.kind for each in known))}, and {', '.join(COLUMNS)}")
    with tempfile.TemporaryDirectory(prefix="carrywave-quality-") as name:
        work = Path(name)
        ready = {each: each.ready(data, work) for each in chosen if not each.missing(data)}
        own = (*(QUICK if quick else ()), f"data.cache={work / 'cache'}", *set)
        begun = [job for seed in range(1, 1 + seeds) for each in ready for job in _jobs(each, seed, ready[each], work, wanted, own)]
        until = time.monotonic() + 60 * minutes
        workers, theirs = Workers(at_once), published(data)
        rows = workers.rows(begun, until)
        if "ensemble" in wanted and seeds > 1:
            whole = [Job(each, "ensemble", 0, work / each.name, files) for each, files in ready.items() if "test" in files and each.labels]
            rows += workers.rows(whole, until + 60)
    skipped = [
        _row(each, "", [], f"skipped: {data / each.missing(data)[0]} is not there; --data FOLDER says where files are")
        for each in chosen
        if each not in ready
    ]
    return [*(row for each in ready for row in _rows(each, rows, theirs.get(each.name, {}))), *skipped]


def _jobs(each: DataSet, seed: int, files: Files, work: Path, wanted: Sequence[str], own: Sequence[str]) -> Iterator[Job]:
    folder = work / each.name
    named = [f"data.{part}={path}" for part, path in files.items() if part != "follows"]
    if "ours" in wanted:
        yield Job(each, "ours", seed, folder, files, (*each.words, *named, *own, f"train.seed={seed}"))
    if "recipe" in wanted and each.example.is_file():
        short = ("train.warmup=0",) if any(word.startswith("train.max_steps") for word in own) else ()
        yield Job(each, "recipe", seed, folder, files, (*named, *own, *short, f"train.seed={seed}"))
    if "svm" in wanted and each.kind == "texts" and seed == 1 and ngram_svm.there():
        yield Job(each, "svm", seed, folder, files)


class Workers:
    """Processes that carry out jobs, each one at a time; one that dies is replaced, so that nothing ends but its job."""

    def __init__(self, at_once: int) -> None:
        if at_once > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that are started
        self.idle: SimpleQueue[ProcessPoolExecutor] = SimpleQueue()
        self.threads = ThreadPoolExecutor(at_once)
        for _ in range(at_once):
            self._add()

    def _add(self) -> None:
        self.idle.put(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))

    def rows(self, jobs: Sequence[Job], until: float) -> list[Row]:
        """A row for each job: its data set, column and seed, and what came of it. None is begun after this time on the monotonic clock."""
        return list(self.threads.map(lambda job: self._row(job, until), jobs))

    def _row(self, job: Job, until: float) -> Row:
        begin = time.monotonic()
        found: Row = {"note": "not begun: the time was over"}
        if begin < until:
            process = self.idle.get()
            try:
                found = process.submit(do, job).result()
                self.idle.put(process)
            except BrokenProcessPool:
                found = {"note": f"its process died ({job.folder})"}
                self._add()
        seconds = time.monotonic() - begin
        print(f"{time.strftime('%H:%M:%S')} {job.data_set.name} {job.column} {job.seed}: {found} {seconds:.1f} s", file=sys.stderr)
        return {"data": job.data_set.name, "column": job.column, "seconds": seconds, **found}


def do(job: Job) -> Row:
    """In a process of its own: what comes of a job. What it prints is in a file; an error is a note."""
    job.folder.mkdir(exist_ok=True)
    with (job.folder / "log").open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            return {"ensemble": _together, "svm": _svm}.get(job.column, _trained)(job)
        except Exception as error:  # of one run among many
            return {"note": f"{type(error).__name__}: {error}"}


def _trained(job: Job) -> Row:
    """Train as the command does. The figure is what the run says of the part that is scored, beside those of its baselines."""
    folder, metric = job.folder / f"{job.column}-{job.seed}", job.data_set.metric
    recipe = job.data_set.example if job.column == "recipe" else None
    train(load(recipe, job.words), run=folder)
    if (follows := job.files.get("follows")) is not None:
        scored: Mapping[str, Any] = backtest_run(folder, str(follows), Rolling(origins=1), "auto", lambda _: None).scores[0]
    else:  # of test there is one row, of the weights that are best on valid
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        scored = min((row for row in rows if row["split"] == job.data_set.part), key=lambda row: row["loss"])
    beside = {name: scored[f"{name}_{metric}"] for name in BASELINES if f"{name}_{metric}" in scored}
    return {"figure": scored[metric], "beside": beside if job.column == "ours" else {}}


def _together(job: Job) -> Row:
    """Score the runs of all seeds as one."""
    runs = sorted(each.parent for each in job.folder.glob("ours-*/weights.safetensors"))
    if len(runs) < 2:
        raise RunError("fewer than two runs")
    found = evaluate_run(runs, str(job.files["test"]), note=lambda _: None)
    return {"figure": found[job.data_set.metric], "note": f"{len(runs)} runs"}


def _svm(job: Job) -> Row:
    return {"figure": ngram_svm.accuracy(job.files["train"], job.files["test"])}


def _rows(each: DataSet, found: Sequence[Row], theirs: Mapping[str, float]) -> Iterator[Row]:
    """The rows of a data set."""
    own = [row for row in found if row["data"] == each.name]
    for column in COLUMNS:
        if some := [row for row in own if row["column"] == column]:
            yield _row(
                each, column, [row["figure"] for row in some if "figure" in row], some[0].get("note", ""), [row["seconds"] for row in some]
            )
        for name in BASELINES if column == "ours" else ():
            if figures := [row["beside"][name] for row in some if name in row.get("beside", ())]:
                yield _row(each, name, figures, "")
    for column, figure in theirs.items():
        yield _row(each, column, [figure], "published")


def _row(each: DataSet, column: str, figures: Sequence[float], note: str, seconds: Sequence[float] = ()) -> Row:
    return {
        **{"data": each.name, "kind": each.kind, "metric": f"{each.part} {each.metric}", "column": column},
        **{"figure": statistics.mean(figures) if figures else None, "figures": list(figures), "note": note},
        "seconds": round(statistics.median(seconds), 1) if seconds else None,
    }


def shown(rows: Sequence[Row]) -> list[Row]:
    """A line for each data set."""
    lines: dict[str, Row] = {}
    names = dict.fromkeys(row["column"] for row in rows if row["column"])
    for row in rows:
        line = lines.setdefault(row["data"], {"data": row["data"], "metric": row["metric"], **dict.fromkeys(names)})
        line |= {row["column"]: row["figure"]} if row["column"] else {}
        if row["column"] in ("ours", ""):
            figures = row["figures"]
            line |= {
                "range": f"{min(figures):.4g}-{max(figures):.4g}" if len(figures) > 1 else "",
                "seconds": row["seconds"],
                "note": row["note"],
            }
    return list(lines.values())


def conclusions(rows: Sequence[Row]) -> list[str]:
    """What follows for the sets of the UCR archive as a whole, and where ours is behind."""
    table: dict[str, dict[str, float]] = {}
    lines = [f"{row['data']}: {row['column']} has no figure: {row['note']}" for row in rows if row["figure"] is None]
    for row in rows:
        if row["figure"] is not None:
            table.setdefault(row["data"], {})[row["column"]] = row["figure"]
    kinds, lower = {row["data"]: row["kind"] for row in rows}, {row["data"] for row in rows if not row["metric"].endswith("accuracy")}
    archive = {name: found for name, found in table.items() if kinds[name] == "ucr" and "ours" in found}
    common = [name for name in dict.fromkeys(row["column"] for row in rows) if archive and all(name in found for found in archive.values())]
    for column in common:
        places = [_place(found, column, common) for found in archive.values()]
        mean = statistics.mean(found[column] for found in archive.values())
        wins = sum(found[column] == max(found[each] for each in common) for found in archive.values())
        lines.append(
            f"{len(archive)} UCR sets, {column}: mean {mean:.4f}, mean rank {statistics.mean(places):.2f}, best or level on {wins}"
        )
    worst = sorted(archive, key=lambda name: archive[name]["ours"] - max(archive[name][each] for each in common))[:5]
    lines += [f"worst: {name} {', '.join(f'{each} {archive[name][each]:.3f}' for each in common)}" for name in worst]
    below = {name: found for name, found in archive.items() if found["ours"] < found.get("linear", 0.0) - BEHIND}
    lines += [f"below its linear part: {name} {found['ours']:.3f} against {found['linear']:.3f}" for name, found in below.items()]
    for name, found in table.items():
        for column, figure in found.items() if name not in archive and "ours" in found else ():
            if (found["ours"] > figure) if name in lower else (found["ours"] < figure):
                lines.append(f"{name}: ours {found['ours']:.4g} is behind {column} {figure:.4g}")
    return lines


def _place(found: Mapping[str, float], column: str, columns: Sequence[str]) -> float:
    """The rank of a column, from 1; those that are level share theirs."""
    level = sum(found[each] == found[column] for each in columns)
    return 1 + sum(found[each] > found[column] for each in columns) + (level - 1) / 2


if __name__ == "__main__":
    main("benchmarks.quality")
