"""Copies of metrics.jsonl in trackers: complete, continued after a resume, and never the reason that a run fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import carrywave as cw
from carrywave.errors import SpecError, one_line
from carrywave.runs.tracking import tracking
from carrywave.runs.tracking.tracker import Description, NotFound, Row, values_of
from carrywave.runs.tracking.tracking import Tracking
from carrywave.spec.load import parse

SEQUENCES = [([[float(up), float(step)] for step in range(4)], "up" if up else "down") for up in [0, 1] * 10]


class Fake:
    """A tracker that keeps what it gets."""

    def __init__(self, *, fails: str = "", holds: threading.Event | None = None) -> None:
        self.opened: list[str | None] = []
        self.steps: list[int] = []
        self.closed: list[str] = []
        self.fails, self.holds = fails, holds

    def open(self, known: str | None) -> str:
        if self.fails == "open":
            raise ConnectionError("no route\nto host.")
        if self.fails == "forgets" and known is not None:
            raise NotFound(known)
        self.opened.append(known)
        return "record-1" if known is None else known

    def send(self, rows: Sequence[Row]) -> None:
        if self.fails == "exit":
            raise SystemExit(3)
        if self.fails == "send":
            raise ConnectionError("gone")
        if self.holds is not None:
            self.holds.wait()
        self.steps += [row["step"] for row in rows]

    def close(self, how: str) -> None:
        self.closed.append(how)


def write(metrics: Path, *steps: int) -> int:
    with metrics.open("a") as file:
        for step in steps:
            file.write(json.dumps({"split": "train", "step": step, "loss": 0.5}) + "\n")
    return metrics.stat().st_size


def copied(metrics: Path, fake: Fake, *steps: int) -> list[str]:
    """Have these rows copied in one attempt of a run; returns what was said."""
    said: list[str] = []
    with Tracking({"fake": fake}, metrics, said.append) as trackers:
        for step in steps:
            write(metrics, step)
            trackers.wake()
    return said


def test_every_row_is_copied_once_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    metrics, fake = tmp_path / "metrics.jsonl", Fake()
    assert copied(metrics, fake, 1, 2, 3) == []
    write(metrics, 4)  # written, but the process was killed before it was copied
    assert copied(metrics, fake, 5) == []
    assert (fake.opened, fake.steps, fake.closed) == ([None, "record-1"], [1, 2, 3, 4, 5], ["finished", "finished"])


def test_rows_that_are_taken_back_are_copied_again(tmp_path: Path) -> None:
    metrics, fake = tmp_path / "metrics.jsonl", Fake()
    kept = write(metrics, 1)
    copied(metrics, fake, 2, 3)
    with metrics.open("r+b") as file:
        file.truncate(kept)
    copied(metrics, fake, 2, 3, 4)
    assert fake.steps == [1, 2, 3, 2, 3, 4]
    with Tracking({"fake": fake}, metrics, print) as trackers:  # the same within one attempt, as with on_nan: back
        with metrics.open("r+b") as file:
            file.truncate(kept)
        trackers.cut_back(kept)
        write(metrics, 9, 9, 9, 9)
        trackers.wake()
    assert fake.steps[6:] == [9, 9, 9, 9]


def test_a_record_that_is_gone_begins_anew(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    copied(metrics, Fake(), 1, 2)
    fake = Fake(fails="forgets")
    copied(metrics, fake, 3)
    assert fake.steps == [1, 2, 3]


@pytest.mark.parametrize(
    ("fails", "said"), [("open", "ConnectionError: no route to host"), ("send", "ConnectionError: gone"), ("exit", "SystemExit: 3")]
)
def test_a_failure_is_one_line_and_the_next_attempt_makes_up_for_it(fails: str, said: str, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert copied(metrics, Fake(fails=fails), 1, 2) == [
        f"fake no longer records this run: {said}; training goes on, and metrics.jsonl has every row"
    ]
    fake = Fake()
    copied(metrics, fake, 3)
    assert fake.steps == [1, 2, 3]


def test_what_a_tracker_refuses_is_said_with_its_remedy(tmp_path: Path) -> None:
    class Refusing(Fake):
        def open(self, known: str | None) -> str:
            raise ValueError(f"the file store is no longer supported {'for a reason ' * 20}; set MLFLOW_ALLOW_FILE_STORE=true.")

    [line] = copied(tmp_path / "metrics.jsonl", Refusing(), 1)
    assert "; set MLFLOW_ALLOW_FILE_STORE=true; training goes on" in line


def test_an_endless_message_is_cut_between_words() -> None:
    said = one_line(ValueError("several words\n" * 1000))
    assert len(said) <= 600
    assert said.endswith((" words …", " several …"))


def test_the_end_of_a_run_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 0.05)
    holds = threading.Event()
    [said] = copied(tmp_path / "metrics.jsonl", Fake(holds=holds), 1)
    holds.set()
    assert "did not take the last rows within 0.05 seconds" in said


def test_a_run_that_fails_says_so_to_its_trackers(tmp_path: Path) -> None:
    fake = Fake()
    with pytest.raises(ZeroDivisionError), Tracking({"fake": fake}, tmp_path / "metrics.jsonl", print):
        raise ZeroDivisionError
    assert fake.closed == ["failed"]


def test_a_missing_package_is_said_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match=r"train\.track lists mlflow, which is not installed; install it with: pip install 'carrywave\[mlf"):
        fit(tmp_path / "run", "mlflow")
    assert not (tmp_path / "run").exists()


def test_a_description_and_the_numbers_of_a_row() -> None:
    described = Description.of(Path("runs/a"), parse({"train": {"lr": 0.5, "track": ["wandb"]}}))
    assert (described.settings["task"], described.settings["train.lr"], described.settings["train.track"]) == (
        "language",
        "0.5",
        '["wandb"]',
    )
    assert dict(values_of({"split": "valid", "step": 3, "loss": 0.5, "mase": None, "steps": 2})) == {"valid/loss": 0.5, "valid/steps": 2.0}


def fit(run: Path, track: str, epochs: int = 2, **how: Any) -> Any:
    data, train = {"train": SEQUENCES, "test": SEQUENCES[:4]}, {"epochs": epochs, "track": [track]}
    return cw.fit({"hidden": 4, "layers": 1}, data, task="classification", batch={"tokens": 40}, train=train, run=run, **how)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # mlflow's own
def test_mlflow_in_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow")
    pytest.importorskip("sqlalchemy", reason="a local store of mlflow needs sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 240.0)  # to make its tables takes long on a busy machine
    from mlflow import MlflowClient

    fit(tmp_path / "run", "mlflow")
    fit(tmp_path / "run", "mlflow", epochs=4, resume=True)
    assert "no longer records" not in caplog.text
    client = MlflowClient()
    experiment = client.get_experiment_by_name("carrywave")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])  # one record for both attempts
    assert (found.info.status, found.info.run_name, found.data.params["train.epochs"]) == ("FINISHED", "run", "2")
    for split, name in (("valid", "loss"), ("valid", "accuracy"), ("train", "lr")):
        kept = [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, f"{split}/{name}")]
        assert kept == [(row["step"], row[name]) for row in rows(tmp_path / "run") if row["split"] == split]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_server_that_is_not_there_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    fit(tmp_path / "run", "mlflow")
    assert caplog.text.count("mlflow no longer records this run") == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # wandb's own
def test_wandb_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    fit(tmp_path / "run", "wandb")
    fit(tmp_path / "run", "wandb", epochs=4, resume=True)
    assert "no longer records" not in caplog.text
    identity = json.loads((tmp_path / "run/tracking/wandb.json").read_text())["id"]
    first, second = sorted((tmp_path / "run/tracking/wandb").glob("offline-run-*"))
    assert first.name.endswith(identity)
    assert second.name.endswith(identity)
    logged = [each for part in (first, second) for each in _history(next(part.glob("*.wandb")))]
    whole = [(row["step"], row["loss"]) for row in rows(tmp_path / "run") if row["split"] == "valid"]
    assert [(each["step"], each["valid/loss"]) for each in logged if "valid/loss" in each] == whole


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # wandb's own
def test_wandb_without_a_key_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("wandb", reason="needs wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    fit(tmp_path / "run", "wandb")
    assert "there is no API key, so run wandb login, or set WANDB_MODE=offline; training goes on" in caplog.text


def _history(path: Path) -> list[dict[str, Any]]:
    """What a file of W&B has logged. It is a log of LevelDB: blocks of 32 KiB, with records in one piece or several."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole, found = path.read_bytes(), 7, b"", []
    while place < len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # in one piece, or the last of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
    return found
