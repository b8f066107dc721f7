"""Runs that differ by their seed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from carrywave.cli.main import app
from carrywave.errors import RunError
from carrywave.spec.load import parse
from carrywave.tuning import children
from carrywave.tuning.seeds import train_seeds

SPEC = parse({"task": "classification", "data": {"train": "a.jsonl", "valid": "b.jsonl"}, "train": {"seed": 7}})


@pytest.fixture
def _quick_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "COMMAND", (sys.executable, str(Path(__file__).with_name("_fake_run.py"))))
    monkeypatch.setattr(children, "POLL_SECONDS", 0.01)


@pytest.mark.usefixtures("_quick_runs")
def test_seeds_follow_that_of_the_spec_and_their_median_and_spread_are_told(tmp_path: Path) -> None:
    lines: list[str] = []
    found = train_seeds(SPEC, 3, run=tmp_path / "r", where=("cpu", None), say=lines.append)
    assert [(Path(row["run"]).name, row["seed"]) for row in found.rows] == [("seed-1", 7), ("seed-2", 8), ("seed-3", 9)]
    low, middle, high = (row["loss"] for row in found.rows)
    assert found.summary == f"3 seeds: median loss {middle:.4g}, from {low:.4g} to {high:.4g}"
    assert (found.failed, found.ending) == ("", None)
    assert len(lines) == 3
    more = train_seeds(None, 4, run=tmp_path / "r", where=("cpu", None), resume=True)
    assert [row["loss"] for row in more.rows[:3]] == [low, middle, high]
    assert more.rows[3]["seed"] == 10
    with pytest.raises(RunError, match="another spec"):
        train_seeds(SPEC.model_copy(update={"task": "tagging"}), 4, run=tmp_path / "r", where=("cpu", None), resume=True)
    with pytest.raises(RunError, match="not empty"):
        train_seeds(SPEC, 4, run=tmp_path / "r", where=("cpu", None))
    with pytest.raises(RunError, match="nothing to resume"):
        train_seeds(None, 4, run=tmp_path / "none", where=("cpu", None), resume=True)


@pytest.mark.usefixtures("_quick_runs")
def test_runs_that_go_on_start_from_the_same_weights(tmp_path: Path) -> None:
    weights, others, folder = tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "r"
    for file in (weights, others):
        file.write_text(file.name)
    folder.mkdir()
    (folder / "init.txt").write_text("of a first start that was killed at once\n")
    (folder / ".seeds.yaml.tmp").write_text("task: l")
    train_seeds(SPEC, 1, run=folder, where=("cpu", None), init=str(weights))
    train_seeds(None, 2, run=folder, where=("cpu", None), resume=True)
    assert [(folder / f"seed-{number}" / "init").read_text() for number in (1, 2)] == [str(weights)] * 2
    with pytest.raises(RunError, match=r"were started from the weights of .*a\.safetensors; leave init="):
        train_seeds(None, 2, run=folder, where=("cpu", None), resume=True, init=str(others))
    with pytest.raises(RunError, match=r"not found; pass a run folder or a \.safetensors file"):
        train_seeds(SPEC, 2, run=tmp_path / "other", where=("cpu", None), init=str(tmp_path / "none"))
    assert not (tmp_path / "other").exists()
    found = train_seeds(SPEC, 1, run=tmp_path / "none", where=("cpu", None))
    assert found.summary.startswith("1 seed: loss ")
    with pytest.raises(RunError, match="were started without initial weights"):
        train_seeds(None, 1, run=tmp_path / "none", where=("cpu", None), resume=True, init=str(others))


@pytest.mark.usefixtures("_quick_runs")
def test_a_seed_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    found = train_seeds(SPEC, 2, run=tmp_path / "r", where=("cpu", None), words=["model.hidden=13"])
    assert "seed-1 failed: this brings bad luck" in found.failed
    assert found.summary == "0 of 2 seeds, without a loss on valid"
    assert [row["state"] for row in found.rows] == ["failed", "failed"]


@pytest.mark.usefixtures("_quick_runs")
def test_seeds_that_the_machine_failed_may_be_tried_again(tmp_path: Path) -> None:
    assert train_seeds(SPEC, 2, run=tmp_path / "s", where=("cpu", None), words=["model.hidden=26"]).later
    assert not train_seeds(SPEC, 2, run=tmp_path / "t", where=("cpu", None), words=["model.hidden=13"]).later


@pytest.mark.usefixtures("_quick_runs")
def test_a_seed_that_was_killed_is_not_counted_among_the_trained_and_is_no_mistake(tmp_path: Path) -> None:
    train_seeds(SPEC, 2, run=tmp_path / "r", where=("cpu", None))
    rows = tmp_path / "r" / "seed-2" / "metrics.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:2]))
    found = train_seeds(None, 2, run=tmp_path / "r", where=("cpu", None), resume=True, words=["fake.killed=1"])
    assert [row["state"] for row in found.rows] == ["finished", "failed"]
    only = f"{found.rows[0]['loss']:.4g}"
    assert found.summary == f"1 of 2 seeds: loss {only}"
    assert found.later


@pytest.mark.usefixtures("_quick_runs")
def test_the_command_says_how_to_predict_with_all(tmp_path: Path) -> None:
    words = ["train", "task=classification", "data.train=a.jsonl", "data.valid=b.jsonl", "--seeds", "2", "--run", str(tmp_path / "r")]
    shown = CliRunner().invoke(app, [*words, "--device", "cpu", "--json", str(tmp_path / "rows.json")])
    assert shown.exit_code == 0, shown.output
    assert f"carrywave predict {tmp_path / 'r'}/seed-* INPUT" in shown.output
    assert [row["seed"] for row in json.loads((tmp_path / "rows.json").read_text())] == [1, 2]
    refused = CliRunner().invoke(app, [*words, "--dry-run"])
    assert refused.exit_code == 2


@pytest.mark.slow
def test_real_runs_are_trained_searched_and_joined(tmp_path: Path) -> None:
    """With real processes: seeds, their ensemble, a search over the same spec, and the best spec trained."""
    (tmp_path / "text.txt").write_text("the carry goes on and on\n" * 60)
    words = [f"data.train={tmp_path / 'text.txt'}", "model.hidden=4", "model.layers=1", "batch.lanes=2", "batch.steps=8", "train.epochs=1"]
    invoke = CliRunner().invoke
    shown = invoke(app, ["train", *words, "--seeds", "2", "--run", str(tmp_path / "five"), "--device", "cpu"])
    assert shown.exit_code == 0, shown.output
    runs = [str(tmp_path / "five" / f"seed-{number}") for number in (1, 2)]
    shown = invoke(app, ["evaluate", *runs, "--device", "cpu", "--json", str(tmp_path / "e.json")])
    assert shown.exit_code == 0, shown.output
    assert json.loads((tmp_path / "e.json").read_text())[0]["perplexity"] > 1
    searched = ["tune", *words, "train.lr=1e-3..1e-1", "--trials", "2", "--run", str(tmp_path / "s"), "--device", "cpu"]
    shown = invoke(app, searched)
    assert shown.exit_code == 0, shown.output
    (tmp_path / "text.txt").write_text("the carry goes on and on\n" * 61)
    shown = invoke(app, ["tune", "--resume", "--trials", "3", "--run", str(tmp_path / "s"), "--device", "cpu"])
    assert shown.exit_code == 2, shown.output
    shown = invoke(app, ["train", str(tmp_path / "s" / "best.yaml"), "--run", str(tmp_path / "best"), "--device", "cpu"])
    assert shown.exit_code == 0, shown.output
