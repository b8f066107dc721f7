"""The profile of this machine: measured by real processes, kept in a file, added to, and begun anew where it is not of this machine."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from carrywave.errors import PlanError
from carrywave.launch import hardware
from carrywave.measure import profiles
from carrywave.measure.profiles import empty, known_profile, merged, profile_for, profile_of_shares, worker_counts
from carrywave.parallel import worker_pool
from carrywave.plan.cost.cluster import Cluster
from carrywave.plan.cost.profile import Contention, Link, Profile, Sample
from carrywave.plan.cost.sample_requests import Ask
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan
from carrywave.plan.search.predictor import Predictor
from carrywave.plan.search.search import search
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse


def units(hidden: int = 8, **train: Any) -> Units:
    spec = parse({"task": "language", "model": {"hidden": hidden, "layers": 2}, "batch": {"lanes": 4, "steps": 8}, "train": train})
    return Units.of(spec, DataFacts(vocabulary=20, sequences=1, steps=1000, longest=1000))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYWAVE_CACHE", str(tmp_path))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Jobs of measurements that were asked for; nothing is timed."""
    jobs: list[dict[str, Any]] = []

    def start(module: str, job: dict[str, Any], workers: int, **how: Any) -> list[list[dict[str, Any]]]:
        jobs.append({**job, "workers": workers, "environment": how.get("environment")})
        samples = [Ask(**ask).sample(1e-3, 2e-3, 0.0) for ask in job["asks"]]
        sizes = [(name, size) for name in job["optimizers"] for size in (10**5, 10**6)]
        samples += [Sample("optimizer", "fp32", 0, size, 1, 1, 1e-9 * size, name=name) for name, size in sizes]
        rows: list[dict[str, Any]] = [{"sample": asdict(sample)} for sample in samples]
        rows += [{"reduction": {"workers": workers, "num_bytes": 64, "seconds": 1e-3}}] * job["links"]
        rows += [{"lag": 0.1}] * job["links"]
        rows += [{"link": {"latency_seconds": 1e-4, "bytes_per_second": 1e9}}] * job["links"]
        return [[*rows, {"overheads": {"task_seconds": 1e-4, "message_seconds": 5e-5}}]] * workers

    monkeypatch.setattr(worker_pool, "start", start)
    monkeypatch.setattr(profiles, "cores", lambda: 8)
    return jobs


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_real_workers_measure_all_that_a_search_asks_for(tmp_path: Path) -> None:
    said: list[str] = []
    found = profile_for(units(), device="cpu", devices=2, note=said.append)
    assert len(said) == len(worker_counts("cpu", 2))
    assert {sample.workers for sample in found.samples} == set(worker_counts("cpu", 2))
    assert found.overheads.task_seconds > 0
    if 2 in worker_counts("cpu", 2):
        assert found.overheads.message_seconds > 0
        assert (found.within.source, found.within.transport) == ("measured", "gloo")
        assert {reduction.workers for reduction in found.reductions} == {2}
        [crowd] = found.contention
        assert crowd.workers == 2
        assert 0 <= crowd.lag < 1  # the slower of two is at most all behind
    [path] = tmp_path.glob("profiles/cpu-*.json")
    assert Profile.read(path).samples
    assert search(units(), Cluster.uniform(found, 1)).best.plan == Plan.serial()
    assert Predictor(units(), Cluster.uniform(found, 1)).predict(Plan.serial()).seconds > 0


def test_what_is_known_is_not_measured_again_and_what_is_new_is_added(started: list[dict[str, Any]]) -> None:
    first = profile_for(units(), device="cpu", devices=2)
    assert [job["workers"] for job in started] == [1, 2]
    assert [job["links"] for job in started] == [False, True]
    assert all(job["launched"] for job in started)
    assert first.contention == (Contention(2, lag=0.1),)
    assert profile_for(units(), device="cpu", devices=2) == first
    assert len(started) == 2
    more = profile_for(units(16, optimizer="sgd"), device="cpu", devices=2)
    assert [job["optimizers"] for job in started[2:]] == [["sgd"], ["sgd"]]
    assert set(first.samples) < set(more.samples)
    assert known_profile(units(16, optimizer="sgd"), device="cpu", workers=2) == more
    assert known_profile(units(), device="cpu", workers=1) == more
    assert known_profile(units(24), device="cpu", workers=1) is None  # a guess from other sizes would only mislead


def test_a_profile_is_of_the_transport_that_was_asked_for(started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    profile_for(units(), device="cpu", devices=1)
    monkeypatch.setenv("CARRYWAVE_TRANSPORT", "nccl")
    assert known_profile(units(), device="cpu", workers=1) is None
    monkeypatch.setenv("CARRYWAVE_TRANSPORT", "auto")
    assert known_profile(units(), device="cpu", workers=1) is not None


def test_a_profile_of_other_versions_is_measured_anew(started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    profile_for(units(), device="cpu", devices=1)
    monkeypatch.setattr(profiles, "versions", lambda: {"torch": "0.1"})
    assert known_profile(units(), device="cpu", workers=1) is None
    profile_for(units(), device="cpu", devices=1)
    assert len(started) == 2


@pytest.mark.parametrize("damage", ["", "{", '{"format": 99}'])
def test_a_damaged_file_is_measured_anew(damage: str, started: list[dict[str, Any]], tmp_path: Path) -> None:
    found = profile_for(units(), device="cpu", devices=1)
    [path] = tmp_path.glob("profiles/cpu-*.json")
    path.write_text(damage)
    assert profile_for(units(), device="cpu", devices=1) == found
    assert len(started) == 2


def test_a_file_of_another_machine_is_not_believed(started: list[dict[str, Any]], tmp_path: Path) -> None:
    profile_for(units(), device="cpu", devices=1)
    [path] = tmp_path.glob("profiles/cpu-*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "hardware": "another"}))
    assert known_profile(units(), device="cpu", workers=1) is None


def test_times_of_workers_are_averaged() -> None:
    one, other = Sample("lstm", "fp32", 8, 8, 4, 4, 1.0, 2.0, 0.5), Sample("lstm", "fp32", 8, 8, 4, 4, 3.0, 4.0, 1.5)
    rows: list[list[dict[str, Any]]] = [[{"sample": asdict(one)}], [{"sample": asdict(other)}]]
    rows[0].append({"overheads": {"message_seconds": 1.0}})
    rows[1].append({"overheads": {"message_seconds": 3.0}})
    found = merged(empty("cpu"), rows, 2)
    assert found.samples == (replace(one, forward_seconds=2.0, backward_seconds=3.0, deferred_seconds=1.0, workers=2),)
    assert found.overheads.message_seconds == 2.0
    assert merged(found, [[{"overheads": {"message_seconds": 9.0}}]], 4).overheads.message_seconds == 2.0  # what was found first stands
    again = merged(found, [[{"sample": asdict(other)}]], 2)
    assert again.samples == (replace(other, workers=2),)
    assert merged(found, [[{"link": {"latency_seconds": 1.0, "bytes_per_second": 2.0}}]], 2).within == Link(1.0, 2.0)


def test_a_cache_that_cannot_be_written_is_named(started: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CARRYWAVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(Exception, match=r"cannot be saved in .*file/profiles .*; set CARRYWAVE_CACHE"):
        profile_for(units(), device="cpu", devices=1)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "gpus", lambda: [])
    with pytest.raises(PlanError, match="nvidia-smi shows no GPU; use --device cpu"):
        profile_for(units(), device="cuda", devices=1)


def test_the_gpus_that_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'NVIDIA A\\nNVIDIA A\\nNVIDIA B\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    hardware.nvidia_smi.cache_clear()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert hardware.gpus() == ["NVIDIA A", "NVIDIA A", "NVIDIA B"]
    assert profiles.hardware("cuda") == "2 x NVIDIA A, 1 x NVIDIA B"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert hardware.gpus() == ["NVIDIA B", "NVIDIA A"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,7,0")
    assert hardware.gpus() == ["NVIDIA B"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,-1,0")
    assert hardware.gpus() == ["NVIDIA A"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-123")
    assert len(hardware.gpus()) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.gpus() == []
    hardware.nvidia_smi.cache_clear()


def test_threads_are_those_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [profiles.threads(workers) for workers in (1, 2, 3, 16)] == [8, 4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert profiles.threads(1) == 2
    assert profiles.versions()["threads"] == "2"
    monkeypatch.setattr(profiles, "threads_dealt", lambda: True)
    assert profiles.threads(1) == 8
    assert "threads" not in profiles.versions()


def test_worker_counts_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "cores", lambda: 8)
    assert [worker_counts("cpu", devices) for devices in (1, 2, 3, 8, 64)] == [[1], [1, 2], [1, 2, 3], [1, 2, 8], [1, 2, 32]]
    monkeypatch.setattr(profiles, "gpus", lambda: ["a"] * 4)
    assert [worker_counts("cuda", devices) for devices in (1, 2, 64)] == [[1], [1, 2], [1, 2, 4]]


def test_shares_of_a_gpu_are_measured_as_shares_and_kept_apart(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = {"name": ("NVIDIA A",), "memory.total": ("1000",), "compute_cap": ("8.0",)}
    for module in (hardware, profiles):
        monkeypatch.setattr(module, "nvidia_smi", told.__getitem__)
    monkeypatch.setattr(profiles, "divided", lambda count: nullcontext({"divided": str(count)}))
    for name in ("CUDA_VISIBLE_DEVICES", "CARRYWAVE_SHARE_GPU", "CUDA_MPS_PIPE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    whole = profile_for(units(), device="cuda", devices=2)
    assert (whole.hardware, whole.memory_bytes, whole.devices_per_host) == ("1 x NVIDIA A", 1000 << 20, 1)
    assert [(job["workers"], job["environment"]) for job in started] == [(1, {"divided": "1"})]
    started.clear()
    monkeypatch.setenv("CARRYWAVE_SHARE_GPU", "2")
    share = profile_for(units(), device="cuda", devices=2)
    assert (share.hardware, share.memory_bytes, share.devices_per_host) == ("2 x 1/2 of NVIDIA A", 500 << 20, 2)
    assert [(job["workers"], job["environment"]) for job in started] == [(1, {"divided": "2"}), (2, {"divided": "2"})]
    started.clear()
    (tmp_path / "profiles").rename(tmp_path / "before")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/of/this/worker")
    profile_for(units(), device="cuda", devices=1)
    assert [job["environment"] for job in started] == [{"divided": "1"}]


def test_shares_of_a_gpu_are_devices_measured_by_workers_in_their_environment(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(profiles, "gpus", lambda: ["a"])
    found = profile_of_shares(units(precision="bf16"), {"SHARE": "25"}, [1, 2, 4])
    assert [(job["workers"], job["device"], job["environment"]) for job in started] == [(n, "cuda", {"SHARE": "25"}) for n in (1, 2, 4)]
    assert [job["links"] for job in started] == [False, True, True]
    assert not any(job["launched"] for job in started)  # all stages of one host are recorded
    assert all(job["asks"] for job in started)
    assert found.devices_per_host == 4
    assert {sample.workers for sample in found.samples} == {1, 2, 4}
    assert Predictor(units(precision="bf16"), Cluster.uniform(found, 4)).predict(Plan(stages=4, chunk_steps=2)).seconds > 0
    assert not list(tmp_path.glob("profiles/*.json"))  # it is not the profile of this machine
