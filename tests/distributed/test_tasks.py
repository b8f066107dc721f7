"""Every task on several workers: the rows, weights, figures and predictions of one worker. float64, real processes over gloo.

That every plan gives the answer of one device is shown in tests/one_answer; here are the runs around it, with all that a task adds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from _catchments import catchments
from carrywave.prediction.evaluate import evaluate_run
from carrywave.prediction.predict import predict
from carrywave.runs.checkpoint.weights import weights_metadata
from carrywave.spec.load import parse
from carrywave.train.fit import train

sys.path.insert(0, str(Path(__file__).parent))
from _train_jobs import carry_out, rows_of

CLOSE = 1e-9  # sums in another order, in float64, over some dozen steps
STAGES: dict[str, Any] = {"stages": 2, "micro_batches": 2, "chunk_steps": 4}
CALENDAR = {"targets": ["y"], "known": ["price", "promo"], "categorical": ["promo"], "static": ["region", "size"], "calendar": ["weekday"]}
SALES = {"train": "sales.csv", **CALENDAR, "missing": "interpolate", "horizon": 3, "season": 7}
RIVERS = {"train": "rivers.csv", "each_step": True, "series": "basin", "targets": ["flow"], "static": ["quick", "slow"], "missing": "mask"}
DEMAND = {"train": "demand.csv", "horizon": 3, "season": 7}
TEXT, WORDS = {"train": "text.txt", "tokens": "char"}, {"hidden": 6, "layers": 3, "dropout": 0.3, "tie": True}
SPANS = {"train": "spans.jsonl"}
# By name: the task, its data, its model, its training; figures that its rows have; what is predicted from.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], set[str], str]] = {
    "language": ("language", TEXT, WORDS, {"accumulate": 2, "clip": 0.5}, {"loss"}, "prompts.txt"),
    "documents": ("language", TEXT | {"reset": "."}, WORDS | {"learned_carry": True}, {}, {"loss"}, "prompts.txt"),
    "classes": ("classification", {"train": "rows.jsonl"}, {"pool": "mean"}, {"class_weights": "balanced"}, {"macro_f1"}, "rows.jsonl"),
    "both ways": ("classification", {"train": "rows.jsonl"}, {"bidirectional": True}, {}, {"macro_f1"}, "rows.jsonl"),
    "spans": ("tagging", SPANS, {"crf": True}, {"best": "span_f1"}, {"span_f1"}, "spans.jsonl"),
    "covariates": ("forecasting", SALES, {"dropout": [0.1, 0.2, 0.2]}, {}, {"mae[y]", "rmse[y]"}, "sales.csv"),
    "quantiles": ("forecasting", DEMAND | {"quantiles": [0.1, 0.5, 0.9]}, {}, {}, {"loss"}, "demand.csv"),
    "counts": ("forecasting", DEMAND | {"distribution": "negative_binomial"}, {"linear": 9}, {}, {"crps", "within_80"}, "demand.csv"),
    "bands": (
        "forecasting",
        {"train": "walks.csv", "horizon": 3, "bands": [0.5, 0.8], "channels": "independent", "split": [0.5, 0.25, 0.25]},
        {"linear": 9},
        {},
        {"loss"},
        "walks.csv",
    ),
    "logarithms": ("forecasting", {"train": "wide.csv", "horizon": 3, "transform": "log"}, {}, {}, {"mae[a]", "mae[c]"}, "wide.csv"),
    "rivers": (
        "regression",
        RIVERS | {"split": [60, 20], "warmup": 4},
        {"dropout": 0.2},
        {"loss": "nse", "best": "nse_median"},
        {"nse_median", "kge_median"},
        "rivers.csv",
    ),
}
QUICK = ("language", "classes", "bands")


def spec(folder: Path, kind: str, plan: Mapping[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    task, data, model, training, *_ = KINDS[kind]
    batch = {"tokens": 24} if task in ("classification", "tagging") else {"lanes": 3, "steps": 8}
    usual = {"precision": "fp64", "lr": 0.02, "schedule": "constant", "epochs": 2, "log_every": 3}
    return {
        "task": task,
        "data": data | {"train": str(folder / data["train"]), "cache": str(folder / "cache")},
        "model": {"hidden": 5, "layers": 2} | model,
        "batch": batch,
        "train": usual | training | keys,
        **({"plan": dict(plan)} if plan else {}),
    }


def plans(kind: str) -> dict[str, dict[str, Any]]:
    """Two replicas, and two stages; without chunks of time where a model reads sequences as a whole."""
    whole = kind in ("both ways", "spans")
    return {"replicas": {"replicas": 2}, "stages": STAGES | ({"chunk_steps": None} if whole else {})}


def write(folder: Path) -> None:
    """The data of all kinds."""
    draw = np.random.default_rng(3)

    def lines(name: str, rows: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    (folder / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 8)
    (folder / "prompts.txt").write_text("the\nwave\nmoves\nand\ncarry is\n")
    steps = [draw.normal(size=(int(draw.integers(1, 10)), 2)).round(3) for _ in range(40)]
    lines("rows.jsonl", [{"steps": each.tolist(), "label": "up" if each.sum() > 0 else "down"} for each in steps])
    kinds = [["O"], ["B-x", "I-x"], ["B-y"]]
    spans = [[label for kind in draw.integers(3, size=draw.integers(1, 6)) for label in kinds[kind]] for _ in range(40)]
    lines(
        "spans.jsonl", [{"steps": [[float(label == "O"), float(label[0] == "B"), 0.5] for label in each], "labels": each} for each in spans]
    )

    def series(name: str, columns: Any, lengths: Mapping[str, int]) -> None:
        parts = [
            pd.DataFrame({"unique_id": each, "ds": pd.date_range("2024-01-01", periods=rows), **columns(each, rows)})
            for each, rows in lengths.items()
        ]
        pd.concat(parts).to_csv(folder / name, index=False)

    series(
        "walks.csv",
        lambda each, rows: dict(zip("uv", draw.normal(size=(2, rows)).cumsum(axis=1), strict=True)),
        {"p": 120, "q": 105, "r": 130},
    )
    series("demand.csv", lambda each, rows: {"y": draw.poisson({"p": 0.7, "q": 40.0, "r": 5.0}[each], rows)}, {"p": 70, "q": 55, "r": 64})

    def sales(each: str, rows: int) -> dict[str, Any]:
        y = np.where(np.arange(rows) < rows - 3, draw.normal(size=rows), np.nan)  # three days are known ahead
        promo = draw.choice(["none", "tv", "web"], rows)
        return {"y": y, "price": draw.normal(size=rows), "promo": promo, "region": each < "q", "size": rows}

    series("sales.csv", sales, {"p": 73, "q": 58, "r": 8})
    wide = np.exp(draw.normal(size=(90, 3)) / 4 + np.sin(np.arange(90)[:, None] / [1, 2, 3]))
    pd.DataFrame(wide, columns=["a", "b", "c"]).to_csv(folder / "wide.csv", index=False)
    rivers = catchments(3, 80, holes=0.3)
    rivers.loc[rivers.index % 7 == 2, "rain"] = float("nan")
    rivers.drop(index=[11, 12, 130]).to_csv(folder / "rivers.csv", index=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write(folder)
    return folder


def assert_same(found: Any, wanted: Any, close: float, where: str) -> None:
    """Values as JSON holds them; floats up to rounding."""
    if isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=close, abs=close / 1000, nan_ok=True), where
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key, value in wanted.items():
            assert_same(found[key], value, close, f"{where}: {key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for number, value in enumerate(wanted):
            assert_same(found[number], value, close, f"{where}: {number}")
    else:
        assert found == wanted, where


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kinds", [QUICK, pytest.param(tuple(KINDS.keys() - set(QUICK)), marks=pytest.mark.slow)], ids=["some", "the others"]
)
def test_any_plan_gives_the_run_of_one_worker(kinds: tuple[str, ...], folder: Path) -> None:
    """Two workers train, three evaluate and predict: rows and prompts do not divide among them, and there may be fewer."""
    for kind in kinds:
        train(parse(spec(folder, kind)), run=folder / kind, device="cpu")
    shared = {"language shared": spec(folder, "language", STAGES | {"share_head": True})} if "language" in kinds else {}
    runs = shared | {f"{kind} {name}": spec(folder, kind, plan) for kind in kinds for name, plan in plans(kind).items()}
    trained = carry_out(folder, 2, [{"run": run, "spec": values} for run, values in runs.items()], f"train-{kinds[0]}")
    assert [each.get("ending", each) for each in trained[0]] == ["done"] * len(runs)
    assert trained[0] == trained[1]  # every worker knows how it ended
    for run in runs:
        alone = folder / run.rpartition(" ")[0]
        assert_same(rows_of(folder / run), rows_of(alone), CLOSE, run)
        weights = load_file(folder / run / "weights.safetensors")
        for name, tensor in load_file(alone / "weights.safetensors").items():
            torch.testing.assert_close(
                weights[name], tensor, rtol=CLOSE, atol=1e-12, msg=lambda text, where=f"{run} {name}": f"{where}: {text}"
            )
        assert weights_metadata(folder / run / "weights.safetensors").get("share") == weights_metadata(alone / "weights.safetensors").get(
            "share"
        )
        if (alone / "bands.json").exists():
            assert_same(json.loads((folder / run / "bands.json").read_text()), json.loads((alone / "bands.json").read_text()), CLOSE, run)
    asked = [job for kind in kinds for job in ({"evaluate": kind}, {"predict": kind, "data": KINDS[kind][-1]})]
    told = carry_out(folder, 3, asked, f"evaluate-{kinds[0]}")
    for number, kind in enumerate(kinds):
        row: dict[str, Any] = evaluate_run(folder / kind, device="cpu", note=lambda _: None)
        assert KINDS[kind][4] <= row.keys(), row.keys()
        rows = predict(folder / kind, folder / KINDS[kind][-1], device="cpu", note=lambda _: None)
        for rank in range(3):
            assert_same(told[rank][2 * number].get("row"), json.loads(json.dumps(row)), CLOSE, f"{kind} on rank {rank}")
        # Outputs travel in float32. Draws are keyed by the prompt, not by the worker.
        assert_same(told[0][2 * number + 1].get("rows"), json.loads(json.dumps(rows)), 1e-5, kind)
        assert told[1][2 * number + 1]["rows"] == []  # rank 0 has them all


@pytest.mark.slow
def test_runs_together_on_two_workers_are_those_on_one(folder: Path) -> None:
    """They were planned for stages, but every worker holds all of them as a whole."""
    kinds = ("classes", "quantiles")
    for kind in kinds:
        for seed in (1, 2):
            run = folder / f"{kind}-{seed}"
            given = spec(folder, kind, seed=seed, epochs=1)
            given["data"]["valid"] = given["data"]["train"]
            train(parse(given), run=run, device="cpu")
            (run / "spec.yaml").write_text((run / "spec.yaml").read_text().replace("plan: auto", "plan: {stages: 2}"))
    jobs = [{how: [f"{kind}-1", f"{kind}-2"], "data": KINDS[kind][-1]} for kind in kinds for how in ("evaluate", "predict")]
    told = carry_out(folder, 2, jobs, "together")
    for number, job in enumerate(jobs):
        names = job.get("evaluate") or job["predict"]
        runs = [folder / name for name in names]
        if "evaluate" in job:
            alone: Any = evaluate_run(runs, device="cpu", note=lambda _: None)
            for each in told:
                assert_same(each[number]["row"], json.loads(json.dumps(alone)), CLOSE, str(names))
        else:
            alone = predict(runs, folder / job["data"], device="cpu", note=lambda _: None)
            assert_same(told[0][number]["rows"], json.loads(json.dumps(alone)), 1e-5, str(names))


def mistakes(folder: Path) -> list[tuple[dict[str, Any], str]]:
    """What is wrong with each, and how it is said."""
    language = {"run": "bad", "spec": spec(folder, "language")}

    def planned(kind: str = "language", **plan: Any) -> dict[str, Any]:
        return {"run": "bad", "spec": spec(folder, kind, plan)}

    mixes = "PlanError: encoder (Mixing) or head ({}) gives a loss that is"
    lost = language["spec"] | {"data": {"train": str(folder / "nothing.txt")}}
    return [
        (planned(stages=7), "PlanError: plan.stages=7, but the model has 5 units (encoder, 3 layers, head); use plan.stages <= 5"),
        (planned(replicas=1), "PlanError: plan.replicas=1 x plan.stages=1 needs 1 worker, got 3"),
        (planned(replicas=3, micro_batches=2), "PlanError: batch.lanes=3 cannot be divided among plan.replicas=3 x plan.micro_batches=2"),
        (planned("classes", stages=3, share_head=True), "PlanError: plan.share_head=true needs a head that scores single steps"),
        ({"run": "bad", "spec": lost}, "DataError: data.train"),
        ({"run": "prompts.txt", "spec": language["spec"]}, "RunError: "),
        (language | {"alien": 2}, "WorkerError: rank 2 has train.lr 0.125, but rank 0 has 0.02; start every worker with the same command"),
        ({"lanes": "own"}, "WorkerError: rank 1 got a different batch than rank 0 (step 1 of the trainer); pass the same whole batch"),
        ({"mixing": 1, "plan": {"replicas": 3}}, mixes.format("Head")),
        ({"mixing": 0, "plan": {"stages": 3, "chunk_steps": 2}}, mixes.format("Head")),
        ({"fit": "bad"}, mixes.format("TagHead")),
        ({"run": "bad", "spec": spec(folder, "language", lr=1e308, optimizer="sgd", clip=None)}, "Diverged: "),
        ({"predict": "prompts.txt", "data": "nothing.txt"}, ""),
    ]


def test_mistakes_are_met_by_all_workers_at_once(folder: Path) -> None:
    """And what goes well after them goes well."""
    cases = mistakes(folder)
    told = carry_out(folder, 3, [*(job for job, _ in cases), {"lanes": "shared"}], "mistakes")
    for number, (job, start_of) in enumerate(cases):
        messages = {each[number]["error"] for each in told}
        assert len(messages) == 1, messages  # all of them say the same
        assert messages.pop().startswith(start_of), (job, told[0][number])
    assert [each[-1] for each in told] == [{}] * 3
    assert not (folder / "bad" / "weights.safetensors").exists()
