"""OpaqueModel runs on several workers: the rows, weights, snapshots and predictions of one worker. float64, real processes over gloo."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from carrywave.prediction.evaluate import evaluate_run
from carrywave.prediction.predict import predict
from carrywave.spec.load import parse
from carrywave.train.fit import train

sys.path.insert(0, str(Path(__file__).parent))
from _train_jobs import carry_out, rows_of

# Sums in another order, in float64, over some dozen steps.
CLOSE = 1e-9

SCHEDULE = {"schedule": "constant"}  # others depend on where a run is to end, and some of these are stopped and go on


def language(folder: Path, plan: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    return {
        "task": "language",
        "data": {"train": str(folder / "text.txt"), "tokens": "char"},
        "model": {"hidden": 6, "layers": 3, "dropout": 0.3, "tie": True},
        "batch": {"lanes": 5, "steps": 7},
        "train": {
            "precision": "fp64",
            "optimizer": "adam",
            "lr": 0.02,
            "clip": 0.5,
            "epochs": 2,
            "accumulate": 2,
            "log_every": 3,
            **SCHEDULE,
            **train,
        },
        **({"plan": plan} if plan else {}),
    }


WEIGHTED = {"class_weights": "balanced"}  # with which the loss without weights is a metric


def classification(folder: Path, plan: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
    return {
        "task": "classification",
        "data": {"train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl")},
        "model": {"hidden": 5, "layers": 3, "dropout": 0.2, "pool": "mean", **model},
        "batch": {"tokens": 24},
        "train": {"precision": "fp64", "optimizer": "sgd", "momentum": 0.9, "lr": 0.1, "epochs": 2, "log_every": 4, **WEIGHTED},
        **({"plan": plan} if plan else {}),
    }


def documents(folder: Path, plan: dict[str, Any] | None = None) -> dict[str, Any]:
    """Sentences that know nothing of each other."""
    spec = language(folder, plan)
    return {**spec, "data": {**spec["data"], "reset": "."}, "model": {**spec["model"], "learned_carry": True}}


def forecasting(folder: Path) -> dict[str, Any]:
    return {
        "task": "forecasting",
        "data": {"train": str(folder / "series.csv"), "horizon": 3, "quantiles": [0.1, 0.5, 0.9]},
        "model": {"hidden": 4, "layers": 1},
        "batch": {"lanes": 2, "steps": 7},
        "train": {"precision": "fp64", "max_steps": 2},
    }


KINDS: dict[str, Callable[..., dict[str, Any]]] = {"language": language, "classification": classification}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    (folder / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 8)
    draw = np.random.default_rng(3)
    for name, rows in (("train", 40), ("test", 11)):
        steps = [draw.normal(size=(int(draw.integers(1, 10)), 2)).round(3) for _ in range(rows)]
        lines = [json.dumps({"steps": each.tolist(), "label": "up" if each.sum() > 0 else "down"}) for each in steps]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    for name, make in {**KINDS, "documents": documents}.items():
        train(parse(make(folder)), run=folder / name, device="cpu")
    train(parse(classification(folder, bidirectional=True)), run=folder / "both", device="cpu")
    (folder / "prompts.txt").write_text("the\nwave\nmoves\nand\ncarry is\n")
    values = draw.normal(size=(2, 30)).cumsum(axis=1)
    rows = [f"{name},{day},{values[place, day]:.4f}" for place, name in enumerate("ab") for day in range(30 - 5 * place)]
    (folder / "series.csv").write_text("\n".join(["unique_id,ds,y", *rows]))
    train(parse(forecasting(folder)), run=folder / "forecasting", device="cpu")
    return folder


def assert_same_run(run: Path, serial: Path) -> None:
    found, wanted = rows_of(run), rows_of(serial)
    assert [list(row) for row in found] == [list(row) for row in wanted]
    for row, expected in zip(found, wanted, strict=True):
        for key, value in expected.items():
            assert row[key] == (pytest.approx(value, rel=CLOSE, abs=1e-12) if isinstance(value, float) else value), (key, row, expected)
    ours, theirs = load_file(run / "weights.safetensors"), load_file(serial / "weights.safetensors")
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=CLOSE, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


PLANS: dict[int, list[dict[str, Any]]] = {
    2: [{"replicas": 2}, {"stages": 2, "cuts": [4], "micro_batches": 2, "chunk_steps": 3, "recompute": True}],
    4: [{"replicas": 2, "stages": 2, "chunk_steps": 3}, {"stages": 4}, {"replicas": 4}],
}

# A head that scores single steps may be shared: that of the language model.
SHARED: dict[int, list[dict[str, Any]]] = {
    2: [{"stages": 2, "chunk_steps": 2, "share_head": True}],
    4: [
        {"replicas": 2, "stages": 2, "chunk_steps": 3, "share_head": True},
        {"stages": 4, "chunk_steps": 2, "micro_batches": 2, "share_head": True},
    ],
}


@pytest.mark.parametrize("workers", [pytest.param(workers, marks=pytest.mark.slow) if workers > 2 else workers for workers in PLANS])
def test_a_run_on_any_plan_is_the_run_on_one_worker(folder: Path, workers: int) -> None:
    jobs = [
        {"run": f"{kind}-{workers}-{number}", "spec": make(folder, plan)}
        for kind, make in KINDS.items()
        for number, plan in enumerate([*PLANS[workers], *(SHARED[workers] if kind == "language" else [])])
    ]
    jobs.append(
        {"run": f"both-{workers}", "spec": classification(folder, {"stages": 2, "micro_batches": 2, "chunk_steps": 2}, bidirectional=True)}
    )
    jobs += [{"run": f"documents-{workers}-{number}", "spec": documents(folder, plan)} for number, plan in enumerate(PLANS[workers][:2])]
    told = carry_out(folder, workers, jobs, f"plans-{workers}")
    assert all(each == told[0] for each in told[1:])  # every worker knows how it ended
    assert [each["ending"] for each in told[0]] == ["done"] * len(jobs)
    for job in jobs:
        assert_same_run(folder / job["run"], folder / job["run"].partition("-")[0])


@pytest.mark.slow
def test_a_run_goes_on_with_another_plan(folder: Path) -> None:
    """Stopped after 5 of its steps on one plan and resumed on another; on the same plan, it is the same to the bit."""
    replicas, stages = {"replicas": 2}, {"stages": 2, "chunk_steps": 2}
    shared = {**stages, "share_head": True}
    jobs: list[dict[str, Any]] = []
    pairs = {
        "resumed": (replicas, stages),
        "back": (stages, replicas),
        "same": (stages, stages),
        "shared": (shared, stages),
        "own": (stages, shared),
    }
    for name, (first, second) in pairs.items():
        jobs.append({"run": name, "spec": language(folder, first, max_steps=5)})
        jobs.append({"run": name, "spec": language(folder, second), "resume": True})
    jobs.append({"run": "through", "spec": language(folder, stages)})
    jobs.append({"evaluate": "through"})
    told = carry_out(folder, 2, jobs, "resume")
    assert all("error" not in each for each in told[0]), told[0]
    # A run of one worker goes on alone, too.
    train(parse(language(folder, {"replicas": 1}, max_steps=5)), run=folder / "alone", device="cpu")
    carry_out(folder, 2, [{"run": "alone", "spec": language(folder, stages), "resume": True}], "alone-resume")
    for name in (*pairs, "alone"):
        found = {(row["split"], row["step"]): row for row in rows_of(folder / name)}
        last = rows_of(folder / "language")[-1]
        assert found["valid", last["step"]]["loss"] == pytest.approx(last["loss"], rel=CLOSE)
    same, through = (load_file(folder / name / "weights.safetensors") for name in ("same", "through"))
    assert all(torch.equal(same[name], tensor) for name, tensor in through.items())
    alone = evaluate_run(folder / "through", device="cpu")
    assert told[0][-1]["row"]["loss"] == pytest.approx(alone["loss"], rel=CLOSE)
    # Continued token by token with random numbers, which the last bits of the weights do not change.
    texts = [predict(folder / run, folder / "text.txt", device="cpu", tokens=5) for run in ("through", "language")]
    assert texts[0] == texts[1]


EVALUATED = [
    {"evaluate": "language"},
    {"evaluate": "classification"},
    {"predict": "classification", "data": "test.jsonl"},
    {"predict": "language", "data": "prompts.txt"},
    {"predict": "language", "data": "text.txt"},
    {"predict": "forecasting", "data": "series.csv"},
    {"predict": "language", "data": "nothing.txt"},
]


def mistakes(folder: Path) -> list[tuple[dict[str, Any], str]]:
    """What is wrong with each, and how it is said."""
    aliens = "start every worker with the same command, files and versions"
    return [
        (
            {"run": "bad", "spec": language(folder, {"stages": 7})},
            "PlanError: plan.stages=7, but the model has 5 units (encoder, 3 layers, head); use plan.stages <= 5",
        ),
        ({"run": "bad", "spec": language(folder, {"replicas": 1})}, "PlanError: plan.replicas=1 x plan.stages=1 needs 1 worker, got 3"),
        (
            {"run": "bad", "spec": language(folder, {"replicas": 3, "micro_batches": 2})},
            "PlanError: batch.lanes=5 cannot be divided among plan.replicas=3 x plan.micro_batches=2; use batch.lanes >= 6",
        ),
        (
            {"run": "bad", "spec": classification(folder, {"stages": 3, "share_head": True})},
            "PlanError: plan.share_head=true needs a head that scores single steps, but the head of this model scores whole sequences",
        ),
        ({"run": "bad", "spec": language(folder) | {"data": {"train": str(folder / "nothing.txt")}}}, "DataError: data.train"),
        ({"run": "language", "spec": language(folder)}, f"RunError: {folder / 'language'} already exists and is not empty"),
        (
            {"run": "bad", "spec": language(folder), "alien": 2},
            f"WorkerError: rank 2 has train.lr 0.125, but rank 0 has 0.02; {aliens}",
        ),
        (
            {"lanes": "own"},
            "WorkerError: rank 1 got a different batch than rank 0 (step 1 of the trainer); pass the same whole batch to every worker",
        ),
        (
            {"mixing": 1, "plan": {"replicas": 3}},
            "PlanError: encoder (Mixing) or head (Head) gives a loss that is",
        ),
        ({"fit": "bad"}, "PlanError: encoder (Mixing) or head (TagHead) gives a loss that is"),
        (
            {"mixing": 0, "plan": {"stages": 3, "chunk_steps": 2}},
            "PlanError: encoder (Mixing) or head (Head) gives a loss that is",
        ),
        ({"run": "bad", "spec": language(folder, lr=1e308, optimizer="sgd", clip=None)}, "Diverged: "),
    ]


@pytest.fixture(scope="module")
def told_by_three(folder: Path) -> list[list[dict[str, Any]]]:
    """Of evaluations, of mistakes, and of what goes well after them. Three workers are started once, which takes longest."""
    return carry_out(folder, 3, [*EVALUATED, *(job for job, _ in mistakes(folder)), {"lanes": "shared"}], "three")


def test_evaluation_and_prediction_on_several_workers(folder: Path, told_by_three: list[list[dict[str, Any]]]) -> None:
    told = told_by_three
    alone = [evaluate_run(folder / name, device="cpu") for name in ("language", "classification")]
    for number, wanted in enumerate(alone):
        for each in told:
            assert each[number]["row"].keys() == wanted.keys()
            numbers = {key: value for key, value in wanted.items() if isinstance(value, float)}
            assert all(each[number]["row"][key] == pytest.approx(value, rel=CLOSE) for key, value in numbers.items())
    wanted_rows = predict(folder / "classification", folder / "test.jsonl", device="cpu")
    assert [row["label"] for row in told[0][2]["rows"]] == [row["label"] for row in wanted_rows]
    assert [row["probability"] for row in told[0][2]["rows"]] == pytest.approx([row["probability"] for row in wanted_rows], abs=1e-6)
    assert told[1][2]["rows"] == []  # rank 0 has them all
    # Prompts do not divide evenly; there is one; there are fewer series than workers. Draws are keyed by the prompt, not by the worker.
    for number in (3, 4):
        assert told[0][number]["rows"] == predict(folder / "language", folder / EVALUATED[number]["data"], device="cpu")
    assert len({row["continuation"] for row in told[0][3]["rows"]}) == 5
    wanted_rows = predict(folder / "forecasting", folder / "series.csv", device="cpu")
    assert len(wanted_rows) == 2 * 3
    for row, expected in zip(told[0][5]["rows"], wanted_rows, strict=True):
        assert row.keys() == expected.keys()
        # Outputs come as float32 from float64.
        assert all(row[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value) for key, value in expected.items())
    # Rank 0 alone reads, and all say what is wrong.
    assert {each[6]["error"] for each in told} == {told[0][6]["error"]}
    assert "nothing.txt" in told[0][6]["error"]


def test_mistakes_are_met_by_all_workers_at_once(folder: Path, told_by_three: list[list[dict[str, Any]]]) -> None:
    for number, (job, start_of) in enumerate(mistakes(folder), start=len(EVALUATED)):
        messages = {each[number]["error"] for each in told_by_three}
        assert len(messages) == 1, messages  # all of them say the same
        assert messages.pop().startswith(start_of), (job, told_by_three[0][number])
    assert [each[-1] for each in told_by_three] == [{}] * 3
    assert not (folder / "bad" / "weights.safetensors").exists()
