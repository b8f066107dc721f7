"""`train.ema` in a whole run: what is evaluated, kept as the best weights, evaluated again later, and exported is the average."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.exporting.run_export import export_run
from carrywave.prediction.evaluate import evaluate_run
from carrywave.spec.load import parse
from carrywave.step.result import StepResult
from carrywave.step.trainer import Trainer
from carrywave.train.fit import train

DECAY = 0.8


def test_a_run_evaluates_keeps_and_exports_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "train.txt"
    text.write_text("the carry goes on, and on, and the wave goes with it\n" * 20)
    seen: list[dict[str, Tensor]] = []
    plain = Trainer.update

    def update(self: Trainer, *batches: Batch) -> StepResult:
        result = plain(self, *batches)
        seen.append({name: tensor.clone() for name, tensor in self.parameters().items()})
        return result

    monkeypatch.setattr(Trainer, "update", update)
    spec = {
        "data": {"train": str(text), "valid": str(text)},
        "model": {"hidden": 8},
        "batch": {"lanes": 4, "steps": 16},
        "train": {"lr": 0.1, "ema": DECAY, "evaluate_every": 3, "max_steps": 12, "precision": "fp64", "optimizer": "adamw"},
    }
    train(parse(spec), run=tmp_path / "run", device="cpu")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    best = min((row for row in rows if row["split"] == "valid"), key=lambda row: row["loss"])
    assert best["step"] > 3
    until = seen[: best["step"]]
    shares = torch.tensor([DECAY ** (len(until) - 1 - place) for place in range(len(until))], dtype=torch.float64)
    kept = load_file(tmp_path / "run" / "weights.safetensors")
    for name, tensor in kept.items():
        wanted = sum(share * each[name] for share, each in zip(shares, until, strict=True)) / shares.sum()
        torch.testing.assert_close(tensor, wanted, rtol=1e-11, atol=1e-13)  # float64; a running mean rounds at each step
        assert not torch.allclose(tensor, until[-1][name])
    assert evaluate_run(tmp_path / "run", text, "cpu")["loss"] == pytest.approx(best["loss"], rel=1e-12)
    exported = load_file(export_run(tmp_path / "run", "safetensors", tmp_path / "out").folder / "model.safetensors")
    assert torch.equal(exported["lstm.weight_hh_l0"], kept["lstm.weight_hh_l0"])
