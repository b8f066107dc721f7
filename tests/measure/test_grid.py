"""A profile to be shared: a grid of sizes on the whole device, and a file for shares of it. Nothing is timed here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from carrywave.launch import hardware
from carrywave.measure import grid, profiles
from carrywave.parallel import worker_pool
from carrywave.plan.cost.cluster import Cluster
from carrywave.plan.cost.profile import Profile, Sample
from carrywave.plan.cost.sample_requests import Ask
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan
from carrywave.plan.search.predictor import Predictor
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse

OWN_SECONDS = 3.5e-6


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Measurements that were started, on a machine with one GPU."""
    started: list[dict[str, Any]] = []

    def start(module: str, job: dict[str, Any], workers: int, **how: Any) -> list[list[dict[str, Any]]]:
        started.append({**job, "workers": workers, "environment": how["environment"]})
        rows: list[dict[str, Any]] = []
        for ask in (Ask(**values) for values in job["asks"]):
            whole = ask.sample(1e-3, 2e-3, 0.0)
            rows.append({"sample": asdict(whole)})
            rows += [{"sample": asdict(replace(whole, deferred_seconds=1e-4, piped="recorded"))}] * (not ask.whole)
            rows += [{"sample": asdict(replace(whole, piped="launched"))}] * job["launched"]
        rows += [{"sample": asdict(Sample("optimizer", "fp32", 0, 10**6, 1, 1, 1e-3, name=name))} for name in job["optimizers"]]
        rows.append({"overheads": {"task_seconds": 1e-4, "recorded_seconds": 2e-6}})
        if job["links"]:
            rows.append({"reduction": {"workers": workers, "num_bytes": 64, "seconds": 1e-5}})
            rows.append({"link": {"latency_seconds": 1e-6, "bytes_per_second": 3e11, "transport": "device memory"}})
            rows.append({"overheads": {"recorded_message_seconds": OWN_SECONDS}})
        return [rows] * workers

    @contextmanager
    def shares(count: int) -> Iterator[dict[str, str]]:
        yield {"CARRYWAVE_SHARE_GPU": str(count)}

    smi = {"name": ("NVIDIA H200",), "memory.total": ("143771",), "compute_cap": ("9.0",)}
    monkeypatch.setattr(worker_pool, "start", start)
    monkeypatch.setattr(grid, "shares", shares)
    monkeypatch.setattr(hardware, "nvidia_smi", lambda field: smi[field])
    monkeypatch.setattr(profiles, "nvidia_smi", lambda field: smi[field])
    monkeypatch.delenv("CARRYWAVE_SHARE_GPU", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return started


def units(hidden: int = 512) -> Units:
    spec = {
        "task": "language",
        "model": {"hidden": hidden, "layers": 8},
        "batch": {"lanes": 64, "steps": 256},
        "train": {"precision": "bf16"},
    }
    return Units.of(parse(spec), DataFacts(vocabulary=10_000, sequences=1, steps=10**6, longest=10**6))


def test_one_command_measures_shares_and_the_whole_gpu(jobs: list[dict[str, Any]], tmp_path: Path) -> None:
    grid.main([str(tmp_path / "h1.json"), "h1", "--shares", "4,2", "--precisions", "bf16"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["h1-1of2.json", "h1-1of4.json", "h1.json"]
    assert [(job["workers"], job["precision"], job["links"], job["launched"]) for job in jobs] == [
        (4, "bf16", True, False),
        (2, "bf16", True, False),
        (1, "bf16", False, True),
    ]
    assert [job["environment"] for job in jobs] == [{"CARRYWAVE_SHARE_GPU": "4"}, {"CARRYWAVE_SHARE_GPU": "2"}, {}]
    whole, quarter = Profile.read(tmp_path / "h1.json"), Profile.read(tmp_path / "h1-1of4.json")
    assert (quarter.devices_per_host, quarter.memory_bytes) == (4, whole.memory_bytes // 4)
    assert quarter.hardware == "1/4 of 1 x NVIDIA H200"
    assert quarter.within.source == "measured"
    assert whole.within.source.startswith("published")
    assert whole.within.transport == quarter.within.transport == "device memory"
    # A message in a recorded step costs whole GPUs what it costs shares.
    assert whole.overheads.recorded_message_seconds == quarter.overheads.recorded_message_seconds == OWN_SECONDS
    for profile in (whole, quarter):
        found = Predictor(units(), Cluster.uniform(profile, 4)).predict(Plan(1, 4, chunk_steps=16))
        assert found.transports.recorded == "steps"
        assert found.seconds > 0
        assert {sample.steps for sample in profile.samples if sample.piped == "recorded" and sample.kind == "lstm"} >= {8, 32}


def test_samples_that_are_not_measured_again_are_kept(jobs: list[dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "h1.json"
    grid.main([str(file), "h1", "--precisions", "bf16,fp32"])
    before = Profile.read(file)
    jobs.clear()
    grid.main([str(file), "h1", "--precisions", "bf16"])
    assert [job["precision"] for job in jobs] == ["bf16"]
    assert len(Profile.read(file).samples) == len(before.samples)
    assert {sample.precision for sample in Profile.read(file).samples} == {"bf16", "fp32"}
    jobs.clear()
    text = file.read_text()
    grid.main([str(file), "h1", "--precisions", "", "--shares", "2"])
    assert [job["workers"] for job in jobs] == [2]
    assert file.read_text() == text


def test_samples_that_would_be_lost_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "h1.json"
    replace(profiles.empty("cpu"), hardware="another machine").write(file)
    before = file.read_bytes()
    with pytest.raises(SystemExit):
        grid.main([str(file), "h1", "--device", "cpu"])
    assert "is of another machine or version" in capsys.readouterr().err
    assert file.read_bytes() == before
