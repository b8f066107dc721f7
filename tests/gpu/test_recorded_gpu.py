"""The exactness suite on shares of one GPU: messages and sums in device memory or over NCCL, and whole steps in one recording.

The answer is that of one process on the CPU in float64; in half precision, that of one process on the GPU. What is recorded has the bits of
what the host launches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from _cases import Case, changed, errors, serial
from _check import check, check_drawn
from _crew import Crew
from _fixed import FLOOR, PLANS, SHARED, a_case, a_plan, sequences

from carrywave.launch.shares.mps import shares

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]  # the first case of each worker compiles kernels

STEPS = 5  # the first runs as it is, the second is recorded
EVERY = PLANS | SHARED | {"several micro-batches": a_plan(stages=2, cuts=[2], chunk_steps=2, micro_batches=2)}


@pytest.fixture(scope="module", params=["device", "nccl"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    with shares(4) as environment:
        environment["CARRYWAVE_TRANSPORT"] = request.param  # the workers check that it is the one they got
        backend = "nccl" if request.param == "nccl" else "gloo"
        with Crew(4, device="cuda", backend=backend, environment=environment) as workers:
            yield workers


def again(case: Case, **fields: Any) -> Case:
    """The same batch shape step after step, so that it is recorded."""
    first = case["groups"][0]
    return changed(case, groups=[first] * STEPS, **fields)


@pytest.mark.parametrize("workers", [2, 4])
def test_shares_give_the_answer_of_one_process(workers: int, crew: Crew) -> None:
    check_drawn(workers, 20, crew, where=" on shares of one GPU")


@pytest.mark.parametrize("plan", EVERY)
def test_one_case_on_every_kind_of_plan(plan: str, crew: Crew) -> None:
    check(a_case(plan=EVERY[plan]), crew)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("plan", EVERY)
def test_recorded_steps_have_the_bits_of_launched_ones(plan: str, precision: str, recompute: bool, crew: Crew) -> None:
    chosen = {**EVERY[plan], "recompute": recompute and EVERY[plan]["stages"] > 1}
    # Numbers, not words: the gradient of an embedding is a sum whose order CUDA does not fix.
    case = again(sequences(task="tagging", plan=chosen), train__precision=precision, train__optimizer="sgd")
    recorded, launched = crew.run(case), crew.run(changed(case, recorded=False))
    batches = len(case["groups"][0])
    one_piece = batches == 1 or chosen["stages"] > 1
    assert (recorded.failure, recorded.replays, launched.replays) == ("", STEPS - 1 if one_piece else 0, 0)
    odd = [name for name, tensor in launched.bits().items() if not torch.equal(tensor, recorded.bits()[name])]
    assert odd == []
    limit = {"fp32": 1e-4, "bf16": 0.1, "fp16": 0.02}[precision]
    found = errors(recorded, serial(case, "cuda"), floor=0.1 if precision != "fp32" else FLOOR)
    worst = max(found, key=found.__getitem__)
    print(f"{plan}, {precision}: {worst} is off by {found[worst]:.2g}")
    assert found[worst] < limit, f"{worst} is off by {found[worst]:.2g}"


@pytest.mark.parametrize("plan", EVERY)
def test_carried_state_and_accumulation_in_recordings(plan: str, crew: Crew) -> None:
    """A stream in two windows a step, with tied weights, dropout and a learned carry."""
    windows = [{"steps": 6, "lengths": [6] * 5, "fresh": [False] * 5}] * 2
    case = a_case(plan=EVERY[plan], train__precision="fp32", train__optimizer="sgd", groups=[windows] * STEPS)
    recorded, launched = crew.run(case), crew.run(changed(case, recorded=False))
    assert recorded.replays == (STEPS - 1 if EVERY[plan]["stages"] > 1 else 0)
    assert recorded.losses == pytest.approx(launched.losses, rel=1e-5)
    found = errors(recorded, serial(case, "cuda"), floor=1e-2)
    worst = max(found, key=found.__getitem__)
    print(f"{plan}: {worst} is off by {found[worst]:.2g}")
    assert found[worst] < 1e-4, f"{worst} is off by {found[worst]:.2g}"
