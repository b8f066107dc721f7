"""The exactness suite with CUDA tensors: several workers share one GPU, and what goes between them goes through the host's memory.

The answer that they are held against is that of one process on the CPU, in float64: dropout draws the same masks on both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from _cases import Case, changed, errors, serial
from _check import check, check_drawn
from _crew import Crew
from _fixed import FLOOR, PLANS, SHARED, a_case, a_plan, sequences

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]  # the first case of each worker compiles kernels


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(4, device="cuda") as workers:
        yield workers


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_on_one_gpu_give_the_answer_of_one_process(workers: int, crew: Crew) -> None:
    check_drawn(workers, 20, crew, where=" on one GPU")


@pytest.mark.parametrize("plan", PLANS | SHARED)
def test_one_case_on_every_kind_of_plan(plan: str, crew: Crew) -> None:
    check(a_case(plan=(PLANS | SHARED)[plan]), crew)


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        ("local lanes", a_case()),
        ("carry gradient dropped", a_case(plan=PLANS["stages"])),
        ("tied not summed", a_case(plan=PLANS["stages"])),
    ],
)
def test_a_mistake_is_seen(mistake: str, case: Case, crew: Crew) -> None:
    found = errors_of_mistake(case, mistake, crew)
    assert found > 1e-6


def errors_of_mistake(case: Case, mistake: str, crew: Crew) -> float:
    """The largest error; infinite where workers do not even agree with each other."""
    try:
        return max(errors(crew.run(changed(case, broken=mistake)), serial(case), floor=FLOOR).values())
    except AssertionError as error:
        if "differs in its bits" not in str(error):
            raise
        return float("inf")


@pytest.mark.parametrize("plan", PLANS)
def test_padding_of_nan_changes_no_bit(plan: str, crew: Crew) -> None:
    case = sequences(plan=PLANS[plan])
    plain, odd = (crew.run(changed(case, padding=kind)).bits() for kind in ("plain", "odd"))
    assert [name for name, tensor in plain.items() if not torch.equal(tensor, odd[name])] == []
    assert all(tensor.isfinite().all() for tensor in odd.values())


@pytest.mark.parametrize("plan", [a_plan(replicas=3), a_plan(stages=2, cuts=[2], micro_batches=3)], ids=["replicas", "stages"])
def test_a_transcription_gives_the_answer_of_one_process(plan: dict[str, object], crew: Crew) -> None:
    check(sequences(task="transcription", plan=plan, model__upsample=2, model__bidirectional=True), crew)


@pytest.mark.parametrize("plan", [a_plan(replicas=4), PLANS["both"]], ids=["replicas", "both"])
def test_bits_repeat(plan: dict[str, object], crew: Crew) -> None:
    # Not an embedding: its gradient is a sum over words whose order CUDA does not fix.
    case = sequences(plan=plan, bucket_bytes=64, train__precision="fp32")
    first, second = crew.run(case).bits(), crew.run(case).bits()
    assert [name for name, tensor in first.items() if not torch.equal(tensor, second[name])] == []


@pytest.mark.parametrize("plan", ["replicas", "both"])
def test_an_overflow_on_one_worker_is_skipped_by_all(plan: str, crew: Crew) -> None:
    small = {"steps": 3, "lengths": [3, 2, 3, 1], "fresh": [True] * 4}
    large = {**small, "target_factors": {"3": 1e6}}
    case = sequences(task="regression", train__precision="fp16", train__alpha=0.0, train__beta=0.0, plan=PLANS[plan])
    start, after = crew.run(changed(case, groups=[])), crew.run(changed(case, groups=[[large]]))
    assert (start.scale, after.scale) == (1024.0, 512.0)
    assert all(torch.equal(tensor, start.weights[name]) for name, tensor in after.weights.items())
