"""Several processes: they find each other, talk, agree and fail as one; locally nothing listens where another machine could reach it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carrywave.launch.launcher import start
from carrywave.parallel.startup.launcher_env import WorkerFile

Write = Callable[[str, str], str]
Run = Callable[..., subprocess.CompletedProcess[str]]

TALK = """
    import json, os, sys
    from pathlib import Path
    from carrywave.errors import DataError, PlanError, UserError
    from carrywave.parallel.world import all_gather_text, check_agreement, join, leave, raise_on_all

    def caught(block):
        try:
            block()
        except UserError as error:
            return [type(error).__name__, str(error), error.reported_by]

    def fail(*ranks, alike=True):
        with raise_on_all(world):
            if world.rank in ranks:
                raise DataError("no; do" if alike else f"no {world.rank}")

    def listening():
        own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")}
        found = []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                    found.append(words[1].split(":")[0])
        return found

    world = join("cpu")
    said = {
        "world": [world.rank, world.size, world.local_rank, world.local_size, str(world.device), world.backend],
        "exchange": all_gather_text(world, "é" * world.rank),
        "empty": all_gather_text(world, ""),
        "none": caught(fail),
        "one": caught(lambda: fail(1)),
        "all": caught(lambda: fail(0, 1, 2)),
        "differing": caught(lambda: fail(0, 1, 2, alike=False)),
        "same": caught(lambda: check_agreement(world, {"version": "1", "data": "x"})),
        "other": caught(lambda: check_agreement(world, {"version": "1", "data": "x" * (1 + 99 * (world.rank == 1))})),
        "extra": caught(lambda: check_agreement(world, {"version": "1"} | ({"lr": "2"} if world.rank else {}))),
        "listening": listening() if sys.platform == "linux" else None,
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    again = join("cpu")  # the group is there
    assert again == world
    leave(world)
    leave(world)
    again = join("cpu")  # and here it is made anew
    said["again"] = all_gather_text(again, str(again.rank))
    leave(again)
    Path(f"{world.rank}.json").write_text(json.dumps(said))
"""


def said_in(folder: Path, size: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def check_talk(said: list[dict[str, Any]]) -> None:
    size = len(said)
    for rank, words in enumerate(said):
        assert words["world"] == [rank, size, rank, size, "cpu", "gloo"]
        assert words["exchange"] == ["é" * other for other in range(size)]
        assert words["empty"] == [""] * size
        assert words["none"] is None
        assert words["one"] == ["DataError", "rank 1: no; do", 0]
        assert words["all"] == ["DataError", "no; do", 0]
        assert words["differing"] == ["DataError", "rank 0: no 0", 0]
        assert words["same"] is None
        assert words["other"] == [
            "WorkerError",
            f"rank 1 has data {'x' * 57}…, but rank 0 has x; start every worker with the same command, files and versions",
            0,
        ]
        assert words["extra"][1].startswith("rank 1 has lr 2, but rank 0 has nothing;")
        assert words["again"] == [str(other) for other in range(size)]


def test_workers_of_one_host(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert start([sys.executable, write("talk.py", TALK)], 3).code == 0
    said = said_in(tmp_path, 3)
    check_talk(said)
    for words in said:
        assert words["threads"] == str(max(1, (os.cpu_count() or 1) // 3))
        if words["listening"] is not None:
            assert words["listening"]  # gloo listens for its peers …
            for address in words["listening"]:
                assert address in ("0100007F", "00000000000000000000000001000000")  # … on loopback alone: 127.0.0.1, ::1


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--standalone"], ["--master-addr=127.0.0.1", "--master-port=29641"]], ids=["agent", "static"])
def test_torchrun_works_as_it_is(how: list[str], write: Write, python: Run, tmp_path: Path) -> None:
    ended = python("-m", "torch.distributed.run", *how, "--nproc-per-node=2", write("talk.py", TALK))
    assert ended.returncode == 0, ended.stderr
    check_talk(said_in(tmp_path, 2))


@pytest.mark.slow
def test_under_torchrun_one_mistake_is_said_once(python: Run) -> None:
    ended = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "carrywave", "train", "model.hiden=3")
    assert ended.returncode != 0
    ours = [line for line in ended.stderr.splitlines() if line.startswith("carrywave:")]
    assert ours == ["carrywave: unknown key model.hiden; did you mean model.hidden?"]


LATE = """
    import os, time
    from pathlib import Path
    from carrywave.cli.exits import with_exit_codes
    from carrywave.parallel.world import join

    Path(f"there-{os.environ['RANK']}").touch()
    while len(list(Path().glob("there-*"))) < 2:  # loading torch takes longer on a busy machine than the wait that is tried here
        time.sleep(0.01)
    with_exit_codes(join)("cpu")
"""


@pytest.mark.slow
def test_a_missing_peer_is_named_by_one(write: Write, tmp_path: Path) -> None:
    program = write("late.py", LATE)
    file = WorkerFile(one_host=True, store=tmp_path / "store").write(tmp_path / "worker.json")
    variables = {"WORLD_SIZE": "4", "CARRYWAVE_START_SECONDS": "3", **file}
    there = [
        subprocess.Popen(
            [sys.executable, program],
            env=os.environ | variables | {"RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for rank in ("1", "3")
    ]
    lines = [line for process in there for line in process.communicate(timeout=60)[1].splitlines() if line.startswith("carrywave:")]
    assert len(lines) == 1, lines
    assert lines[0].startswith("carrywave: ranks 0 and 2 of 4 did not show up within 3 s; start every worker")
