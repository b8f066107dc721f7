"""Bad numbers on one of several workers: all see them in the same step, name the same rank and layer, and go on alike."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from carrywave.spec.load import parse
from carrywave.train.fit import train

sys.path.insert(0, str(Path(__file__).parent))
from _poison import poisoned
from _train_jobs import carry_out, rows_of

pytestmark = pytest.mark.slow

CLOSE = 1e-9  # sums in another order, in float64, over some dozen steps
REPLICAS, STAGES = {"replicas": 2}, {"stages": 2, "chunk_steps": 3, "cuts": [3]}  # encoder, l0, l1 | l2, head
SHARED = {"stages": 2, "chunk_steps": 3, "share_head": True}

# plan, what is made bad on which rank, and what is said of it
FOUND: list[tuple[dict[str, Any], str, int, str]] = [
    (REPLICAS, "loss", 1, "the loss that head computes on rank 1"),
    (REPLICAS, "gradient", 1, "the gradient of lstm.l2 on rank 1"),
    (REPLICAS, "gradient", 0, "the gradient of lstm.l2 on rank 0"),
    (REPLICAS, "carry 1", 1, "the output that lstm.l1 computes on rank 1"),
    (REPLICAS, "lstm.weight_hh_l1", 0, "the weight lstm.weight_hh_l1 of lstm.l1 on rank 0"),
    (STAGES, "loss", 1, "the loss that head computes on rank 1"),
    (STAGES, "gradient", 1, "the gradient of lstm.l2 on rank 1"),
    (STAGES, "carry 1", 0, "the output that lstm.l1 computes on rank 0"),
    (STAGES, "carry 2", 1, "the output that lstm.l2 computes on rank 1"),
    (STAGES, "lstm.weight_hh_l2", 0, "the weight lstm.weight_hh_l2 of lstm.l2 on rank 1"),
    (SHARED, "loss", 0, "the loss that head computes on rank 0"),
]
STEP = 3  # of two batches
# What goes wrong at the first rate does not at half of it: a run that goes back comes through.
WAYS: dict[str, dict[str, Any]] = {
    "skip": {"how": "loss", "at": [6, 12]},
    "back": {"how": "gradient", "at": [6], "epoch": 1, "above": 0.015},
}

Job = dict[str, Any]
Told = dict[str, dict[str, Any]]


def spec(folder: Path, plan: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return {
        "task": "language",
        "data": {"train": str(folder / "text.txt"), "tokens": "char"},
        "model": {"hidden": 6, "layers": 3, "dropout": 0.3, "tie": True},
        "batch": {"lanes": 5, "steps": 7},
        "train": {
            "precision": "fp64",
            "lr": 0.02,
            "clip": 0.5,
            "epochs": 2,
            "accumulate": 2,
            "log_every": 3,
            "schedule": "constant",
            **keys,
        },
        **({"plan": plan} if plan else {}),
    }


def stopping(folder: Path) -> list[Job]:
    return [
        {"run": f"stop-{number}", "spec": spec(folder, plan), "poison": {"how": how, "at": [2 * STEP - 2], "rank": rank}}
        for number, (plan, how, rank, _) in enumerate(FOUND)
    ]


def going_on(folder: Path) -> list[Job]:
    return [
        {"run": f"{way}-{name}", "spec": spec(folder, plan, on_nan=way), "poison": {**poison, "rank": 1}}
        for way, poison in WAYS.items()
        for name, plan in (("replicas", REPLICAS), ("stages", STAGES))
    ]


def giving_up(folder: Path) -> list[Job]:
    keys = {"accumulate": 1, "epochs": 1}
    high = {"optimizer": "sgd", "lr": 1e308, "clip": None}
    return [
        {"run": "many", "spec": spec(folder, STAGES, on_nan="skip", **keys), "poison": {"how": "loss", "at": [*range(4, 18)], "rank": 1}},
        {"run": "often", "spec": spec(folder, REPLICAS, on_nan="back", **keys), "poison": {"how": "loss", "at": [4], "rank": 1}},
        # The weights themselves, which are refused where they are saved, or show in the next step.
        {"run": "high", "spec": spec(folder, REPLICAS, on_nan="back", **high), "poison": {"how": "loss", "at": []}},
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 12)
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> Told:
    """What the workers told of each run: all of them the same. They are started once, which takes longer than the runs."""
    jobs = [*stopping(folder), *going_on(folder), *giving_up(folder)]
    first, second = carry_out(folder, 2, jobs, "jobs")
    assert first == second
    return {job["run"]: each for job, each in zip(jobs, first, strict=True)}


@pytest.mark.parametrize("number", range(len(FOUND)))
def test_all_workers_stop_at_one_step_and_name_the_rank_and_the_layer(number: int, told: Told, folder: Path) -> None:
    each = told[f"stop-{number}"]
    assert each["error"] == (
        f"Diverged: {FOUND[number][-1]} is no longer finite at step {STEP} (epoch 1); "
        "lower train.lr=0.02 or set train.clip; nothing from that step was saved"
    )
    assert each["reported_by"] == 0  # by one of them
    assert each["begun"] == [0, 2, 4]
    assert not list(folder.glob(f"stop-{number}/snapshots/step-*"))


def test_every_plan_goes_on_as_one_worker_does(told: Told, folder: Path) -> None:
    for way, poison in WAYS.items():
        with poisoned(**poison):
            train(parse(spec(folder, on_nan=way)), run=folder / way, device="cpu")
    for job in going_on(folder):
        way = job["run"].partition("-")[0]
        assert told[job["run"]].get("ending") == "done", told[job["run"]]
        assert len(told[job["run"]]["lines"]) == {"skip": 2, "back": 1}[way]
        assert_same_run(folder / job["run"], folder / way)
    assert {row["lr"] for row in rows_of(folder / "back") if row["split"] == "train" and row["epoch"] == 2} == {0.01}


def test_workers_give_up_together(told: Told) -> None:
    assert "at step 5 (epoch 1); 10 steps in a row were skipped; lower train.lr=0.02" in told["many"]["error"]
    assert told["often"]["error"].endswith("(after going back 3 times, down to a learning rate of 0.0025)")
    assert told["often"]["begun"] == [0, 1, 2, 3, 4] * 4
    assert "after going back 3 times" in told["high"]["error"]


def assert_same_run(run: Path, serial: Path) -> None:
    found, wanted = rows_of(run), rows_of(serial)
    assert [list(row) for row in found] == [list(row) for row in wanted]
    for row, expected in zip(found, wanted, strict=True):
        for key, value in expected.items():
            assert row[key] == (pytest.approx(value, rel=CLOSE, abs=1e-12) if isinstance(value, float) else value), (key, row, expected)
    ours, theirs = load_file(run / "weights.safetensors"), load_file(serial / "weights.safetensors")
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=CLOSE, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
