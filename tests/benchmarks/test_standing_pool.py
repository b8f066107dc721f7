"""Pools of workers that stay: they answer one request after another, and one that is gone says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from carrywave.benchmarks.harness import standing_pool
from carrywave.benchmarks.harness.standing_pool import StandingPool
from carrywave.errors import RunError


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module whose workers add, stay silent or die."""
    (tmp_path / "standing_pool_worker.py").write_text(
        "import os, time\n"
        "from carrywave.benchmarks.harness.standing_pool import requests\n"
        "def work(world, job):\n"
        "    for request, answer in requests(job, world.rank):\n"
        "        if request.get('die') == world.rank:\n"
        "            os._exit(7)\n"
        "        time.sleep(request.get('sleep', 0.0))\n"
        "        answer({'rank': world.rank, 'sum': job['one'] + request.get('other', 0), 'own': os.environ.get('OF_POOL', '')})\n"
        "    yield from ()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "standing_pool_worker"


def pool(module: str, workers: int = 1, **environment: str) -> StandingPool:
    return StandingPool(module, workers, job={"one": 1}, environment=environment, name="bench test")


@pytest.mark.slow
def test_two_pools_take_turns_in_processes_that_stay(module: str) -> None:
    with pool(module, OF_POOL="small") as small, pool(module, 2, OF_POOL="large") as large:
        assert small.ask(other=2) == [{"rank": 0, "sum": 3, "own": "small"}]
        assert [row["rank"] for row in large.ask(other=4)] == [0, 1]
        assert small.ask(other=5) == [{"rank": 0, "sum": 6, "own": "small"}]
        folders = small.folder, large.folder
    assert not any(folder.exists() for folder in folders)
    assert small.lost == "the workers of bench test are done"
    with pytest.raises(RunError, match="are done"):
        small.ask(other=1)


@pytest.mark.slow
def test_a_worker_that_dies_ends_its_pool(module: str) -> None:
    with pool(module, 2) as own:
        own.ask()
        with pytest.raises(RunError, match="worker 1 of bench test exited with code 7"):
            own.ask(die=1)
        with pytest.raises(RunError, match="exited with code 7"):
            own.ask()


@pytest.mark.slow
def test_a_pool_that_does_not_answer_is_given_up(module: str) -> None:
    with pool(module) as own:
        own.ask()
        with pytest.raises(RunError, match="did not answer within 1 s"):
            own.ask(timeout_seconds=1.0, sleep=1000.0)
        assert not own._thread.is_alive()  # so its worker is gone


def test_a_request_is_seen_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing_pool, "_end_with_folder", lambda folder: None)  # it would end this process with the folder
    (tmp_path / "ask-0.part").write_text('{"half":')
    (tmp_path / "ask-1").write_text("{}")
    (tmp_path / "end").touch()
    assert list(standing_pool.requests({"requests": str(tmp_path)}, 0)) == []
