"""A disk that is really full in mid-run: a small tmpfs under the snapshots of a run, in a mount namespace of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SPEC = [
    "data.train=text.txt",
    "data.tokens=char",
    "model.hidden=64",
    "model.layers=2",
    "model.dropout=0.3",
    "batch.lanes=4",
    "batch.steps=8",
]
SPEC += ["train.optimizer=adam", "train.epochs=100", "train.snapshot_every=10", "train.log_every=5", "train.keep=1"]
FULL = r"carrywave: .*could not be written: No space left on device; .*free disk space.*, then try again\n"

# A snapshot has about 1.2 MB. The old one and the filler leave no room for another.
SNAPSHOTS = """
set -e
cp -r run/snapshots kept
mount -t tmpfs -o size=4m tmpfs run/snapshots
cp -r kept/. run/snapshots
dd if=/dev/zero of=run/snapshots/filler bs=1k count=4096 2> /dev/null || true
"$@" > out 2> err && echo 0 > code || echo $? > code
cat run/snapshots/last > during
rm run/snapshots/filler
"$@"
cp -r run/snapshots after
"""

# All of the run is on the small disk, and a filler takes what is left of it while it trains.
WHOLE = """
set -e
mkdir small
mount -t tmpfs -o size=2m tmpfs small
"$@" > out 2> err &
until [ -e small/run/metrics.jsonl ]; do kill -0 $! || break; sleep 0.05; done
dd if=/dev/zero of=small/filler bs=1k count=4096 2> /dev/null || true
wait $! && echo 0 > code || echo $? > code
rm small/filler
"$@"
cp -r small/run after
"""


def can_mount() -> bool:
    try:
        return subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0
    except OSError:
        return False


def train(run: str, steps: int, *words: str) -> list[str]:
    return [sys.executable, "-m", "carrywave", "train", *SPEC, f"train.max_steps={steps}", "--device", "cpu", "--run", run, *words]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("where", "devices"), [("snapshots", 1), ("snapshots", 2), ("whole", 1)])
def test_a_full_disk_ends_the_run_which_resumes(where: str, devices: int, tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("file systems cannot be mounted here")
    (tmp_path / "text.txt").write_text("the carry is passed along, and work moves through layers and time as a wave. " * 12)
    more = ["--devices", str(devices), *(["model.hidden=16", "train.log_every=1"] if where == "whole" else [])]
    run = "small/run" if where == "whole" else "run"
    if where == "snapshots":
        subprocess.run(train("run", 20, *more), cwd=tmp_path, check=True, capture_output=True)
        shutil.copytree(tmp_path / "run", tmp_path / "calm")
    command = ["unshare", "-rm", "bash", "-c", WHOLE if where == "whole" else SNAPSHOTS, "bash", *train(run, 200, "--continue", *more)]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}, capture_output=True)
    err = (tmp_path / "err").read_text()
    assert (tmp_path / "code").read_text() == "74\n", err
    assert re.fullmatch(FULL, err), err
    if where == "snapshots":
        assert (tmp_path / "during").read_text() == "step-00000020\n"  # the old one stayed
        assert [path.name for path in (tmp_path / "after").glob(".*")] == []
    ours = tmp_path / ("after" if where == "whole" else "run")
    subprocess.run(train("calm", 200, "--continue", *more), cwd=tmp_path, check=True, capture_output=True)
    for name in ("weights.safetensors", "metrics.jsonl"):
        assert (ours / name).read_bytes() == (tmp_path / "calm" / name).read_bytes()
