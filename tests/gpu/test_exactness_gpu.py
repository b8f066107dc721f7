"""The table of tests/one_answer with CUDA: workers take turns on one GPU, or have a share or a GPU each, with messages of every kind.

The answer that they are held against is that of one process on the CPU, in float64: dropout draws the same masks on both.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "one_answer"))
from _answers import FACTORS, FLOOR, PLANS, answered, check, errors, fits, limit_of, serial, workers_of
from _pairs import pairs
from _workers import Workers

from benchmarks.shares.mps import shares

# Counted without starting CUDA, and 0 where there is none.
GPUS = min(4, torch.cuda.device_count())
MOST = GPUS if GPUS > 1 else 4  # workers
ROWS = pairs(FACTORS, fits)[::4]
CASE = {"cell": "lstm", "dropout": "all", "layers": "plain", "optimizer": "momentum", "loop": "step"}
WORDS = {**CASE, "head": "tied words", "data": "carried, resets, accumulated"}
# Not an embedding, where bits are compared: its gradient is a sum over words whose order CUDA does not fix.
NUMBERS = {**CASE, "head": "own", "data": "lengths", "dtype": "float32", "optimizer": "sgd"}
SPLIT = [plan for plan in PLANS if not plan.startswith("1,") and plan != "1"]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]  # the first case of each worker compiles kernels


@pytest.fixture(scope="module", params=["turns", "device", "nccl"])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    """`turns`: through the host's memory; the others on shares of the GPU, or on a GPU each."""
    if request.param == "turns":
        with Workers("cuda", {"CARRYWAVE_SHARE_GPU": "1"}) as started:
            yield started
        return
    if request.param == "device" and GPUS > 1 and not peers():
        pytest.skip("messages in device memory need GPUs that reach each other's: torch.cuda.can_device_access_peer says no")
    with (
        shares(MOST) if GPUS < 2 else nullcontext({}) as environment,
        Workers("cuda", environment | {"CARRYWAVE_TRANSPORT": request.param}) as started,
    ):
        yield started


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.values()))
def test_any_plan_gives_the_answer_of_one_process(row: dict[str, str], workers: Workers) -> None:
    if workers_of(row) > MOST:
        pytest.skip(f"the plan needs {workers_of(row)} GPUs")
    check({**row, "odd": True}, workers, limit=limit_of(row))


@pytest.mark.parametrize("plan", SPLIT)
def test_one_case_on_every_kind_of_plan(plan: str, workers: Workers) -> None:
    if workers_of({"plan": plan}) > MOST:
        pytest.skip(f"the plan needs {workers_of({'plan': plan})} GPUs")
    check({**WORDS, "plan": plan}, workers, limit=1e-10)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("plan", ["4x1", "1x4", "2x2"])
def test_bits_repeat(plan: str, precision: str, workers: Workers) -> None:
    """However messages and tasks interleave on the devices, what is computed is the same."""
    case = {**NUMBERS, "plan": plan, "keys": {"precision": precision, "lr": 0.1}}
    first, second = answered(case, workers).weights, answered(case, workers).weights
    assert [name for name, tensor in first.items() if not torch.equal(tensor, second[name])] == []


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("plan", ["2x1", "1x2", "1x2, micro-batches", "1x2, shared head", "1x3", "2x2", "2x2, shared head"])
def test_recorded_steps_have_the_bits_of_launched_ones(plan: str, precision: str, workers: Workers) -> None:
    """The same shapes come again, so that they are recorded; with our own modules, which a replay need not run."""
    keys = {"precision": precision, "lr": 0.1}
    case = {**NUMBERS, "plan": plan, "head": "numbers at each step", "data": "whole", "keys": keys, "repeats": 2}
    with Workers("cuda", {**workers.environment, "CARRYWAVE_CAPTURE": "0"}) as plain:
        launched = answered(case, plain)
    recorded = answered(case, workers)
    assert launched.replays == 0
    assert (recorded.replays > 0) == ("CARRYWAVE_TRANSPORT" in workers.environment or PLANS[plan].get("stages", 1) == 1)
    assert [name for name, tensor in launched.weights.items() if not torch.equal(tensor, recorded.weights[name])] == []
    limit = {"fp32": 1e-4, "bf16": 0.1, "fp16": 0.02}[precision]
    found = errors(recorded, serial(case, "cuda"), floor=0.1 if precision != "fp32" else FLOOR)
    worst = max(found, key=found.__getitem__)
    assert found[worst] < limit, f"{worst} is off by {found[worst]:.2g}"


def peers() -> bool:
    """True if every GPU reaches the memory of every other. Asked in a process of its own, so that CUDA does not start in this one."""
    both = [(one, other) for one in range(GPUS) for other in range(GPUS) if one != other]
    ask = f"import torch; print(all(torch.cuda.can_device_access_peer(*pair) for pair in {both}))"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip() == "True"
