"""A self-test over NCCL: drawn cases and every kind of plan on 2, 3 and 4 ranks, with a GPU for each, or on shares of the one there is.
With several GPUs messages go through device memory as well. Run it with `pytest tests/gpu`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from _check import check, check_drawn
from _crew import Crew
from _fixed import LONG, PLANS, SHARED, a_case, a_plan, sequences

from carrywave.launch.shares.mps import shares

# Counted without starting CUDA, and 0 where there is none.
GPUS = min(4, torch.cuda.device_count())
MOST = GPUS if GPUS > 1 else 4  # ranks
SIZES = [size for size in (2, 3, 4) if size <= MOST]
CASES = PLANS | SHARED | LONG

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["nccl", "device"])
def transport(request: pytest.FixtureRequest) -> str:
    """How messages between stages travel."""
    if request.param == "device" and GPUS < 2:
        pytest.skip("tests/gpu/test_recorded_gpu.py has this on shares")
    if request.param == "device" and not peers():
        pytest.skip("messages in device memory need GPUs that reach each other's: torch.cuda.can_device_access_peer says no")
    return str(request.param)


@pytest.fixture(scope="module")
def crew(transport: str) -> Iterator[Crew]:
    with shares(MOST) if GPUS < 2 else nullcontext({}) as environment:
        environment["CARRYWAVE_TRANSPORT"] = transport  # the workers check that it is the one they got
        with Crew(MOST, device="cuda", backend="nccl", environment=environment) as workers:
            yield workers


@pytest.mark.parametrize("workers", SIZES or [2])
def test_a_gpu_for_each_worker_gives_the_answer_of_one_process(workers: int, transport: str, crew: Crew) -> None:
    check_drawn(workers, 20, crew, where=f" on {'shares of a GPU' if GPUS < 2 else 'a GPU each'}, messages by {transport}")


@pytest.mark.parametrize("plan", CASES)
def test_one_case_on_every_kind_of_plan(plan: str, crew: Crew) -> None:
    asked = CASES[plan]
    if asked["replicas"] * asked["stages"] > MOST:
        pytest.skip(f"the plan needs {asked['replicas'] * asked['stages']} GPUs")
    check(a_case(plan=asked), crew)


@pytest.mark.parametrize("bucket_bytes", [None, 64])
def test_bits_repeat(bucket_bytes: int | None, crew: Crew) -> None:
    # Not an embedding: its gradient is a sum over words whose order CUDA does not fix.
    case = sequences(plan=a_plan(replicas=MOST), bucket_bytes=bucket_bytes, train__precision="fp32")
    first, second = crew.run(case).bits(), crew.run(case).bits()
    assert [name for name, tensor in first.items() if not torch.equal(tensor, second[name])] == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bits_repeat_over_stages(precision: str, crew: Crew) -> None:
    """However messages and tasks interleave on the devices, what is computed is the same."""
    case = sequences(plan=a_plan(stages=MOST, cuts=list(range(1, MOST)), chunk_steps=1), train__precision=precision)
    first, second = crew.run(case).bits(), crew.run(case).bits()
    assert [name for name, tensor in first.items() if not torch.equal(tensor, second[name])] == []


def peers() -> bool:
    """True if every GPU reaches the memory of every other. Asked in a process of its own, so that CUDA does not start in this one."""
    pairs = [(one, other) for one in range(GPUS) for other in range(GPUS) if one != other]
    ask = f"import torch; print(all(torch.cuda.can_device_access_peer(*pair) for pair in {pairs}))"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip() == "True"
