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
FULL = "could not be written: No space left on device; the run continues, and the previous snapshot is kept"

# A snapshot has about 1.2 MB. The old one and the filler leave no room for another, until the filler is removed.
PROGRAM = """
set -e
cp -r run/snapshots kept
mount -t tmpfs -o size=4m tmpfs run/snapshots
cp -r kept/. run/snapshots
dd if=/dev/zero of=run/snapshots/filler bs=1k count=4096 2> /dev/null || true
"$@" > out 2> err &
until grep -q "could not be written" out; do kill -0 $! || break; sleep 0.05; done
cat run/snapshots/last > during
rm run/snapshots/filler
wait $! && echo 0 > code || echo $? > code
cp -r run/snapshots after
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
@pytest.mark.parametrize("devices", [1, 2])
def test_a_full_disk_in_mid_run(devices: int, tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("file systems cannot be mounted here")
    (tmp_path / "text.txt").write_text("the carry is passed along, and work moves through layers and time as a wave. " * 12)
    more = ["--devices", str(devices)]
    subprocess.run(train("run", 20, *more), cwd=tmp_path, check=True, capture_output=True)
    shutil.copytree(tmp_path / "run", tmp_path / "calm")
    subprocess.run(train("calm", 120, "--resume", *more), cwd=tmp_path, check=True, capture_output=True)
    command = ["unshare", "-rm", "bash", "-c", PROGRAM, "bash", *train("run", 120, "--resume", *more)]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    out, err = (tmp_path / "out").read_text(), (tmp_path / "err").read_text()
    assert ((tmp_path / "code").read_text(), err) == ("0\n", ""), out
    said = [line for line in out.splitlines() if "could not be written" in line]
    assert said
    assert all(line.endswith(FULL) for line in said), said
    assert len(set(said)) == len(said)  # once for each snapshot
    assert (tmp_path / "during").read_text() == "step-00000020\n"  # the old one stayed
    assert (tmp_path / "after" / "last").read_text() == "step-00000120\n"
    assert [path.name for path in (tmp_path / "after").glob(".*")] == []
    for name in ("weights.safetensors", "metrics.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "calm" / name).read_bytes()


# All of the run is on the small disk, and a filler takes what is left of it.
WHOLE = """
set -e
mkdir small
mount -t tmpfs -o size=2m tmpfs small
"$@" > out 2> err &
until [ -e small/run/metrics.jsonl ]; do kill -0 $! || break; sleep 0.05; done
dd if=/dev/zero of=small/filler bs=1k count=4096 2> /dev/null || true
until grep -q "keeps it in memory" out; do kill -0 $! || break; sleep 0.05; done
if [ -n "$FREE" ]; then rm small/filler; fi
wait $! && echo 0 > code || echo $? > code
cp -r small/run after
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("free", ["yes", ""])
def test_a_disk_that_is_full_for_all_of_a_run(free: str, tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("file systems cannot be mounted here")
    (tmp_path / "text.txt").write_text("the carry is passed along, and work moves through layers and time as a wave. " * 12)
    small = ["train.max_steps=200", "model.hidden=16", "train.log_every=1"]
    command = train("small/run", 200, *small)
    command = ["unshare", "-rm", "bash", "-c", WHOLE, "bash", *command]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "PYTHONUNBUFFERED": "1", "FREE": free})
    out, err = (tmp_path / "out").read_text(), (tmp_path / "err").read_text()
    code = int((tmp_path / "code").read_text())
    assert out.count("; the run continues, and keeps it in memory; free disk space") == 1, out
    if not free:
        assert code == 74, err
        assert re.fullmatch(r"carrywave: .* could not be written: No space left on device; .*free disk space.*\n", err)
        return
    assert (code, err) == (0, ""), out
    assert "small/run: all that was kept in memory is written" in out
    subprocess.run(train("calm", 200, *small), cwd=tmp_path, check=True, capture_output=True)
    for name in ("weights.safetensors", "metrics.jsonl"):
        assert (tmp_path / "after" / name).read_bytes() == (tmp_path / "calm" / name).read_bytes()
    rows = {name: (tmp_path / name / "timing.jsonl").read_text().count("\n") for name in ("after", "calm")}
    assert rows["after"] == rows["calm"]
