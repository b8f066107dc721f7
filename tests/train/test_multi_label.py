"""Several labels from end to end: trained, evaluated, predicted, averaged, reported and exported, for each sequence and for each step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import carrywave as cw
from carrywave.data.prepare import check_codec
from carrywave.errors import DataError, UserError
from carrywave.prediction.saved_run import open_run
from carrywave.spec.load import parse
from carrywave.train.fit import train

NAMES = ("high", "low", "rising")


def pieces(count: int = 60) -> list[dict[str, Any]]:
    """Walks with the labels that hold for each as a whole, for each of its steps, and as vectors."""
    draw = np.random.default_rng(3)
    found = []
    for _ in range(count):
        steps = draw.normal(size=(draw.integers(3, 8), 2))
        holds = np.stack([steps[:, 0] > 0.5, steps[:, 0] < -0.5, steps[:, 1] > 0.0], axis=-1)
        names = [[name for name, each in zip(NAMES, row, strict=True) if each] for row in holds]
        found.append({"steps": steps.tolist(), "by_step": names, "whole": names[-1], "vectors": holds.astype(int).tolist()})
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pieces()))
    return folder


def learn(folder: Path, name: str, task: str, label: str, **sections: Any) -> Path:
    data = {"train": str(folder / "rows.jsonl"), "label": label, "multi_label": True, "share": 0.25, "cache": str(folder / "cache")}
    how = {"epochs": 20, "lr": 0.05, "precision": "fp64", **sections.pop("train", {})}
    model = {"hidden": 8, "layers": 1, "bidirectional": False, "dropout": 0.0, **sections.pop("model", {})}
    train(parse({"task": task, "data": data, "model": model, "batch": {"tokens": 64}, "train": how}), run=folder / name, device="cpu")
    return folder / name


@pytest.fixture(scope="module")
def by_step(folder: Path) -> Path:
    return learn(folder, "by-step", "tagging", "by_step", train={"best": "micro_f1"})


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    how = {"class_weights": "balanced", "epochs": 3}
    return learn(folder, "whole", "classification", "whole", model={"front": "none", "pool": "last"}, train=how)


def test_labels_of_each_step_are_learned_and_predicted(folder: Path, by_step: Path) -> None:
    found = cw.evaluate(by_step, device="cpu", by=["label"])
    assert float(found["micro_f1"]) > 0.9  # type: ignore[arg-type]
    assert float(found["loss"]) < 0.5 * float(found["naive_loss"])  # type: ignore[arg-type]
    assert [row["label"] for row in found["by_label"]] == list(NAMES)  # type: ignore[attr-defined]
    rows = cw.predict(by_step, folder / "rows.jsonl", device="cpu")
    for row, piece in zip(rows, pieces(), strict=True):
        assert list(row) == ["labels", "probabilities"]
        assert len(row["labels"]) == len(piece["steps"]) == len(row["probabilities"]["low"])
        above = [[name for name in NAMES if row["probabilities"][name][step] >= 0.5] for step in range(len(row["labels"]))]
        assert row["labels"] == above
    with pytest.raises(UserError, match="predictions have a field probabilities of their own"):
        cw.predict(by_step, folder / "rows.jsonl", keep=["steps=probabilities"], device="cpu")


def test_the_loss_is_the_mean_over_steps_of_the_sum_over_labels(folder: Path, by_step: Path) -> None:
    total, count = 0.0, 0
    rows = cw.predict(by_step, folder / "rows.jsonl", device="cpu")
    for piece, row in zip(pieces(), rows, strict=True):
        shares = np.array([row["probabilities"][name] for name in NAMES]).T
        wanted = np.array(piece["vectors"])
        total -= np.log(np.where(wanted == 1, shares, 1 - shares)).sum()
        count += len(wanted)
    found = cw.evaluate(by_step, folder / "rows.jsonl", device="cpu")["loss"]
    assert found == pytest.approx(total / count, rel=1e-3)  # probabilities are rounded to six decimals


def test_labels_of_a_sequence_and_their_weights(folder: Path, whole: Path) -> None:
    found = cw.evaluate(whole, device="cpu")
    assert list(found) == ["split", "loss", "unweighted_loss", "micro_f1", "macro_f1", "exact_match", "naive_loss"]
    head = open_run(whole, "cpu").model.head
    assert head.weights is not None
    assert (head.weights > 1.0).any()  # what seldom holds weighs more where it does
    [row] = cw.predict(whole, [{"steps": pieces()[0]["steps"]}], device="cpu")
    assert list(row) == ["label", "probabilities"]
    assert row["label"] == [name for name in NAMES if row["probabilities"][name] >= 0.5]
    with pytest.raises(UserError, match=r"--top |top="):
        cw.evaluate(whole, device="cpu", top=(2,))
    with pytest.raises(UserError, match="is for one"):
        cw.evaluate(whole, device="cpu", confusion=True)


def test_vectors_come_back_as_vectors(folder: Path) -> None:
    run = learn(folder, "vectors", "tagging", "vectors", train={"epochs": 1})
    [row] = cw.predict(run, [{"steps": [[0.1, 0.2], [0.3, 0.4]]}], device="cpu")
    assert np.array(row["labels"]).shape == (2, 3)
    assert set(np.unique(row["labels"])) <= {0, 1}
    with pytest.raises(DataError, match=r"data.multi_label=false, but the codec is for true"):
        check_codec(open_run(run, "cpu").task.codec, parse({"task": "tagging"}))


def test_the_bias_begins_at_the_log_odds(folder: Path) -> None:
    run = learn(folder, "odds", "tagging", "vectors", train={"epochs": 1, "lr": 1e-12})
    saved = open_run(run, "cpu")
    rows = [row for piece in pieces() for row in piece["vectors"]]
    odds = saved.model.head.bias.detach()
    share = torch.sigmoid(odds)
    assert share.tolist() == pytest.approx(np.mean(rows, axis=0).tolist(), abs=0.06)  # a quarter of the rows is held out
    assert float(cw.evaluate(run, device="cpu")["loss"]) < 3 * math.log(2.0)  # type: ignore[arg-type]
