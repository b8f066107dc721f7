"""Snapshots from a GPU: what is copied while the device works on is what stood there at that point of its work."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from _whole_snapshots import load
from carrywave.parallel.world import World
from carrywave.runs.checkpoint.snapshot import open_stored
from carrywave.runs.checkpoint.writer import Writer
from carrywave.spec.load import parse
from carrywave.train.fit import train

pytestmark = pytest.mark.gpu


def test_the_device_works_on_while_it_is_copied(tmp_path: Path) -> None:
    device = torch.device("cuda")
    writer = Writer(World.alone(device), tmp_path)
    writer.meet()
    weights = torch.zeros(1 << 26, device=device)  # 256 MiB: some milliseconds to copy
    small = torch.zeros((), dtype=torch.int64, device=device)
    for step in range(1, 6):
        weights.fill_(step)
        small.fill_(step)
        writer.begin(f"step-{step}", {"parameters": {"w": weights}, "extra": {"s": small}}, {"step": step}, keep=1)
        for _ in range(3):  # steps that change what is being copied
            weights.add_(100)
            small.add_(100)
        assert writer.settle() is None
        found = load(tmp_path)
        assert bool((found.parameters["w"] == step).all())
        assert int(found.extra["s"]) == step
    assert all(room.is_pinned() for room in writer._memory.values())


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
    assert open_stored(tmp_path / "run" / "snapshots").folder.name == "step-00000040"
    for group in ("parameters", "optimizer", "carry"):
        for name, tensor in getattr(theirs, group).items():
            assert torch.equal(getattr(ours, group)[name], tensor), (group, name)
