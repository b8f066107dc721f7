"""`train.shard_optimizer` on real processes: the answer of one device, and the bits of replicas that all keep the whole state."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from _cases import Case, changed
from _check import check, run
from _crew import Crew
from _fixed import PLANS, SHARED, a_case, a_plan, sequences
from _small import Job, carry_out, spec

from _whole_snapshots import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

REPLICATED = {name: plan for name, plan in (PLANS | SHARED).items() if plan["replicas"] > 1} | {"four": a_plan(replicas=4)}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "weight_decay": 0.01},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
    "sgd": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.0},
    "momentum": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "ntasgd": {"optimizer": "ntasgd", "lr": 0.1, "weight_decay": 0.01},
    "averaged adam": {"optimizer": "adam", "ema": 0.8},
}


@pytest.fixture(scope="module", params=["gloo", "mapped"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    with Crew(4, backend=request.param) as workers:
        yield workers


def wide(**fields: Any) -> Case:
    """A case whose weights are large enough for every replica to own some of them; its first step accumulates two windows."""
    return a_case(**{"model__widths": [16, 12], "model__input": 12, "train__shard_optimizer": True, **fields})


def differing(case: Case, crew: Crew) -> list[str]:
    """What has other bits than without pieces."""
    ours, theirs = run(case, crew).bits(), run(changed(case, train__shard_optimizer=False), crew).bits()
    assert ours.keys() == theirs.keys()
    return [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "not tied"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", REPLICATED)
def test_the_answer_of_one_device_and_the_bits_of_whole_states(plan: str, optimizer: str, tie: bool, crew: Crew) -> None:
    settings = {f"train__{key}": value for key, value in OPTIMIZERS[optimizer].items()}
    case = wide(plan=REPLICATED[plan], model__tie=tie, **settings)
    check(case, crew)
    # The norm of a gradient that lies in pieces is added up in another order, so clipping is left out where that is so.
    if crew.backend == "mapped":
        case = changed(case, train__clip=None)
    names = differing(case, crew)
    assert [name for name in names if crew.backend == "gloo" or name != "norms"] == []


@pytest.mark.parametrize("plan", ["replicas", "both", "four"])
def test_a_parameter_that_only_some_replicas_reach(plan: str, crew: Crew) -> None:
    """A replica without lanes reaches nothing, and owns pieces all the same."""
    case = sequences(model__widths=[16, 12], train__shard_optimizer=True, plan=REPLICATED[plan])
    check(case, crew)


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_reproducible_run(reproducible: bool, crew: Crew) -> None:
    case = wide(plan=REPLICATED["four"], train__reproducible=reproducible, train__precision="fp32", train__clip=None)
    assert [name for name in differing(case, crew) if name != "norms"] == []


@pytest.mark.parametrize("plan", ["replicas", "both", "four"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_overflow_is_skipped_by_all(plan: str, optimizer: str, crew: Crew) -> None:
    """fp16: the gradient of the last lane overflows on one replica, in pieces that others own."""
    settings = {f"train__{key}": value for key, value in OPTIMIZERS[optimizer].items()}
    small = {"steps": 3, "lengths": [3, 2, 3, 1], "fresh": [True] * 4}
    large = {**small, "target_factors": {"3": 1e6}}
    kind = {"train__precision": "fp16", "train__alpha": 0.0, "train__beta": 0.0, "train__clip": None}
    case = sequences(task="regression", model__widths=[16, 12], train__shard_optimizer=True, plan=REPLICATED[plan], **kind, **settings)
    start, after = run(changed(case, groups=[]), crew), run(changed(case, groups=[[large]]), crew)
    assert (start.scale, after.scale) == (1024.0, 512.0)
    assert all(torch.equal(tensor, start.weights[name]) for name, tensor in after.weights.items())
    went_on = changed(case, groups=[[large], [small], [small]])
    # The gradients are those of the first step, which are no numbers.
    assert [name for name in differing(went_on, crew) if name != "norms" and not name.startswith("gradient")] == []
    assert not all(torch.equal(tensor, start.weights[name]) for name, tensor in run(went_on, crew).weights.items())


@pytest.mark.parametrize("plan", ["replicas", "both", "four"])
def test_a_step_that_is_not_finite_changes_nothing(plan: str, crew: Crew) -> None:
    small = {"steps": 3, "lengths": [3, 2, 3, 1], "fresh": [True] * 4}
    bad = {**small, "target_factors": {"3": 1e300}}
    case = sequences(task="regression", model__widths=[16, 12], train__shard_optimizer=True, train__clip=None, plan=REPLICATED[plan])
    start, after = run(changed(case, groups=[[small]]), crew), run(changed(case, groups=[[small], [bad]]), crew)
    assert after.finite == [True, False]
    assert all(torch.equal(tensor, start.weights[name]) for name, tensor in after.weights.items())
    went_on = changed(case, groups=[[small], [bad], [small]])
    assert [name for name in differing(went_on, crew) if name != "norms"] == []


RUNS: dict[str, Job] = {
    "1x1": {},
    "2x1": {"replicas": 2},
    "4x1": {"replicas": 4},
    "2x2": {"replicas": 2, "stages": 2, "chunk_steps": 4},
}
BEGUN, STEPS = 17, 30  # a snapshot in mid-epoch
# Begun by two replicas with pieces or not; continued on which plan, with pieces or not.
CONTINUED = [
    (False, "2x1", False),
    (True, "2x1", True),
    (True, "2x1", False),
    (False, "2x1", True),
    (True, "1x1", False),
    (True, "4x1", True),
    (True, "2x2", True),
    (False, "2x2", True),
]


@pytest.mark.parametrize("optimizer", ["adam", "ntasgd", "averaged adam"])
def test_a_run_continues_on_any_plan_with_pieces_or_without(optimizer: str, tmp_path: Path) -> None:
    """As the run that never divides its state: bit for bit on the plan that began it, up to the order of summation on any other."""

    train: dict[str, Any] = {"optimizer": optimizer.split()[-1], "precision": "fp64", "evaluate_every": 4}
    train |= {"lr": 30.0, "nonmono": 1} if optimizer == "ntasgd" else {"lr": 1e-3}
    train |= {"ema": 0.9} if optimizer == "averaged adam" else {}

    def job(run: str, plan: str, steps: int, *, pieces: bool, resume: bool = False) -> Job:
        made = spec(tmp_path, plan=RUNS[plan], max_steps=steps, shard_optimizer=pieces, **train)
        made["data"]["valid"] = made["data"]["train"]
        return {"run": str(tmp_path / run), "spec": made, "resume": resume}

    two: list[Job] = [
        job("begun-True", "2x1", BEGUN, pieces=True),
        job("begun-False", "2x1", BEGUN, pieces=False),
    ]
    carry_out(tmp_path, two, 2, "two")
    for workers in (1, 2, 4):
        jobs = []
        for begun, plan, pieces in CONTINUED:
            if workers == max(1, RUNS[plan].get("replicas", 1) * RUNS[plan].get("stages", 1)):
                name = f"{begun}-{plan}-{pieces}"
                shutil.copytree(tmp_path / f"begun-{begun}", tmp_path / name)
                jobs.append(job(name, plan, STEPS, pieces=pieces, resume=True))
        for told in carry_out(tmp_path, jobs, workers, f"again-{workers}"):
            assert [each.get("ending") for each in told] == ["done"] * len(jobs), told
    whole = tmp_path / "False-2x1-False"
    wanted = load(whole / "snapshots")
    if optimizer != "adam":
        assert any(name.startswith("ax/") for name in wanted.optimizer)  # averaging had started
    for begun, plan, pieces in CONTINUED:
        run = tmp_path / f"{begun}-{plan}-{pieces}"
        found = load(run / "snapshots")
        for name, tensor in wanted.parameters.items():
            if plan == "2x1":
                assert torch.equal(found.parameters[name], tensor), (run.name, name)
            else:
                assert float((found.parameters[name] - tensor).abs().max()) < 1e-10, (run.name, name)
        if plan == "2x1":
            assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes(), run.name
            ours, theirs = (load_file(folder / "weights.safetensors") for folder in (run, whole))
            assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items()), run.name  # the averages, if there are any
