"""Hosts without a folder in common, and runs in a store: killed at random moments, they end with the bytes of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import _disturbed_run as disturbed_run
import carrywave
from _disturbed_run import SPEC, RunSetup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

APART = (str(Path(__file__).with_name("_apart.py")),)


@pytest.mark.parametrize(("case", "kills"), [(disturbed_run.REPLICAS, 6), (disturbed_run.STAGES, 6)], ids=["replicas", "stages"])
def test_kills_without_a_shared_folder_do_not_change_the_answer(case: RunSetup, kills: int, tmp_path: Path) -> None:
    case = replace(case, steps=100)
    disturbed_run.write_data(tmp_path)
    assert disturbed_run.calm(tmp_path, case).code == 0
    told = disturbed_run.disturbed(tmp_path, case, kills, seed=kills, program=APART)
    assert told.code == 0, told.lines
    assert told.restarts == kills
    assert "does not share it, so the parts of 1 of 2 workers go there over the network" in told.out
    ours, theirs = (disturbed_run.contents(tmp_path / run) for run in ("disturbed", "calm"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert not list((tmp_path / "disturbed" / "snapshots").glob(".*"))  # no draft is left
    assert sorted(path.name for path in (tmp_path / "host-1").iterdir()) == ["cache", "rows.jsonl"]
    left = list((tmp_path / "host-1" / "cache").glob(".draft-snapshot-*"))
    assert len(left) <= kills  # of workers that were killed while they received one; the cache removes them after a week


def command(folder: Path, host: int, *words: str) -> subprocess.Popen[str]:
    """A run of one worker in a store, on a host with a cache of its own."""
    given = [*SPEC, "train.max_steps=60", "train.epochs=1000000", "--device", "cpu", "--run", f"file://{folder}/store/run", *words]
    source = str(Path(carrywave.__file__).parents[1])
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": source, "CARRYWAVE_CACHE": str(folder / f"cache-{host}")}
    return subprocess.Popen(
        [sys.executable, "-m", "carrywave", "train", *given],
        cwd=folder,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_run_in_a_store_goes_on_on_another_host_wherever_it_was_killed(tmp_path: Path) -> None:
    """Every host has nothing but the store; each is killed at a random moment after its first upload, and the next one goes on."""
    disturbed_run.write_data(tmp_path)
    draw = random.Random(3)
    killed = 0
    for host in range(8):
        store = tmp_path / "store" / "run"
        again = (store / "spec.yaml").exists()
        before = _changes(store)
        process = command(tmp_path, host, *["--resume"] * again)
        kills = host < 7
        while kills and process.poll() is None and _changes(store) <= before + draw.randrange(6):
            time.sleep(0.001)
        if kills and process.poll() is None:
            time.sleep(draw.uniform(0.0, 0.3))
            process.send_signal(signal.SIGKILL)
            killed += 1
        out, _ = process.communicate(timeout=600)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, out
    assert process.returncode == 0, out
    assert killed >= 3
    (tmp_path / "calm").mkdir()
    disturbed_run.write_data(tmp_path / "calm")
    calm = command(tmp_path / "calm", 0)
    out, _ = calm.communicate(timeout=600)
    assert calm.returncode == 0, out
    ours, theirs = (disturbed_run.contents(folder / "store" / "run") for folder in (tmp_path, tmp_path / "calm"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def _changes(store: Path) -> int:
    """A number that grows with every snapshot in the store."""
    last = store / "snapshots" / "last"
    return int(last.read_text().strip().rpartition("-")[2]) if last.exists() else 0
