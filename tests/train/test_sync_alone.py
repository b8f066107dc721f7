"""Runs of `train.sync` with a single replica, in this process: when rows, evaluations and snapshots are due, and what ends a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import _whole_snapshots
from carrywave.errors import Diverged, RunError
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.train.fit import train


def spec(folder: Path, **settings: Any) -> Spec:
    if not (folder / "text.txt").exists():
        (folder / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 12)
    return parse(
        {
            "data": {"train": str(folder / "text.txt"), "tokens": "char"},
            "model": {"hidden": 4, "layers": 1},
            "batch": {"lanes": 4, "steps": 7},
            "train": {"lr": 0.01, "epochs": 9, "max_steps": 14, "keep": 9, "snapshot_every": 3, "log_every": 3} | settings,
        }
    )


def rows_of(run: Path, split: str) -> list[dict[str, Any]]:
    return [row for line in (run / "metrics.jsonl").read_text().splitlines() if (row := json.loads(line))["split"] == split]


def snapshots(run: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in (run / "snapshots").glob("step-*"))


def test_rows_evaluations_and_snapshots_wait_for_a_meeting(tmp_path: Path) -> None:
    train(spec(tmp_path, sync="local", sync_every=4, evaluate_every=6), run=tmp_path / "run", device="cpu")
    assert [(row["step"], row["steps"]) for row in rows_of(tmp_path / "run", "train")] == [(4, 4), (8, 4), (12, 4), (14, 2)]
    assert [row["step"] for row in rows_of(tmp_path / "run", "valid")] == [8, 12, 14]
    assert snapshots(tmp_path / "run") == [4, 8, 12, 14]


@pytest.mark.slow
def test_a_single_replica_averages_nothing(tmp_path: Path) -> None:
    for name, settings in (("step", {}), ("local", {"sync": "local", "sync_every": 4})):
        train(spec(tmp_path, precision="fp64", **settings), run=tmp_path / name, device="cpu")
    ours, theirs = (load_file(tmp_path / name / "weights.safetensors") for name in ("local", "step"))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-12, atol=1e-14)  # moved by a difference, instead of kept


def test_a_stopped_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"sync": "diloco", "sync_every": 4}
    train(spec(tmp_path, **settings), run=tmp_path / "whole", device="cpu")
    train(spec(tmp_path, **settings), run=tmp_path / "parts", device="cpu")
    (tmp_path / "parts" / "snapshots" / "last").write_text("step-00000008\n")  # as if it had been killed after this snapshot
    train(spec(tmp_path, **settings), run=tmp_path / "parts", resume=True, device="cpu")
    ours, theirs = (_whole_snapshots.load(tmp_path / run / "snapshots") for run in ("parts", "whole"))
    for group in ("parameters", "outer", "replica", "carry"):
        found, wanted = getattr(ours, group), getattr(theirs, group)
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert theirs.outer
    assert theirs.replica
    assert (tmp_path / "parts" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_a_step_that_is_not_finite_ends_the_run_at_the_next_meeting(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"is no longer finite at step \d+ .*; lower train\.lr=1e\+38 or set train\.clip; nothing from"):
        train(spec(tmp_path, sync="local", sync_every=4, lr=1e38, optimizer="sgd"), run=tmp_path / "run", device="cpu")
    assert snapshots(tmp_path / "run") == []


def test_the_way_of_exchanging_is_part_of_a_run(tmp_path: Path) -> None:
    train(spec(tmp_path, sync="local", sync_every=4, max_steps=4), run=tmp_path / "run", device="cpu")
    with pytest.raises(RunError, match=r"the run was started with train\.sync=local, not diloco; keep the old value"):
        train(spec(tmp_path, sync="diloco", sync_every=4), run=tmp_path / "run", resume=True, device="cpu")
