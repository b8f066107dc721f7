"""Child processes of `bench quality`: `carrywave train` and its evaluation, or a peer; chains of them side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from carrywave.benchmarks.quality_runs import peer_worker
from carrywave.benchmarks.quality_runs.data_sets import DataSet
from carrywave.errors import RunError
from carrywave.launch.hardware import cores as cores_here


@dataclass(frozen=True)
class Cell:
    """One run for one cell of the table."""

    data_set: DataSet
    column: str
    seed: int
    words: tuple[str, ...]  # of the spec, after the recipe if there is one
    recipe: Path | None = None
    follows: Path | None = None  # the file of train's series whose last horizon is the test, if that is how it is scored


@dataclass
class Result:
    """What came of it: a figure, or why there is none."""

    cell: Cell
    figure: float | None = None
    seconds: float = 0.0  # of training, without evaluations
    steps: int | None = None
    note: str = ""


def run_chains(chains: Sequence[Sequence[Cell]], work: Path, at_once: int) -> list[Result]:
    """Run all cells, those of a chain one after another, so that plain PyTorch learns how many steps ours took."""
    threads = {} if at_once == 1 else {"OMP_NUM_THREADS": str(max(1, cores_here() // at_once))}

    def run_chain(chain: Sequence[Cell]) -> list[Result]:
        found: list[Result] = []
        for cell in chain:
            found.append(_run(cell, work, threads, next((each.steps for each in found if each.steps is not None), None)))
            _say(found[-1])
        return found

    pool = ThreadPoolExecutor(at_once)
    try:
        return [result for found in pool.map(run_chain, chains) for result in found]
    finally:
        pool.shutdown(cancel_futures=True)


def _run(cell: Cell, work: Path, environment: dict[str, str], steps: int | None) -> Result:
    folder = work / f"{cell.data_set.name}-{cell.column}-{cell.seed}"
    folder.mkdir()
    call = _Calls(folder, environment)
    try:
        return _trained(cell, call) if cell.column in ("ours", "recipe") else _peer(cell, call, steps)
    except RunError as error:
        return Result(cell, note=str(error))


@dataclass(frozen=True)
class _Calls:
    """Runs commands in a folder."""

    folder: Path
    environment: dict[str, str]

    def __call__(self, *words: str) -> None:
        """Run a module of this carrywave; if it fails, its last line says why."""
        path = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": path, **self.environment}
        command = [sys.executable, "-m", *words]
        ended = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, errors="replace", check=False)
        if ended.returncode != 0:
            lines = (ended.stderr.strip() or ended.stdout.strip()).splitlines()
            raise RunError(f"exit code {ended.returncode}: {lines[-1].removeprefix('carrywave: ') if lines else 'no output'}")


def _trained(cell: Cell, call: _Calls) -> Result:
    """Train by the command line. The figure is what the run says of the part that is scored."""
    recipe = [] if cell.recipe is None else [str(cell.recipe)]
    call("carrywave", "train", *recipe, *cell.words, "--run", "run")
    metrics, timing = (_lines(call.folder / "run" / name) for name in ("metrics.jsonl", "timing.jsonl"))
    steps = max(row["step"] for row in metrics if row["split"] == "train")
    seconds = sum(row.get("seconds", 0.0) for row in timing if row["split"] == "train")
    if cell.follows is not None:
        told = ["--json", "scores.json", "-o", "forecasts.csv", "--svg", "forecasts.svg"]
        call("carrywave", "backtest", "run", "--data", str(cell.follows), "--origins", "1", *told)
        scored = json.loads((call.folder / "scores.json").read_text())[0]
    else:
        rows = [row for row in metrics if row["split"] == cell.data_set.part]
        scored = min(rows, key=lambda row: row["loss"])  # of test there is one row, of the weights that are best on valid
    if cell.data_set.metric not in scored:
        raise RunError(f"the run has no {cell.data_set.metric}")
    return Result(cell, scored[cell.data_set.metric], seconds, steps, f"{steps} steps")


def _peer(cell: Cell, call: _Calls, steps: int | None) -> Result:
    folder, data_set = call.folder, cell.data_set
    follows = None if cell.follows is None else str(cell.follows)
    job: dict[str, Any] = {"column": cell.column, "words": cell.words, "steps": steps, "follows": follows}
    job |= {"metric": data_set.metric, "part": data_set.part, "lags": data_set.lags}
    (folder / "job.json").write_text(json.dumps(job))
    call(peer_worker.__name__, "job.json", "result.json")
    found = json.loads((folder / "result.json").read_text())
    return Result(cell, found["figure"], found["seconds"], note=found["note"])


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _say(result: Result) -> None:
    """A line on stderr for each run: all of them take long."""
    cell = result.cell
    told = "failed" if result.figure is None else f"{cell.data_set.metric} {result.figure:.4g}, {result.seconds:.1f} s"
    where = f"{time.strftime('%H:%M:%S')} {cell.data_set.name} {cell.column} seed {cell.seed}"
    typer.echo(f"{where}: {told}{f'; {result.note}' if result.note else ''}", err=True)
