"""What all tests share: temporary folders alone are written, nothing waits for disks or the clock, and gpu tests need a GPU."""

from __future__ import annotations

import gc
import os
import sys
from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: many small tests side by side
sys.path.insert(0, str(Path(__file__).parent))  # for _warm.py, which several folders use

import hypothesis
import pytest

import carrywave
from carrywave.plan.profile import Link, Profile
from carrywave.plan.rates import Rate

if TYPE_CHECKING:
    from _zoo import Zoo

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG", "CARRYWAVE_WORKER")

os.fsync = os.fstat  # type: ignore[assignment]  # it still needs an open file, but no test outlives a power cut

# Never judged by the clock: the machine may be busy. Derandomized: a failure seen once can be seen again.
hypothesis.settings.register_profile("carrywave", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("carrywave")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _sample(items)
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if not wanted:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _sample(items: list[pytest.Item]) -> None:
    """Of the variants of a test marked `sampled(n)`, all but n are slow: always the same ones, drawn by their names."""
    variants: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            variants[item.nodeid.partition("[")[0]].append(item)
    for same in variants.values():
        marker = same[0].get_closest_marker("sampled")
        assert marker is not None
        for item in sorted(same, key=lambda each: sha256(each.nodeid.encode()).digest())[marker.args[0] :]:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What stays until the end, torch and the tests themselves, is left out of every later collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher has started the tests, and programs in other folders find the package that is under test, installed or not."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    paths = [str(Path(carrywave.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Parsed data goes to a temporary folder, not to the user's cache; child processes inherit it."""
    os.environ["CARRYWAVE_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True, scope="session")
def _profile(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Several workers are planned for a machine on which a task costs a second, so that they are replicas: nothing is measured."""
    kinds, precisions = ("layer", "head", "embedding", "plain", "update"), ("fp32", "fp64", "bf16")
    rates = tuple(Rate(kind, precision, 1e-5, element_seconds=1e-9) for kind in kinds for precision in precisions)  # type: ignore[arg-type]
    link = Link(1e-6, 1e9)
    profile = Profile("of tests", "none", "published", 1 << 40, rates, link, link, devices_per_host=8, task_seconds=1.0)
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.write(path)
    os.environ["CARRYWAVE_PROFILE"] = str(path)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Small trained runs of every kind."""
    from _zoo import Zoo

    return Zoo(tmp_path_factory.mktemp("zoo"))
