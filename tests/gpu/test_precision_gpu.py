"""`train.precision: auto` on the GPU that is here: what suits it is what the run holds, and what a plan without torch expects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

import carrywave as cw
from carrywave.launch import hardware
from carrywave.spec.load import parse
from carrywave.step.precision import made_for_bf16
from carrywave.train.fit import train

pytestmark = pytest.mark.gpu


def test_auto_is_bf16_where_the_gpu_is_made_for_it(tmp_path: Path) -> None:
    expected = "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp32"
    assert made_for_bf16(torch.device("cuda")) == (expected == "bf16")
    assert hardware.made_for_bf16("cuda") == (expected == "bf16")
    (tmp_path / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 8)
    spec = {"data": {"train": str(tmp_path / "text.txt")}, "batch": {"lanes": 4, "steps": 8}, "train": {"max_steps": 3}}
    train(parse(spec), run=tmp_path / "run", device="cuda")
    assert yaml.safe_load((tmp_path / "run" / "spec.yaml").read_text())["train"]["precision"] == expected
    train(parse({**spec, "train": {"max_steps": 4}}), run=tmp_path / "run", resume=True, device="cuda")


def test_a_forecast_in_bf16_is_not_rounded(tmp_path: Path) -> None:
    rows = "\n".join(f"{number},{number % 7}" for number in range(200))
    (tmp_path / "rows.csv").write_text(f"t,y\n{rows}\n")
    found = cw.fit(
        {"hidden": 8, "layers": 1},
        str(tmp_path / "rows.csv"),
        task="forecasting",
        data={"horizon": 3, "split": [0.6, 0.2, 0.2]},
        batch={"lanes": 2, "steps": 8},
        train={"max_steps": 3, "precision": "bf16"},
        run=tmp_path / "run",
        device="cuda",
    )
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        out = found.model.head(torch.randn(5, 2, 8, device=found.model.head.weight.device))
    assert out.dtype == torch.float32
    assert not torch.equal(out, out.bfloat16().float())
