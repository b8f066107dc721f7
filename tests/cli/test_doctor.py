"""`carrywave doctor`: who examines, how the report is shown and written, and with which code the command ends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from carrywave.cli import doctor
from carrywave.cli.main import app
from carrywave.doctor import examination
from carrywave.doctor.examination import Request
from carrywave.doctor.report import Finding, Report
from carrywave.launch.exit_reports import Ended

FINE = Finding("fine", "memory", "64 GB free", where="a")
WRONG = Finding("wrong", "disk", "runs [x] cannot be written", "correct it", "a")
HOSTS = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TF_CONFIG", "CARRYWAVE_WORKER", "CARRYWAVE_SHARE_GPU", doctor.VERDICT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "gpus", lambda: [])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Result, list[Request]]]:
    """Runs the command with an examination that finds this; returns what it was asked too."""

    def run(*words: str, found: tuple[Finding, ...] = (FINE,)) -> tuple[Result, list[Request]]:
        asked: list[Request] = []

        def examine(given: Request, deliver: Any, say: Any) -> int:
            asked.append(given)
            report = Report(found, measured={"links": []})
            deliver(report)
            return report.code

        monkeypatch.setattr(examination, "examine", examine)
        return CliRunner().invoke(app, ["doctor", *words]), asked

    return run


def test_plain_lines_and_the_code(run: Any) -> None:
    result, asked = run("--devices", "1", "--meet", "[::1]:29500", "--run", "elsewhere/runs")
    assert (result.exit_code, result.stdout) == (0, "ok      memory  a: 64 GB free\nall is well\n")
    assert asked == [Request("auto", "elsewhere/runs", ("::1", 29500))]
    result, _ = run("--devices", "1", found=(FINE, WRONG))
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1:] == ["WRONG   disk    a: runs [x] cannot be written; correct it", "1 thing is wrong"]


def test_json_for_programs(run: Any, tmp_path: Path) -> None:
    result, _ = run("--devices", "1", "--json", "-", found=(WRONG,))
    known = json.loads(result.stdout)
    assert (result.exit_code, known["well"], known["findings"][0]["remedy"]) == (1, False, "correct it")
    assert known["links"] == []
    result, _ = run("--devices", "1", "--json", str(tmp_path / "report.json"))
    assert json.loads((tmp_path / "report.json").read_text())["well"]
    assert result.stdout.endswith("all is well\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--meet", "hostA"], "--meet hostA is not an address; write it as in hostA:29500"),
        (["--meet", "hostA:99999"], "--meet hostA:99999 is not an address"),
        (["--devices", "0"], "--devices is 0; use a number >= 1"),
        (["--json", "no/such/folder.json"], "no/such/folder.json cannot be written: folder no/such not found"),
    ],
)
def test_mistakes_are_told_before_anything_is_examined(run: Any, words: list[str], said: str) -> None:
    result, asked = run("--device", "cpu", *words)
    assert (result.exit_code, asked) == (2, [])
    assert result.stderr.startswith(f"carrywave: {said}")
    assert result.stderr.count("\n") == 1


def test_devices_besides_a_launcher_are_refused(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result, _ = run("--devices", "3")
    assert result.exit_code == 2
    assert "--devices is 3, but the launcher started 2 workers; remove --devices" in result.stderr
    assert run("--devices", "2")[0].exit_code == 0


@pytest.mark.parametrize(
    ("gpus", "words", "config", "count"),
    [(0, [], "", 2), (4, [], "", 4), (4, ["--device", "cpu"], "", 2), (1, [], "", None), (1, [], HOSTS, 1), (0, ["--devices", "3"], "", 3)],
)
def test_workers_are_started_as_for_training(
    run: Any, monkeypatch: pytest.MonkeyPatch, gpus: int, words: list[str], config: str, count: int | None
) -> None:
    started: list[tuple[int, bool]] = []

    def start(command: list[str], devices: int, *, environment: dict[str, str], say: Any, hosts: bool = False) -> Ended:
        started.append((devices, hosts))
        for rank in range(devices):
            (Path(environment[doctor.VERDICT]) / str(rank)).write_text("1" if rank == devices - 1 else "0")
        return Ended(0)

    def on_hosts(command: list[str], devices: int, hosts: Any, restarts: int, say: Any, environment: dict[str, str]) -> Ended:
        return start(command, devices, environment=environment, say=say, hosts=True)

    monkeypatch.setattr(doctor, "start", start)
    monkeypatch.setattr("carrywave.launch.elastic.start_on_hosts", on_hosts)
    monkeypatch.setattr(doctor, "script_command", lambda: ["program"])
    monkeypatch.setattr(doctor, "gpus", lambda: ["H200"] * gpus)
    monkeypatch.setattr(doctor, "cores", lambda: 8)
    if config:
        monkeypatch.setenv("TF_CONFIG", config)
    result, asked = run(*words)
    if count is None:
        assert (result.exit_code, started, len(asked)) == (0, [], 1)  # one worker does the work itself
    else:
        assert (result.exit_code, started, asked) == (1, [(count, bool(config))], [])  # the verdict of the worst


def test_workers_of_ours_leave_their_verdict_in_a_file(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(doctor.VERDICT, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result, _ = run(found=(WRONG,))
    assert result.exit_code == 0
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("0", "1")]
    assert os.environ[doctor.VERDICT] == str(tmp_path)
