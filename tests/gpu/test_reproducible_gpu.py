"""With `train.reproducible` whole runs on the GPU are the same to the byte, on one worker and on two and four that share it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import carrywave

pytestmark = pytest.mark.gpu

LANGUAGE: dict[str, Any] = {
    "data": {"train": "text.txt", "tokens": "char"},
    "model": {"hidden": 128, "layers": 2, "dropout": 0.3, "tie": True},
    "batch": {"lanes": 24, "steps": 16},
    "train": {"lr": 0.01, "clip": 0.5, "epochs": 2, "log_every": 5, "schedule": "plateau", "reproducible": True},
}
REGRESSION: dict[str, Any] = {
    "task": "regression",
    "data": {"train": "rows.jsonl"},
    "model": {"hidden": 64, "layers": 2, "dropout": 0.2, "pool": "mean"},
    "batch": {"tokens": 96},
    "train": {"lr": 0.01, "epochs": 3, "log_every": 3, "accumulate": 2, "reproducible": True},
}


def trained(folder: Path, name: str, devices: int) -> list[str]:
    """Digests of what a run leaves."""
    # Threads are the run's own affair, and so is the workspace of cuBLAS.
    left_out = ("OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "RANK", "WORLD_SIZE")
    variables = {key: value for key, value in os.environ.items() if key not in left_out}
    variables["PYTHONPATH"] = os.pathsep.join([str(Path(carrywave.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    run = folder / f"{name}-{devices}"
    command = [sys.executable, "-m", "carrywave", "train", f"{name}.yaml", "--device", "cuda", "--devices", str(devices), "--run", str(run)]
    ended = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    assert ended.returncode == 0, ended.stderr
    print(next(line for line in ended.stdout.splitlines() if line.startswith("reproducible: ")))
    return [hashlib.sha256((run / file).read_bytes()).hexdigest() for file in ("weights.safetensors", "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["language", "regression"])
def test_whole_runs_are_equal_to_the_byte(name: str, precision: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 200)
    rows = [[[(7 * row + 3 * step) % 11 / 5 - 1, (5 * row + step) % 7 / 3 - 1] for step in range(1 + row % 12)] for row in range(120)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"steps": steps, "label": sum(map(sum, steps))}) for steps in rows))
    spec = LANGUAGE if name == "language" else REGRESSION
    (tmp_path / f"{name}.yaml").write_text(json.dumps(spec | {"train": spec["train"] | {"precision": precision}}))
    alone = trained(tmp_path, name, 1)
    assert alone == trained(tmp_path, name, 2)
    assert alone == trained(tmp_path, name, 4)
