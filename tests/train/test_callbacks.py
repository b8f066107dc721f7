"""Callbacks are told what happens, in order; may end a run; and do not change what it computes."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import carrywave as cw
from carrywave.errors import UserError

SEQUENCES = [([[float(up), float(step)] for step in range(4)], "up" if up else "down") for up in [0, 1] * 10]
HOW: dict[str, Any] = {"task": "classification", "batch": {"tokens": 40}}


class Noting(cw.Callback):
    """Notes everything, and asks to stop where it is told to."""

    def __init__(self, stop: Callable[[str, cw.Moment], bool] = lambda event, at: False) -> None:
        self.seen: list[tuple[str, cw.Moment]] = []
        self.stop = stop

    def on_step(self, at: cw.Moment) -> bool:
        assert math.isfinite(at.loss)
        return self._note("step", at)

    def on_evaluation(self, at: cw.Moment) -> bool:
        return self._note(at.split, at)

    def on_epoch(self, at: cw.Moment) -> bool:
        return self._note("epoch", at)

    def _note(self, event: str, at: cw.Moment) -> bool:
        self.seen.append((event, at))
        return self.stop(event, at)

    @property
    def events(self) -> list[str]:
        return [event for event, _ in self.seen]


def fit(run: Path, *callbacks: cw.Callback, epochs: int = 2, **how: Any) -> Any:
    data = {"train": SEQUENCES, "valid": SEQUENCES[:4], "test": SEQUENCES[4:8]}
    return cw.fit(
        {"hidden": 4, "layers": 1}, data, **HOW, train={"epochs": epochs, "schedule": "constant"}, run=run, callbacks=callbacks, **how
    )


def test_what_happens_is_told_in_order_and_changes_nothing(tmp_path: Path) -> None:
    noting = Noting()
    fit(tmp_path / "told", noting)
    fit(tmp_path / "plain")
    assert noting.events == [*["step"] * 2, "valid", "epoch", *["step"] * 2, "valid", "epoch", "valid", "test"]
    assert [at.step for event, at in noting.seen if event == "step"] == [1, 2, 3, 4]
    assert [at.epoch for event, at in noting.seen if event == "epoch"] == [1, 2]
    for name in ("metrics.jsonl", "weights.safetensors"):
        assert (tmp_path / "told" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "told/metrics.jsonl").read_text().splitlines()]
    for (_, at), row in zip([each for each in noting.seen if each[0] == "valid"], [r for r in rows if r["split"] == "valid"], strict=True):
        assert (at.metrics["accuracy"], at.loss, at.step) == (row["accuracy"], row["loss"], row["step"])


@pytest.mark.parametrize(("event", "step", "epochs"), [("step", 3, 2), ("valid", 2, 1), ("epoch", 2, 1)])
def test_any_of_them_may_end_the_run(event: str, step: int, epochs: int, tmp_path: Path) -> None:
    noting = Noting(lambda seen, at: seen == event and at.step == step)
    result = fit(tmp_path / "run", noting, epochs=5)
    assert (result.ending, noting.seen[-1][0], noting.seen[-1][1].step) == ("callback", "test", step)
    assert set(result.metrics) == {"valid", "test"}
    assert re.fullmatch(r"Result\(run='.*run', ending='callback', valid loss [\d.]+, test loss [\d.]+\)", repr(result))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["split"] == "valid"][-1] == step  # it was evaluated where it ended
    assert max(row["epoch"] for row in rows) == epochs


def test_a_run_that_a_callback_ended_stays_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path / "run", Noting(lambda event, at: event == "step"), epochs=5)
    again = Noting()
    assert fit(tmp_path / "run", again, epochs=5, resume=True).ending == "callback"
    assert again.events == ["valid", "test"]
    assert "a callback ended the run at step 1; start a new run with init=..." in caplog.text


def test_an_error_in_a_callback_ends_the_run_in_one_line(tmp_path: Path) -> None:
    def fail(event: str, at: cw.Moment) -> bool:
        raise ValueError("two\nlines")

    with pytest.raises(UserError, match=r"^Noting\.on_step raised ValueError: two lines at step 1; correct the callback") as told:
        fit(tmp_path / "run", Noting(fail))
    assert isinstance(told.value.__cause__, ValueError)


class OfKeras(cw.Callback):
    def on_epoch_end(self, epoch: int) -> None: ...


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (OfKeras(), "OfKeras.on_epoch_end would never be called; callbacks have on_step, on_evaluation, on_epoch"),
        (Noting, r"write Noting\(\)"),
        (print, "derive it from cw.Callback"),
    ],
)
def test_what_would_never_be_called_is_refused(given: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        fit(tmp_path / "run", given)
    assert not (tmp_path / "run").exists()


SCRIPT = """
import json, os, sys
import carrywave as cw
import carrywave.errors

rank = int(os.environ.get("RANK", 0))
stop, fail, sync = json.loads(sys.argv[1])


class Stops(cw.Callback):
    def on_step(self, at):
        open(f"called-{rank}", "a").write(f"{at.step} ")
        if at.step == fail:
            raise ValueError("bad day")
        return at.step == stop


sequences = [([[float(up), float(step)] for step in range(4)], "up" if up else "down") for up in [0, 1] * 40]
how = {"task": "classification", "batch": {"tokens": 32}}
train = {"epochs": 2, **sync}
plan = {} if len(sys.argv) < 3 else {"plan": json.loads(sys.argv[2])}
try:
    result = cw.fit({"hidden": 4, "layers": 2}, sequences, **how, train=train, run="run", callbacks=[Stops()], device="cpu", **plan)
    print(rank, result.ending)
except cw.errors.UserError as error:
    print(rank, error)
"""


def under_torchrun(folder: Path, *words: Any) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    return subprocess.run([*command, *map(json.dumps, words)], cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"replicas": 2}, {"stages": 2, "chunk_steps": 2}])
def test_all_workers_end_at_the_step_at_which_one_would(plan: dict[str, int], tmp_path: Path) -> None:
    ended = under_torchrun(tmp_path / "two", [5, None, {}], plan)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["0 callback", "1 callback"]
    assert (tmp_path / "two/called-0").read_text() == "1 2 3 4 5 "
    assert not (tmp_path / "two/called-1").exists()
    (tmp_path / "one").mkdir()
    (tmp_path / "one/script.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "script.py", json.dumps([5, None, {}])], cwd=tmp_path / "one", check=True, capture_output=True)
    texts = ((tmp_path / name / "run/metrics.jsonl").read_text() for name in ("one", "two"))
    one, two = ([json.loads(line) for line in text.splitlines()] for text in texts)
    assert [(row["split"], row["step"]) for row in one] == [(row["split"], row["step"]) for row in two]
    # The order of summation in float32 differs between plans.
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-5)


@pytest.mark.slow
def test_replicas_that_train_on_their_own_end_at_their_next_meeting(tmp_path: Path) -> None:
    ended = under_torchrun(tmp_path / "two", [5, None, {"sync": "local", "sync_every": 4}])
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "two/called-0").read_text().split()[-1] == "8"
