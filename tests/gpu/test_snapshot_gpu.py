"""Snapshots from a GPU: a run goes on from one to the bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from _whole_snapshots import load
from carrywave.runs.checkpoint.snapshot import last
from carrywave.spec.load import parse
from carrywave.train.fit import train

pytestmark = pytest.mark.gpu


def test_a_run_goes_on_in_mid_epoch(tmp_path: Path) -> None:
    draw = random.Random(1)
    (tmp_path / "text.txt").write_text("".join(draw.choice("abcdefgh ") for _ in range(20_000)))
    keys = {"epochs": 1, "precision": "fp32", "optimizer": "adam", "schedule": "constant", "snapshot_every": 10}
    spec = {
        "data": {"train": str(tmp_path / "text.txt"), "tokens": "char"},
        "model": {"hidden": 32, "layers": 2, "dropout": 0.2},
        "batch": {"lanes": 16, "steps": 16},
    }
    train(parse({**spec, "train": keys | {"max_steps": 40}}), run=tmp_path / "through", device="cuda")
    train(parse({**spec, "train": keys | {"max_steps": 23}}), run=tmp_path / "run", device="cuda")
    train(parse({**spec, "train": keys | {"max_steps": 40}}), run=tmp_path / "run", resume=True, device="cuda")
    ours, theirs = (load(tmp_path / name / "snapshots") for name in ("run", "through"))
    assert last(tmp_path / "run" / "snapshots").stem == "step-00000040"
    for group in ("parameters", "optimizer", "carry"):
        for name, tensor in getattr(theirs, group).items():
            assert torch.equal(getattr(ours, group)[name], tensor), (group, name)
