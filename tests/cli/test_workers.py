"""`--devices`: how many workers are started, and by whom; and of several workers, who says what happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from carrywave.cli import workers
from carrywave.cli.exits import with_exit_codes
from carrywave.cli.workers import devices_of, fitted, start_workers
from carrywave.errors import ContactLost, DataError, PlanError, WorkerError
from carrywave.launch import launch_record
from carrywave.launch.exit_reports import Ended
from carrywave.launch.hosts import Hosts
from carrywave.launch.launcher import Patience
from carrywave.parallel import world
from carrywave.parallel.startup.launcher_env import is_first
from carrywave.spec.plan_spec import PlanSpec
from carrywave.spec.spec import Spec

HOSTS = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TF_CONFIG", "CARRYWAVE_WORKER", "CARRYWAVE_SHARE_GPU"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch_record._Call, "run", None)  # other tests train in this process


asked: list[tuple[int, int | None]] = []  # restarts, and workers that are enough, of every start


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """A machine with so many GPUs, where nothing is started: what would have been is noted."""

    def make(gpus: int, end: Ended = Ended(0)) -> list[Any]:  # noqa: B008
        started: list[Any] = []
        asked.clear()

        def start(command: list[str], devices: int, patience: Patience, **more: Any) -> Ended:
            started.append((devices, None))
            asked.append((patience.most, patience.least))
            return end

        def on_hosts(command: list[str], devices: int, hosts: Hosts, restarts: int, say: Any) -> Ended:
            started.append((devices, hosts.index))
            return end

        def leave(code: int) -> None:
            raise typer.Exit(code)

        monkeypatch.setattr("carrywave.launch.elastic.start_on_hosts", on_hosts)
        monkeypatch.setattr(os, "_exit", leave)
        monkeypatch.setattr(workers, "start", start)
        monkeypatch.setattr(workers, "script_command", lambda: ["program"])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        return started

    return make


@pytest.mark.parametrize(
    ("gpus", "devices", "device", "plan", "count"),
    [
        (0, None, "auto", PlanSpec(), None),  # one process on the CPU
        (1, None, "auto", PlanSpec(), None),
        (4, None, "auto", PlanSpec(), 4),  # one worker for each GPU
        (4, None, "cpu", PlanSpec(), None),
        (4, 1, "auto", PlanSpec(), None),
        (4, 2, "auto", PlanSpec(), 2),
        (0, 3, "auto", PlanSpec(), 3),
        (4, None, "auto", None, None),  # without a plan only where asked for
        (4, 2, "auto", None, 2),
    ],
)
def test_how_many_are_started(machine: Any, gpus: int, devices: int | None, device: str, plan: PlanSpec | None, count: int | None) -> None:
    started = machine(gpus)
    if count is None:
        assert start_workers(devices, device, plan) is None
    else:
        with pytest.raises(typer.Exit) as left:
            start_workers(devices, device, plan)
        assert left.value.exit_code == 0
    assert started == ([] if count is None else [(count, None)])


def test_more_workers_than_gpus_are_refused(machine: Any) -> None:
    started = machine(3)
    with pytest.raises(WorkerError, match="4 workers have only 3 GPUs; start one worker per GPU, or set CARRYWAVE_SHARE"):
        start_workers(4, "cuda", PlanSpec())
    assert started == []


def test_a_dry_run_starts_nobody(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = machine(0)
    assert start_workers(4, "cpu", PlanSpec(stages=2), dry_run=True) == 4
    assert start_workers(None, "cpu", PlanSpec(), dry_run=True) is None
    monkeypatch.setenv("TF_CONFIG", HOSTS)
    assert start_workers(3, "cpu", PlanSpec(), dry_run=True) == 6
    assert started == []


def test_every_host_of_a_cluster_starts_workers(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = machine(2)
    monkeypatch.setenv("TF_CONFIG", HOSTS)
    for device in ("auto", "cpu"):
        with pytest.raises(typer.Exit):
            start_workers(None, device, PlanSpec())
    assert started == [(2, 1), (1, 1)]


def test_a_launcher_wins_over_tf_config(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = machine(2)
    for name, value in {"TF_CONFIG": "not read", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert start_workers(None, "auto", PlanSpec()) is None
    assert start_workers(4, "auto", PlanSpec()) is None
    assert started == []
    assert not is_first()
    with pytest.raises(PlanError, match="--devices is 2, but the launcher started 4 workers"):
        start_workers(2, "auto", PlanSpec())


def test_a_failure_of_the_workers_is_said_once(machine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    machine(0, Ended(1, "worker 1: ValueError: oops", trace="Traceback\n"))
    with pytest.raises(typer.Exit) as left:
        start_workers(2, "cpu", PlanSpec())
    assert left.value.exit_code == 1
    assert capsys.readouterr().err == "carrywave: worker 1: ValueError: oops\nTraceback\n"


def said(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    @with_exit_codes
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as left:
        command()
    return left.value.exit_code, capsys.readouterr().err


def shared(error: DataError) -> DataError:
    error.reported_by = 0
    return error


@pytest.mark.parametrize(
    ("rank", "error", "code", "line"),
    [
        ("0", DataError("no; do"), 2, "carrywave: rank 0: no; do\n"),
        ("1", DataError("no; do"), 2, "carrywave: rank 1: no; do\n"),
        ("0", shared(DataError("no; do")), 2, "carrywave: no; do\n"),
        ("1", shared(DataError("no; do")), 2, ""),
        ("0", KeyboardInterrupt(), 130, "carrywave: interrupted\n"),
        ("1", KeyboardInterrupt(), 130, ""),
        (
            "1",
            ContactLost("contact with rank 0 was lost", 0),
            1,
            "carrywave: rank 1: contact with rank 0 was lost\n",
        ),
    ],
)
def test_who_speaks_under_another_launcher(
    rank: str, error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(world._Joined, "store", None)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert said(error, capsys) == (code, line)


def test_a_batch_script_that_forgets_srun(machine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine(0)
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert start_workers(None, "cpu", PlanSpec()) is None
    assert "has 2 nodes, but this command runs once, on the first node; put srun in front" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plan", "overrides", "devices", "expected"),
    [
        ({"replicas": 2}, [], 1, {}),  # as many replicas as there are workers
        ({"replicas": 2}, [], 2, {"replicas": 2}),
        ({"replicas": 2}, [], None, {"replicas": 2}),
        ({"replicas": 2, "chunk_steps": 4}, ["train.epochs=9"], 3, {"chunk_steps": 4}),
        ({"replicas": 2, "stages": 2, "cuts": [2]}, [], 2, {"stages": 2, "cuts": [2]}),
        ({"replicas": 1, "stages": 2, "cuts": [2]}, [], 3, {}),
        ({"replicas": 2}, ["plan.replicas=2"], 1, {"replicas": 2}),  # what is asked for now is refused later
        ({"replicas": 2, "stages": 2}, ["plan.stages=2"], 2, {"stages": 2}),
        ({"stages": 2}, ["plan.stages=2"], 3, {"stages": 2}),
    ],
)
def test_a_run_goes_on_with_the_workers_that_there_are(
    plan: dict[str, Any], overrides: list[str], devices: int | None, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    spec = Spec(plan=PlanSpec(**plan))
    found = fitted(spec, overrides, devices, None).plan_spec
    assert found.model_dump() == PlanSpec(**expected).model_dump()
    said = capsys.readouterr().err
    assert ("the run was started with plan.replicas=" in said) == (found.model_dump() != PlanSpec(**plan).model_dump())
    assert fitted(Spec(), overrides, devices, None) == Spec()


@pytest.mark.parametrize(
    ("had", "cores", "gpus", "plan", "expected"),
    [
        ((2, 1), 4, 0, {}, 2),
        ((1, 2), 4, 0, {"stages": 2}, 2),
        ((2, 2), 1, 8, {"replicas": 2, "stages": 2}, 4),
        ((1, 1), 1, 8, {}, 1),
        ((4, 1), 2, 0, {"replicas": 4}, 2),  # as many as there are
        ((4, 1), 16, 3, {}, 3),
        ((2, 1), 4, 0, {"stages": 4}, None),  # another plan is asked for
        ((2, 1), 4, 0, {"replicas": 1}, None),
    ],
)
def test_a_run_that_is_resumed_takes_the_devices_that_it_had(
    had: tuple[int, int],
    cores: int,
    gpus: int,
    plan: dict[str, Any],
    expected: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(workers, "cores", lambda: cores)
    monkeypatch.setattr(workers, "gpus", lambda: ["GPU"] * gpus)
    spec = Spec(plan=PlanSpec(**plan)) if plan else Spec()
    assert devices_of(tmp_path, spec, "auto", None) is None  # nothing is known of it
    (tmp_path / "plan.json").write_text(json.dumps({"replicas": had[0], "stages": had[1]}))
    assert devices_of(tmp_path, spec, "auto", None) == expected
    assert devices_of(tmp_path, spec, "auto", Hosts(1, 0, "localhost:1", "kubeflow", 2)) is None
    assert ("it goes on with" in capsys.readouterr().err) == (expected not in (None, had[0] * had[1]))


SMALL = ["data.train=text.txt", "model.hidden=4", "batch.lanes=2", "batch.steps=8", "--run", "run", "--device", "cpu"]


def heeds_stops(process: int, how: str) -> bool:
    """True once a process has SIGTERM blocked (`SigBlk`), while it loads, or handles it (`SigCgt`)."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return bool(int(status[how], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")
@pytest.mark.parametrize(("devices", "how"), [("1", "SigBlk"), pytest.param("2", "SigCgt", marks=pytest.mark.slow)])
def test_a_stop_in_start_up_is_one_line(devices: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the carry goes on and on\n" * 20)
    command = [sys.executable, "-m", "carrywave", "train", *SMALL, "train.epochs=100000", "--devices", devices]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not heeds_stops(process.pid, how):
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (143, "carrywave: stopped by SIGTERM before the first step; nothing was trained\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root reads everything, and setpriv is not there")
@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_folder_without_permission_is_one_line(devices: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the carry goes on and on\n" * 20)
    (tmp_path / "closed").mkdir(mode=0)
    as_others = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    command = [*as_others, sys.executable, "-m", "carrywave", "train", *SMALL, "--devices", devices]
    for words, name in ((["--run", "closed/run"], "closed/run"), (["data.train=closed/x.txt"], "closed/x.txt")):
        ended = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        said = f"{name} cannot be reached: Permission denied; give this user the permission, or name another\n"
        assert (ended.returncode, ended.stderr.removeprefix("carrywave: ").removeprefix("rank 0: ")) == (2, said)
