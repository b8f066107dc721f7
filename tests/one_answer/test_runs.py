"""Small runs through the command line: what they have learned is written down here, and does not depend on plan, device or stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _runs import CHARACTERS, RUNS, SMALL, carrywave, last, rows, write_data

# Loss of train and valid at the end. In float64, x86 and ARM differ by some units in the last place of each function, 1e-16, which a few
# dozen steps at these rates magnify to far less than 1e-6.
LOSSES = {
    "characters": (2.2024763645173535, 2.0921574225554544),
    "words": (2.7691592217550682, 2.767994971262962),
    "signals": (0.7055114844847205, 0.7688317603120995),
    "gru": (0.695472874120164, 0.759504164892083),
    "texts": (0.6699556068473176, 0.192878696424147),
    "tags": (0.635974315946039, 0.6690072106740477),
    "numbers": (0.6703897712295166, 0.10767651003244078),
    "transcripts": (2.4341693252156364, 2.527769136718053),
    "forecasts": (0.7726763545591299, 1.3313828747503271),
    "quantiles": (0.1636478803571764, 0.29347779843385313),
}
START = [sys.executable, "-m", "carrywave", "train"]
LONG = (*CHARACTERS, *SMALL, "model.layers=2", "model.dropout=0.3", "train.epochs=12", "train.snapshot_every=50", "train.log_every=20")
DEADLINE_SECONDS = 120


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_data(tmp_path)


@pytest.mark.parametrize("run", RUNS)
def test_a_run_learns_what_is_written_here(run: str) -> None:
    assert carrywave("train", *RUNS[run], *SMALL, "--run", "run") == 0
    assert (last("run", "train"), last("run", "valid")) == pytest.approx(LOSSES[run], rel=1e-6)


@pytest.mark.parametrize(
    ("run", "plan"),
    [
        ("characters", ["plan.chunk_steps=3", "plan.recompute=twice"]),
        ("tags", ["plan.micro_batches=2"]),
        pytest.param("characters", ["--devices", "2"], marks=pytest.mark.slow),
        pytest.param("texts", ["--devices", "2"], marks=pytest.mark.slow),
        pytest.param("characters", ["--devices", "2", "plan.stages=2", "plan.chunk_steps=5"], marks=pytest.mark.slow),
        pytest.param("forecasts", ["--devices", "2", "plan.stages=2"], marks=pytest.mark.slow),
    ],
)
def test_another_plan_learns_the_same(run: str, plan: list[str]) -> None:
    command = [*START, *RUNS[run], *SMALL, *plan, "--run", "run"]
    if "--devices" in plan:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=DEADLINE_SECONDS)
    else:
        assert carrywave(*command[3:]) == 0
    assert (last("run", "train"), last("run", "valid")) == pytest.approx(LOSSES[run], rel=1e-6)


def test_what_a_run_keeps_is_its_best_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    """An evaluation in a process of its own, of the weights that it wrote, is the one that chose them."""
    assert carrywave("train", *RUNS["tags"], *SMALL, "data.valid=tags.jsonl", "--run", "run") == 0
    assert carrywave("evaluate", "run", "--data", "tags.jsonl", "--json", "found.json", "--device", "cpu") == 0
    best = min(row["loss"] for row in rows("run") if row["split"] == "valid")
    assert f"{best:.3f}"[:-1] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ([], signal.SIGKILL),
        pytest.param([], signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(["--devices", "2"], signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(["--devices", "2", "plan.stages=2", "plan.chunk_steps=5"], signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(["--devices", "2"], signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="kills a group of processes")
@pytest.mark.timeout(400)
def test_a_run_that_is_stopped_and_goes_on_ends_with_the_same_bytes(words: list[str], number: int) -> None:
    if words:
        subprocess.run([*START, *LONG, *words, "--run", "calm"], check=True, stdin=subprocess.DEVNULL, timeout=DEADLINE_SECONDS)
    else:
        assert carrywave(*START[3:], *LONG, "--run", "calm") == 0
    process = subprocess.Popen([*START, *LONG, *words, "--run", "stopped"], start_new_session=True, stdin=subprocess.DEVNULL)
    begun = time.monotonic()
    while process.poll() is None and time.monotonic() - begun < DEADLINE_SECONDS:
        if len(list(Path("stopped/snapshots").glob("step-*"))) >= 2:
            os.killpg(process.pid, number) if number == signal.SIGKILL else process.send_signal(number)
            break
        time.sleep(0.01)
    code = process.wait(DEADLINE_SECONDS)
    assert code == (-9 if number == signal.SIGKILL else 75)
    done = rows("stopped")
    assert 0 < len(done) < len(rows("calm"))  # in the middle of it
    if words:
        subprocess.run([*START, *LONG, *words, "--run", "stopped", "--resume"], check=True, timeout=DEADLINE_SECONDS)
    else:
        assert carrywave(*START[3:], *LONG, "--run", "stopped", "--resume") == 0
    ours, theirs = (contents(Path(run)) for run in ("stopped", "calm"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def contents(run: Path) -> dict[str, bytes]:
    """Weights, metrics and the tensors of the last snapshot."""
    final = run / "snapshots" / (run / "snapshots" / "last").read_text().strip()
    files = [run / "weights.safetensors", run / "metrics.jsonl", final.with_name(f"{final.name}.safetensors")]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}
