"""Claim: with nothing but a task and its files, carrywave learns at least as much as plain PyTorch with its defaults, or a simple baseline.

Data sets × columns: in each cell the median of the metric over the seeds, the lowest and the highest, and the median of the seconds of
training, without evaluations; `--json` has a row for each cell. Defaults are chosen by this table.

- `ours`: what a user gets from the task and the files, and where the row's name has them, sizes and epochs (`quality_runs/data_sets.py`);
- `recipe`: its recipe in examples/, where there is one;
- `torch`: `nn.Embedding`, `nn.LSTM`, `nn.Linear` and Adam as they are, with the sizes, batches and number of steps of `ours`
  (`peers/torch_defaults.py`). If `ours` is not among the columns, with the epochs of its spec;
- `simple`: the best of what takes no network (`peers/simple_baselines.py`); one run, since it draws nothing.

Every run is a process of its own, `carrywave train` for the first two columns. Figures of ours are those of the run, for the weights that
are best on valid: its row for test, or for valid where there is no test; of M4, those of `carrywave backtest` from the last origin. MASE is
relative to the seasonal change within the rows that are trained on.

`--data FOLDER` has the files (docs/benchmarks.md lists them; by default data); a data set whose files are not there is skipped with a line.
`--rows` and `--columns` pick, `--seeds N` says how often (3), `--at-once N` how many runs side by side (1): small networks leave a GPU
idle. `--set KEY=VALUE` changes the spec of `ours`, and sizes and batches of `torch` with it, to compare defaults.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import typer

from carrywave.benchmarks.quality_runs.data_sets import DATA_SETS, DataSet, Files, data_words, examples_folder, picked
from carrywave.benchmarks.quality_runs.side_by_side import Cell, Result, run_chains
from carrywave.errors import RunError, UserError

COLUMNS = ("ours", "recipe", "torch", "simple")
SEEDS = 3
QUICK = ("model.hidden=16", "model.layers=1", "train.epochs=1", "train.max_steps=3")
QUICK_ROWS = 2

Row = dict[str, object]


def run(
    *,
    quick: bool = False,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    data: Path = Path("data"),
    seeds: int | None = None,
    at_once: int = 1,
    settings: Sequence[str] | None = None,
) -> list[Row]:
    """A row for each data set and column, and one for each data set that is skipped."""
    wanted = _columns(columns)
    chosen = picked(rows)
    if not chosen:
        raise UserError(f"--rows {', '.join(rows or [])} picks no data set; use {', '.join(each.name for each in DATA_SETS)}")
    if wrong := [word for word in settings or () if "=" not in word]:
        raise UserError(f"--set {wrong[0]} is not a setting; write it as in train.lr=5e-3")
    chosen = chosen[:QUICK_ROWS] if quick and not rows else chosen
    numbers = range(1, 1 + (seeds or (1 if quick else SEEDS)))
    examples = examples_folder()
    with tempfile.TemporaryDirectory(prefix="carrywave-quality-") as name:
        work = Path(name)
        chains: list[list[Cell]] = []
        skipped: list[Row] = []
        for data_set in chosen:
            if missing := data_set.missing(data):
                skipped.append(_skipped(data_set, f"skipped: {data / missing[0]} is not there; --data FOLDER says where files are"))
                continue
            try:
                files = data_set.ready(data, work, examples)
            except RunError as error:
                skipped.append(_skipped(data_set, f"skipped: {error}"))
                continue
            extra = [*(QUICK if quick else ()), f"data.cache={work / 'cache'}"]
            chains += _chains(data_set, files, wanted, numbers, extra, settings or (), examples)
        results = run_chains(chains, work, at_once)
    return [*_rows(results, chosen, wanted), *skipped]


def _columns(asked: Sequence[str] | None) -> list[str]:
    unknown = [name for name in asked or () if name not in COLUMNS]
    if unknown:
        raise UserError(f"--columns has no {unknown[0]!r}; use some of {','.join(COLUMNS)}")
    return [name for name in COLUMNS if not asked or name in asked]


def _skipped(data_set: DataSet, note: str) -> Row:
    typer.echo(f"{data_set.name}: {note}", err=True)
    return _row(data_set, "all", [], note)


def _chains(
    data_set: DataSet,
    files: Files,
    columns: Sequence[str],
    seeds: Sequence[int],
    extra: Sequence[str],
    settings: Sequence[str],
    examples: Path | None,
) -> list[list[Cell]]:
    """The runs of a data set. Those of `torch` come after those of `ours`, whose number of steps they take."""
    recipe = None if examples is None else examples / f"{data_set.recipe or data_set.name}.yaml"
    follows = files.get("follows")
    chains = []
    for seed in seeds:
        named = (*data_words(files), *extra, f"train.seed={seed}")
        plain = (*data_set.words, *named, *settings)
        chains.append([Cell(data_set, column, seed, plain, follows=follows) for column in ("ours", "torch") if column in columns])
        if "recipe" in columns and recipe is not None and recipe.is_file():
            slow = ("train.warmup=0",) if any(word.startswith("train.max_steps") for word in extra) else ()
            chains.append([Cell(data_set, "recipe", seed, (*named, *slow), recipe, follows)])
    if "simple" in columns:
        chains.append([Cell(data_set, "simple", 1, (*data_set.words, *data_words(files), *extra), follows=follows)])
    return [chain for chain in chains if chain]


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


def shown(rows: Sequence[Row]) -> list[Row]:
    """The rows as a table of data sets × columns."""
    found: dict[str, Row] = {}
    for row in rows:
        empty = {"data": row["data"], "metric": row["metric"], **dict.fromkeys(COLUMNS, ""), "note": ""}
        line = found.setdefault(str(row["data"]), empty)
        name = str(row["column"])
        if name in COLUMNS:
            line[name] = _cell(row)
        if name not in COLUMNS or row["median"] is None:
            line["note"] = row["note"]
    return list(found.values())


def _cell(row: Row) -> str:
    """As in 0.366 (0.365–0.370), 12 s; of the simple baselines, as in 0.350, ridge."""
    median, lowest, highest = (row[name] for name in ("median", "lowest", "highest"))
    if median is None:
        return "failed"
    if row["column"] == "simple":
        return f"{median:.4g}, {str(row['note']).partition(';')[0]}"
    spread = "" if lowest == highest else f" ({lowest:.4g}–{highest:.4g})"
    return f"{median:.4g}{spread}, {row['seconds']:.0f} s"


def conclusions(rows: Sequence[Row]) -> list[str]:
    """A line for each cell in which ours is behind plain PyTorch or a simple baseline, or has no figure at all."""
    higher = {each.name: each.higher_is_better for each in DATA_SETS}
    ours = {str(row["data"]): row["median"] for row in rows if row["column"] == "ours"}
    lines = [f"{name}: ours has no figure" for name, figure in ours.items() if figure is None]
    for row in rows:
        name, theirs = str(row["data"]), row["median"]
        own = ours.get(name)
        if row["column"] not in ("torch", "simple") or not isinstance(own, float) or not isinstance(theirs, float):
            continue
        if (own < theirs) if higher[name] else (own > theirs):
            lines.append(f"{name}: ours {own:.4g} is behind {row['column']} {theirs:.4g}")
    return lines
