"""Copies of metrics.jsonl in trackers: in order, continued after a resume, and never the reason that a run fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import carrywave as cw
from carrywave.errors import SpecError, one_line
from carrywave.runs import tracking
from carrywave.runs.tracking import Row, Tracking

SEQUENCES = [([[float(up), float(step)] for step in range(4)], "up" if up else "down") for up in [0, 1] * 10]


class Fake:
    """A tracker that keeps what it gets."""

    def __init__(self, *, fails: BaseException | None = None, at: str = "") -> None:
        self.got: list[object] = []
        self.fails, self.at = fails, at

    def _get(self, what: str, value: object) -> None:
        if self.fails is not None and self.at == what:
            raise self.fails
        self.got.append(value)

    def open(self, after: int | None) -> None:
        self._get("open", f"open after {after}")

    def add(self, row: Row) -> None:
        self._get("add", row["step"])

    def close(self, how: str) -> None:
        self._get("close", how)


def row(step: int) -> Row:
    return {"split": "train", "step": step, "loss": 0.5}


def test_every_row_is_sent_in_order_and_a_tracker_is_told_of_going_back() -> None:
    fake, idle = Fake(), Fake()
    with Tracking({"fake": fake}, print) as trackers:
        for step in (1, 2, 3):
            trackers.add(row(step))
        trackers.go_back(2)
        trackers.add(row(3))
        trackers.how = "stopped"
    assert fake.got == ["open after None", 1, 2, 3, "stopped", "open after 2", 3, "stopped"]
    failed = Tracking({"fake": fake}, print)
    failed.add(row(4))
    failed.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert fake.got[-3:] == ["open after None", 4, "failed"]
    with Tracking({"idle": idle}, print):
        pass
    assert idle.got == []  # without a row there is nothing to open


@pytest.mark.parametrize(
    ("error", "at", "said"),
    [
        (ConnectionError("no route\nto host."), "open", "ConnectionError: no route to host"),
        (ConnectionError("gone"), "add", "ConnectionError: gone"),
        (SystemExit(3), "close", "SystemExit: 3"),
    ],
)
def test_a_failure_is_one_line_and_the_others_go_on(error: BaseException, at: str, said: str) -> None:
    lines: list[str] = []
    other = Fake()
    with Tracking({"fake": Fake(fails=error, at=at), "other": other}, lines.append) as trackers:
        for step in (1, 2):
            trackers.add(row(step))
    assert lines == [f"fake no longer records this run: {said}; training goes on, and metrics.jsonl has every row"]
    assert other.got == ["open after None", 1, 2, "finished"]


def test_an_endless_message_is_cut_between_words() -> None:
    said = one_line(ValueError("several words\n" * 1000))
    assert len(said) <= 600
    assert said.endswith((" words …", " several …"))


def test_a_missing_package_is_said_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match=r"train\.track lists mlflow, which is not installed; install it with: pip install 'carrywave\[mlf"):
        fit(tmp_path / "run", "mlflow")
    assert not (tmp_path / "run").exists()


def test_tensorboard_discards_what_comes_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # type: ignore[import-untyped]

    row: Row = {"split": "train", "epoch": 1, "step": 10, "loss": 0.5}
    with Tracking({"tensorboard": tracking.TensorBoard(tmp_path, {})}, pytest.fail) as trackers:
        trackers.add({**row, "lr": 0.5})
        trackers.go_back(10)
        trackers.add({**row, "step": 11})
    first, second = sorted((tmp_path / "tb").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    events = [event for path in (first, second) for event in EventFileLoader(str(path)).Load()]
    tags = [(value.tag, event.step) for event in events for value in event.summary.value]
    assert tags == [("train/loss", 10), ("train/lr", 10), ("train/loss", 11)]
    assert [event.step for event in events if event.HasField("session_log")] == [11]
    assert dict(tracking.numbers_of({**row, "mase": None, "steps": 2})) == {"train/epoch": 1.0, "train/loss": 0.5, "train/steps": 2.0}


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
    identity = tracking.read_id(tmp_path / "run", "wandb")
    assert identity is not None
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
