"""Runs of transcription from files and from Python: they learn, evaluate, predict, report, and refuse what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import carrywave as cw
from carrywave.errors import DataError, RunError, UserError
from carrywave.model.heads.ctc import Ctc
from carrywave.spec.load import parse
from carrywave.train.fit import train

SOUNDS = {"a": ["A"], "b": ["B"], "x": ["K", "S"], "h": []}
QUICK = {"model": {"hidden": 16, "layers": 1, "upsample": 4}, "batch": {"tokens": 256}, "train": {"lr": 0.02, "epochs": 12, "warmup": 0}}


def words(number: int, seed: int = 1) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    texts = ["".join(draw.choice(list(SOUNDS), size=int(draw.integers(1, 5)))) for _ in range(number)]
    return [{"text": text, "labels": [sound for letter in text for sound in SOUNDS[letter]]} for text in texts]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transcription")
    data = {name: written(folder / f"{name}.jsonl", words(number, number)) for name, number in (("train", 300), ("test", 40))}
    train(parse({"task": "transcription", "data": data, **QUICK}), run=folder / "run", device="cpu")
    return folder


def test_a_run_learns_and_its_figures_come_again(folder: Path) -> None:
    logged = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    [test] = [row for row in logged if row["split"] == "test"]
    assert test["label_error"] < 0.02
    found = cw.evaluate(folder / "run", device="cpu")
    assert {name: found[name] for name in ("loss", "label_error", "sequence_error")} == pytest.approx(
        {name: test[name] for name in ("loss", "label_error", "sequence_error")}, rel=1e-6
    )


@pytest.mark.parametrize("beam", [None, 4])
def test_predictions_are_lists_of_labels_with_their_probability(folder: Path, beam: int | None) -> None:
    rows = words(30, seed=7)
    found = cw.predict(folder / "run", [{"text": row["text"]} for row in rows], beam=beam, device="cpu")
    right = [guess["labels"] == row["labels"] for guess, row in zip(found, rows, strict=True)]
    assert sum(right) >= 29
    assert all(0.0 < guess["probability"] <= 1.0 for guess in found)
    assert min(guess["probability"] for guess, met in zip(found, right, strict=True) if met) > 0.3


def test_what_cannot_be_predicted_is_refused(folder: Path) -> None:
    rows = [{"text": "ab"}]
    with pytest.raises(UserError, match=r"beam.* is at least 1; change it"):
        cw.predict(folder / "run", rows, beam=0, device="cpu")
    with pytest.raises(UserError, match="chooses whole sequences of labels, which have no average"):
        cw.predict([folder / "run", folder / "run"], rows, device="cpu")
    with pytest.raises(UserError, match="a stepper gives its answer before the sequence ends"):
        cw.stepper(folder / "run", device="cpu")


def test_texts_have_characters_as_labels_and_come_back_as_texts() -> None:
    rows = words(200)
    steps = [np.eye(4)[[list(SOUNDS).index(letter) for letter in row["text"]]] for row in rows]
    texts = ["".join(row["labels"]).lower() for row in rows]
    result = cw.fit(QUICK["model"], (steps, texts), task="transcription", batch=QUICK["batch"], train={**QUICK["train"], "epochs": 25})
    found = cw.predict(result.run, steps[:20])
    assert sum(row["labels"] == text for row, text in zip(found, texts, strict=False)) >= 17
    assert json.loads((Path(result.run) / "codec.json").read_text())["text_labels"] is True


def test_numbers_are_labels_too_and_strides_shorten_what_is_transcribed() -> None:
    draw = np.random.default_rng(3)
    kinds = [draw.integers(0, 3, size=int(draw.integers(1, 4))) for _ in range(120)]
    # Each label lasts for several frames, with silence between them.
    frames = [np.concatenate([np.r_[np.tile(np.eye(3)[kind], (5, 1)), np.zeros((3, 3))] for kind in each]) for each in kinds]
    model = {"hidden": 16, "layers": 1, "front": [{"channels": 8, "kernel": 3, "stride": 2}]}
    how = {"batch": {"tokens": 512}, "train": {"lr": 0.02, "epochs": 20, "warmup": 0}}
    result = cw.fit(model, (frames, kinds), task="transcription", **how)
    found = cw.predict(result.run, frames[:20])
    assert sum(row["labels"] == each.tolist() for row, each in zip(found, kinds, strict=False)) >= 17


def test_a_users_own_head_has_a_loss_and_no_error_rates(tmp_path: Path) -> None:
    class Own(nn.Module):
        pooled = reads_whole = True

        def __init__(self) -> None:
            super().__init__()
            self.ctc = Ctc(8, 4, upsample=4)

        def forward(self, y: Tensor, lengths: Tensor) -> Tensor:
            out: Tensor = self.ctc(y, lengths)
            return out

        def loss(self, y: Tensor, target: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            return self.ctc.loss(y, target, lengths)

    data = written(tmp_path / "train.jsonl", words(60))
    tokens = len(set("".join(row["text"] for row in words(60))))
    model = cw.Model(nn.Embedding(tokens, 6), cw.LSTM(6, 8), Own())
    result = cw.fit(model, data, task="transcription", batch={"tokens": 64}, train={"max_steps": 2, "precision": "fp32"})
    assert result.metrics["valid"].keys() == {"loss"}
    with pytest.raises(RunError, match="head Own is your own, and which labels its outputs stand for is not known; call it yourself"):
        cw.predict(result.run, [{"text": "ab"}], model=cw.Model(nn.Embedding(tokens, 6), cw.LSTM(6, 8), Own()))


def test_labels_that_do_not_fit_stop_a_run_before_it_begins(tmp_path: Path) -> None:
    data = {"train": written(tmp_path / "rows.jsonl", [{"text": "x", "labels": ["K", "S"]}] * 4), "share": 0.0}
    with pytest.raises(DataError, match=r"train: 4 of 4 sequences have more labels than the model has answers: sequence 0 \(K S\) needs 2"):
        train(parse({"task": "transcription", "data": data}), run=tmp_path / "run", device="cpu")
