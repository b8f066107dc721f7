"""Weights that every worker draws for itself: replicas begin alike, even if their hosts round differently."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from _warm import start

# Linear algebra libraries round differently from one processor, or number of threads, to another.
PROGRAM = """
    import os
    import sys

    import torch
    from safetensors.torch import save_file

    import carrywave as cw
    from carrywave.model import initialization

    rank, stages = int(os.environ["RANK"]), int(sys.argv[2])
    drawn = initialization._orthogonal
    initialization._orthogonal = lambda block: drawn(block) * (1 + 1e-6 * rank)
    spec = {
        "data": {"train": "text.txt", "tokens": "char"},
        "batch": {"lanes": 4, "steps": 5},
        "train": {"max_steps": 2, "epochs": 1, "optimizer": "sgd", "lr": 1e-30},
        "plan": {"stages": stages},
    }
    os.chdir(sys.argv[1])
    result = cw.fit({"hidden": 6, "layers": 2, "init": "orthogonal"}, None, spec=spec, run="run", device="cpu")
    if rank == 0:
        save_file({name: tensor.clone() for name, tensor in result.model.state_dict().items()}, "found.safetensors")
"""


@pytest.mark.parametrize(("workers", "stages"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_replicas_begin_alike_though_their_hosts_round_differently(
    write: Callable[[str, str], str], tmp_path: Path, workers: int, stages: int
) -> None:
    (tmp_path / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 6)
    ended = start([sys.executable, write("program.py", PROGRAM), str(tmp_path), str(stages)], workers)
    assert ended.code == 0, ended
    found = load_file(tmp_path / "found.safetensors")["lstm.weight_hh_l0"].double()
    if stages == 1:  # they are those of rank 0
        block = found[:6]
        torch.testing.assert_close(block @ block.T, torch.eye(6, dtype=torch.float64), rtol=0, atol=5e-7)
