"""Several processes: who is said to have gone, what trainers leave behind, and when workers of unlike devices look at what was computed."""

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


def workers(program: str, folder: Path, size: int, own: Callable[[int], dict[str, str]] = lambda rank: {}) -> list[tuple[int, str]]:
    """Run a program in so many processes that another launcher might have started: the exit code and stderr of each."""
    shared = {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    shared |= WorkerFile(one_host=True, store=folder / "store").write(folder / "worker.json")
    started = [
        subprocess.Popen(
            [sys.executable, program],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | own(rank),
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        for rank in range(size)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in started]
        return [(process.returncode, text) for process, text in zip(started, errors, strict=True)]
    finally:
        for process in started:
            process.kill()


def told(folder: Path, size: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


OWN_LOOP = """
    import gc, json, os
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch import nn
    import carrywave as cw
    from carrywave.errors import ContactLost

    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    batch = cw.Batch.of(torch.ones(4, 6, 3), torch.ones(4, 6, 2))

    def loss(out, targets):
        return (out - targets).square().sum(), torch.tensor(float(targets.numel()))

    def hooks():
        gc.collect()
        return sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())

    def trained(**plan):
        trainer = cw.Trainer(model, {"lr": 0.1, "optimizer": "sgd", **plan}, loss=loss, device="cpu")
        trainer.step(batch)
        return trainer

    def failing(out, targets):
        raise ValueError("in the loss")

    def groups():
        return sorted(dist.distributed_c10d._world.pg_names.values())

    said = {"groups": [], "hooks": []}
    for _ in range(5):
        trainer = trained()
        said["groups"].append(groups())
    said["hooks"].append(hooks())
    del trainer
    said["hooks"].append(hooks())
    model.splittable = True  # not tried, so that the step itself fails
    try:
        cw.Trainer(model, {"lr": 0.1}, loss=failing, device="cpu").step(batch)
    except ValueError:
        trainer = trained()
    said["after a failure"] = groups()
    Path(f"{rank}.json").write_text(json.dumps(said))
    if rank == 1:
        raise ValueError("oops")
    try:
        trainer.step(batch)
    except ContactLost as error:
        Path(f"{rank}.json").write_text(json.dumps(said | {"lost": str(error), "rank": error.rank, "is": isinstance(error, RuntimeError)}))
        raise
"""


@pytest.mark.slow
def test_trainers_leave_nothing_behind_and_who_has_gone_is_named(write: Write, tmp_path: Path) -> None:
    ended = workers(write("own.py", OWN_LOOP), tmp_path, 3)
    assert [code for code, _ in ended] == [1, 1, 1]
    for words in told(tmp_path, 3):
        first, after = words["groups"][0], words["after a failure"]
        assert all(each == first for each in words["groups"])  # five trainers, the groups of one
        # What may hold messages of a step that broke off is closed, and others take its place; the world's own group stays.
        assert len(set(after) & set(first)) == 1
        assert len(after) == len(first)
        assert words["hooks"] == [2, 0]
    for rank in (0, 2):
        words, text = told(tmp_path, 3)[rank], ended[rank][1]
        assert words["rank"] == 1
        assert words["lost"].startswith("contact with rank 1 on ")
        assert words["lost"].endswith("(the connection closed); see that worker's output, then restart all workers")
        assert words["lost"] in text.splitlines()[-1]
        assert "gloo" not in text
    assert "ValueError: oops" in ended[1][1]


JOIN = """
    import sys
    import typer
    from carrywave.cli.exits import with_exit_codes
    from carrywave.parallel.world import join

    try:
        with_exit_codes(join)("cpu")
    except typer.Exit as left:
        sys.exit(left.exit_code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=["one", "all"])
def test_an_interface_that_is_not_there_is_one_line(ranks: tuple[int, ...], write: Write, tmp_path: Path) -> None:
    """Torch speaks of it in a traceback, and where one worker has it, the others wait for that one."""
    own = {rank: {"GLOO_SOCKET_IFNAME": "nope"} for rank in ranks}
    ended = workers(write("join.py", JOIN), tmp_path, 2, lambda rank: own.get(rank, {}))
    assert [code for code, _ in ended] == [2, 2], ended
    lines = [line for _, text in ended for line in text.splitlines()]
    assert len(lines) == 1, lines
    who = "rank 1: " if ranks == (1,) else ""
    assert lines[0].startswith(f"carrywave: {who}GLOO_SOCKET_IFNAME=nope: this host has no network interface nope (it has ")
    assert lines[0].endswith("); correct or unset it")


MIXED = """
    import json, os, signal
    from pathlib import Path
    from carrywave.errors import Diverged
    from carrywave.step.checks import agreement
    from carrywave.spec.load import load
    from carrywave.train.fit import train
    from carrywave.step.trainer import Trainer

    rank = int(os.environ["RANK"])
    steps, update = 0, Trainer.update
    if rank == 1:
        agreement._kind = lambda device: "cuda of some kind"

    def counted(self, *batches):
        global steps
        steps += 1
        result = update(self, *batches)
        if steps == 3 and rank == 0:
            harm(self)
        return result

    Trainer.update = counted
    spec = load(None, os.environ["SPEC"].split())
    harm = lambda trainer: os.kill(os.getpid(), signal.SIGTERM)
    ending = train(spec, run=Path("stopped"), device="cpu").ending
    found = {"ending": ending, "stopped": steps}
    steps = 0
    harm = lambda trainer: next(p for _, p in trainer.named).data.fill_(float("nan"))
    try:
        train(spec, run=Path("bad"), device="cpu")
    except Diverged as error:
        found["bad"] = str(error)
    Path(f"{rank}.json").write_text(json.dumps(found | {"steps": steps}))
"""


@pytest.mark.slow
def test_workers_of_unlike_devices_look_at_the_same_steps(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has a GPU looks at every eighth step only, and so do those that could look at each."""
    (tmp_path / "text.txt").write_text("the carry is passed along, and work moves through layers and time as a wave. " * 40)
    monkeypatch.chdir(tmp_path)
    words = "data.train=text.txt data.tokens=char model.hidden=8 batch.lanes=4 batch.steps=8 train.max_steps=40 train.log_every=1000"
    end = start([sys.executable, write("mixed.py", MIXED)], 2, environment={"SPEC": words})
    assert (end.code, end.message) == (0, "")
    for found in told(tmp_path, 2):
        assert (found["ending"], found["stopped"]) == ("terminated", 8)
        assert found["steps"] == 8
        assert "is no longer finite at step 4 (epoch 1)" in found["bad"]
