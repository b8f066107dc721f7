"""The table of what is learned: all columns are scored on the same targets, and where ours is behind it says so."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from carrywave.benchmarks import quality
from carrywave.benchmarks.peers import simple_baselines, torch_defaults
from carrywave.benchmarks.quality_runs import data_sets, peer_worker, side_by_side
from carrywave.benchmarks.quality_runs.data_sets import DATA_SETS, DataSet
from carrywave.benchmarks.quality_runs.side_by_side import Cell, Result
from carrywave.cli.main import app
from carrywave.errors import RunError, UserError
from carrywave.spec.load import load

CPU = torch.device("cpu")
SMALL = ("model.hidden=8", "model.layers=1", "train.epochs=1", "train.max_steps=2", "train.precision=fp32")
BY_NAME = {each.name: each for each in DATA_SETS}


def call(*words: str) -> None:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wide_file(folder: Path) -> list[str]:
    """A table of two seasonal columns, and the words for it."""
    draw, hours = np.random.default_rng(1), np.arange(600)
    values = [np.sin(hours * 2 * math.pi / 12 + phase) + 0.002 * hours + draw.normal(0, 0.2, 600) for phase in (0, 1)]
    path = folder / "wide.csv"
    path.write_text("a,b\n" + "\n".join(f"{a:.5f},{b:.5f}" for a, b in zip(*values, strict=True)) + "\n")
    keys = ["task=forecasting", f"data.train={path}", "data.split=[400,100,100]", "data.horizon=6", "data.season=12"]
    return [*keys, f"data.cache={folder / 'cache'}"]


def long_files(folder: Path) -> dict[str, Path]:
    """Three series of different lengths, compressed, and what follows each, as in M4."""
    draw = np.random.default_rng(2)
    parts: dict[str, list[str]] = {"train": ["unique_id,ds,y"], "test": ["unique_id,ds,y"]}
    for name, length in (("H1", 150), ("H2", 170), ("H3", 200)):
        values = 10 + np.sin(np.arange(length + 6) * 2 * math.pi / 12) + draw.normal(0, 0.3, length + 6)
        for place, value in enumerate(values):
            parts["train" if place < length else "test"].append(f"{name},{place + 1},{value:.4f}")
    for part, lines in parts.items():
        with gzip.open(folder / f"{part}.csv.gz", "wt") as out:
            out.write("\n".join(lines) + "\n")
    return {part: folder / f"{part}.csv.gz" for part in parts}


def test_every_row_is_a_spec(tmp_path: Path) -> None:
    for data_set in DATA_SETS:
        files = data_set.files or {"train": tmp_path / "train.jsonl"}
        words = [] if data_set.name == "readme" else [f"data.{part}={place}" for part, place in files.items()]
        spec = load(None, [*data_set.words, *words])
        assert spec.task == data_set.words[0].removeprefix("task=")


@pytest.mark.slow
def test_the_naive_forecast_of_the_bench_is_that_of_the_run(tmp_path: Path) -> None:
    words = wide_file(tmp_path)
    call("train", *words, *SMALL, "--run", str(tmp_path / "run"), "--device", "cpu")
    [row] = [row for row in rows_of(tmp_path / "run" / "metrics.jsonl") if row["split"] == "test"]
    task, parts = peer_worker.read(words)
    found = simple_baselines.baselines(task, parts, "test", "mae", lags=24)
    # Both add up float32 values in float64, in another order.
    assert found["seasonal naive"] == pytest.approx(row["naive_mae"], rel=1e-6)
    assert found["ridge"] < found["seasonal naive"] < found["last value"]


@pytest.mark.slow
def test_a_forecast_from_the_end_of_train_is_scored_as_backtest_scores_it(tmp_path: Path) -> None:
    files = data_sets._joined(long_files(tmp_path), tmp_path, None)
    words = ["task=forecasting", f"data.train={files['train']}", "data.horizon=6", "data.season=12", f"data.cache={tmp_path / 'cache'}"]
    run = str(tmp_path / "run")
    call("train", *words, *SMALL, "--run", run, "--device", "cpu")
    call("backtest", run, "--data", str(files["follows"]), "--origins", "1", "--json", str(tmp_path / "scores.json"), "--device", "cpu")
    scores = json.loads((tmp_path / "scores.json").read_text())[0]
    task, parts = peer_worker.read(words, str(files["follows"]))
    assert scores["forecasts"] == len(parts["test"].data) == 3
    found = simple_baselines.baselines(task, parts, "test", "mase", lags=24)
    assert found["seasonal naive"] == pytest.approx(scores["naive_mase"], rel=1e-5)  # values went through float32 on one side only
    assert parts["test"].baseline["naive_mase"] == pytest.approx(scores["naive_mase"], rel=1e-5)


def test_plain_pytorch_is_scored_on_every_origin_of_test(tmp_path: Path) -> None:
    task, parts = peer_worker.read(wide_file(tmp_path))
    network = torch_defaults.PlainNetwork(task)
    nn.init.zeros_(network.linear.weight)
    nn.init.zeros_(network.linear.bias)
    found = torch_defaults.evaluate(network, task, parts["test"], CPU)
    values = parts["test"].data.inputs[500:600]
    ahead = np.stack([values[origin : origin + 6] for origin in range(95)])  # the first origin is the last row of valid
    assert found["mae"] == pytest.approx(np.abs(ahead).mean(), rel=1e-6)
    assert found["loss"] == pytest.approx((ahead**2).mean(), rel=1e-5)


def test_ridge_finds_a_line_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "sine.csv"
    path.write_text("y\n" + "\n".join(f"{math.sin(step / 5):.6f}" for step in range(600)) + "\n")
    words = ["task=forecasting", f"data.train={path}", "data.split=[400,100,100]", "data.horizon=6", f"data.cache={tmp_path / 'cache'}"]
    task, parts = peer_worker.read(words)
    found = simple_baselines.baselines(task, parts, "test", "mae", lags=24)
    assert found["ridge"] < 0.05 * found["last value"]  # the rest is what the diagonal costs among few rows


def test_what_follows_what() -> None:
    """A text in which each letter determines the next has next to nothing left to learn from bigrams, and one bit alone."""
    tokens = np.tile([0, 1], 500)
    data = data_sets_of(tokens)
    found = simple_baselines._ngrams(data, data, 2)
    assert found["unigrams"] == pytest.approx(math.log(2), rel=1e-3)
    assert found["bigrams"] < 0.01
    assert math.isfinite(simple_baselines._ngrams(data_sets_of(tokens), data_sets_of(np.array([0, 2, 2, 1])), 3)["bigrams"])


def data_sets_of(tokens: np.ndarray[Any, Any]) -> Any:
    from carrywave.data.sequences import Sequences

    return Sequences(tokens, np.array([0]), np.array([len(tokens)]))


def sequences_file(path: Path, count: int, *, text: bool = False, tagged: bool = False) -> Path:
    """Labelled sequences of different lengths, of numbers or of tokens, whose label is easy to see."""
    draw = np.random.default_rng(count)
    lines = []
    for number in range(count):
        label, length = number % 2, int(draw.integers(4, 9))
        tokens = [f"{'ab'[label]}{value}" for value in draw.integers(3, size=length)]
        row: dict[str, Any] = {"tokens": tokens} if text else {"steps": (draw.normal(0, 0.1, (length, 2)) + label).tolist()}
        row |= {"labels": [token[0] for token in tokens]} if tagged else {"label": f"class {label}"}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numbers", "text", "tags"])
def test_the_peers_learn_what_is_easy(tmp_path: Path, kind: str) -> None:
    how = {"text": kind != "numbers", "tagged": kind == "tags"}
    files = {part: sequences_file(tmp_path / f"{part}.jsonl", count, **how) for part, count in (("train", 60), ("test", 20))}
    task = "tagging" if kind == "tags" else "classification"
    words = [f"task={task}", *data_sets.data_words(files), "model.hidden=16", "model.layers=1", f"data.cache={tmp_path / 'cache'}"]
    job: dict[str, Any] = {"words": words, "metric": "accuracy", "part": "test", "lags": 0, "steps": 120, "follows": None}
    learned = peer_worker.done({**job, "column": "torch"})
    assert learned["note"] == "120 steps"
    assert learned["figure"] > 0.9
    simple = peer_worker.done({**job, "column": "simple"})
    assert simple["figure"] > 0.9
    assert "majority 0.5" in simple["note"] or kind == "tags"


@pytest.mark.slow
def test_plain_pytorch_reads_text_as_a_run_does(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("abcdefgh" * 400)
    words = ["task=language", f"data.train={tmp_path / 'train.txt'}", "batch.lanes=4", "batch.steps=20", "model.hidden=16"]
    job = {"column": "torch", "words": [*words, f"data.cache={tmp_path / 'cache'}"], "metric": "bits", "part": "valid", "lags": 0}
    assert peer_worker.done({**job, "steps": 300, "follows": None})["figure"] < 1.0  # of three bits


def test_without_a_number_of_steps_the_peer_trains_for_the_epochs_of_the_spec(tmp_path: Path) -> None:
    task, parts = peer_worker.read([*wide_file(tmp_path), "batch.lanes=2", "batch.steps=50", "train.epochs=3", "model.hidden=4"])
    reached = torch_defaults.train(task, parts, "test", steps=None, device=CPU)
    assert reached.steps == 3 * 4  # two lanes of 197 steps


def test_waves_are_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = (data_sets._waves({}, tmp_path / name, None) for name in ("a", "b"))
    assert first["test"].read_bytes() == second["test"].read_bytes()
    assert len(rows_of(first["train"])) == 600


def test_files_that_are_not_there_are_skipped_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [row] = quality.run(rows=["acsf1"], data=tmp_path)
    told = f"skipped: {tmp_path / 'ucr/acsf1.train.jsonl.gz'} is not there; --data FOLDER says where files are"
    assert (row["data"], row["column"], row["median"], row["note"]) == ("acsf1", "all", None, told)
    assert capsys.readouterr().err == f"acsf1: {told}\n"
    assert quality.conclusions([row]) == []


def test_wrong_choices_are_refused() -> None:
    with pytest.raises(UserError, match=r"--columns has no 'keras'; use some of ours,recipe,torch,simple"):
        quality.run(columns=["ours", "keras"])
    with pytest.raises(UserError, match=r"--rows mnist picks no data set; use readme, small-text"):
        quality.run(rows=["mnist"])
    with pytest.raises(UserError, match=r"--set lr is not a setting; write it as in train\.lr=5e-3"):
        quality.run(settings=["lr"])


def result(name: str, column: str, seed: int, figure: float | None, note: str = "") -> Result:
    return Result(Cell(BY_NAME[name], column, seed, ()), figure, seconds=float(seed), note=note)


def test_a_cell_is_median_and_spread_and_where_ours_is_behind_is_said() -> None:
    results = [result("acsf1", "ours", seed, figure) for seed, figure in enumerate((0.12, 0.1, 0.11), start=1)]
    results += [result("acsf1", "torch", 1, 0.19), result("acsf1", "simple", 1, 0.1), result("acsf1", "recipe", 1, 0.9)]
    results += [result("waves", "ours", 1, 0.2), result("waves", "torch", 1, 0.3), result("waves", "simple", 1, 0.1, "mean")]
    results += [result("readme", "ours", 1, None, "exit code 2: no")]
    rows = quality._rows(results, [BY_NAME[name] for name in ("readme", "acsf1", "waves")], quality.COLUMNS)
    assert [(row["data"], row["column"]) for row in rows][:3] == [("readme", "ours"), ("acsf1", "ours"), ("acsf1", "recipe")]
    expected = {"metric": "test accuracy", "median": 0.11, "lowest": 0.1, "highest": 0.12, "seeds": 3, "seconds": 2.0}
    assert expected.items() <= rows[1].items()
    assert rows[0]["note"] == "seed 1 failed: exit code 2: no"
    assert quality.shown(rows)[0] | {"note": ""} == dict.fromkeys(("recipe", "torch", "simple", "note"), "") | {
        "data": "readme",
        "metric": "valid bits",
        "ours": "failed",
    }
    cells = {"ours": "0.11 (0.1–0.12), 2 s", "recipe": "0.9, 1 s", "torch": "0.19, 1 s"}
    assert cells.items() <= quality.shown(rows)[1].items()
    assert quality.shown(rows)[2]["simple"] == "0.1, mean"
    assert quality.conclusions(rows) == [
        "readme: ours has no figure",
        "acsf1: ours 0.11 is behind torch 0.19",
        "waves: ours 0.2 is behind simple 0.1",
    ]


def test_what_is_asked_of_each_column(tmp_path: Path) -> None:
    (tmp_path / "acsf1.yaml").write_text("task: classification\n")
    files = {"train": Path("/train"), "test": Path("/test")}
    extra = ["data.cache=/cache"]
    chains = quality._chains(BY_NAME["acsf1"], files, quality.COLUMNS, (1, 2), extra, ["train.lr=1e-3"], tmp_path)
    assert [[cell.column for cell in chain] for chain in chains] == [
        ["ours", "torch"],
        ["recipe"],
        ["ours", "torch"],
        ["recipe"],
        ["simple"],
    ]
    named = ("data.train=/train", "data.test=/test", "data.cache=/cache")
    assert chains[2][0].words == ("task=classification", *named, "train.seed=2", "train.lr=1e-3")
    assert (chains[1][0].words, chains[1][0].recipe) == ((*named, "train.seed=1"), tmp_path / "acsf1.yaml")
    assert quality._chains(BY_NAME["osuleaf"], files, ["recipe"], (1,), extra, [], tmp_path) == []


def test_a_run_that_fails_is_a_note_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object, *words: str) -> None:
        raise RunError(f"exit code 2: {words[-1]}")

    monkeypatch.setattr(side_by_side._Calls, "__call__", fail)
    chain = [Cell(BY_NAME["waves"], column, 1, ("task=regression",)) for column in ("ours", "torch")]
    found = side_by_side.run_chains([chain], tmp_path, 2)
    assert [(each.cell.column, each.figure, each.note) for each in found] == [
        ("ours", None, "exit code 2: run"),
        ("torch", None, "exit code 2: result.json"),
    ]


def test_plain_pytorch_takes_as_many_steps_as_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def peer(cell: Cell, _: object, steps: int | None) -> Result:
        asked.append(steps)
        return Result(cell, 1.0)

    monkeypatch.setattr(side_by_side, "_trained", lambda cell, _: Result(cell, 1.0, steps=77))
    monkeypatch.setattr(side_by_side, "_peer", peer)
    chains = [
        [Cell(BY_NAME["waves"], column, seed, ()) for column in columns] for seed, columns in ((1, ("ours", "torch")), (2, ("torch",)))
    ]
    side_by_side.run_chains(chains, tmp_path, 1)
    assert asked == [77, None]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_rows_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "japanese-vowels").mkdir()
    for part, count in (("train", 40), ("test", 10)):
        sequences_file(tmp_path / "japanese-vowels" / f"{part}.jsonl", count)
    words: Sequence[str] = ("--quick", "--rows", "vowels", "--rows", "waves", "--rows", "acsf1", "--data", str(tmp_path))
    call("bench", "quality", *words, "--at-once", "2", "--json", str(tmp_path / "rows.json"))
    rows = json.loads((tmp_path / "rows.json").read_text())
    found = {(row["data"], row["column"]): row["median"] for row in rows}
    cells = [("japanese-vowels", column) for column in quality.COLUMNS] + [("waves", column) for column in ("ours", "torch", "simple")]
    assert list(found) == [*cells, ("acsf1", "all")]
    assert all(found[cell] is not None for cell in cells), rows


def test_a_row_without_files_needs_none() -> None:
    assert DataSet("x", (), "mae").missing(Path("nowhere")) == []
