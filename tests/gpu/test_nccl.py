"""A self-test for machines with two or more GPUs: the same cases over NCCL, a GPU for each worker. Run it with `pytest tests/gpu`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from _check import check, check_drawn
from _crew import Crew
from _fixed import PLANS, SHARED, a_case, a_plan, sequences

# Counted without starting CUDA, and 0 where there is none.
GPUS = min(4, torch.cuda.device_count())
SIZES = [size for size in (2, 3, 4) if size <= GPUS]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(GPUS < 2, reason="NCCL wants a GPU for each worker: needs two or more"),
]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(GPUS, device="cuda", backend="nccl") as workers:
        yield workers


@pytest.mark.parametrize("workers", SIZES or [2])
def test_a_gpu_for_each_worker_gives_the_answer_of_one_process(workers: int, crew: Crew) -> None:
    check_drawn(workers, 20, crew, where=" over NCCL")


@pytest.mark.parametrize("plan", PLANS | SHARED)
def test_one_case_on_every_kind_of_plan(plan: str, crew: Crew) -> None:
    asked = (PLANS | SHARED)[plan]
    if asked["replicas"] * asked["stages"] > GPUS:
        pytest.skip(f"the plan needs {asked['replicas'] * asked['stages']} GPUs")
    check(a_case(plan=asked), crew)


@pytest.mark.parametrize("bucket_bytes", [None, 64])
def test_bits_repeat(bucket_bytes: int | None, crew: Crew) -> None:
    # Not an embedding: its gradient is a sum over words whose order CUDA does not fix.
    case = sequences(plan=a_plan(replicas=GPUS), bucket_bytes=bucket_bytes, train__precision="fp32")
    first, second = crew.run(case).bits(), crew.run(case).bits()
    assert [name for name, tensor in first.items() if not torch.equal(tensor, second[name])] == []
