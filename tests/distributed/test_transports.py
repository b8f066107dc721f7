"""Every way in which messages and sums travel gives the answer of one device: those of GPUs are acted out on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "one_answer"))
from _answers import LIMIT, PLANS, check
from _transports import TRANSPORTS
from _workers import Workers

CASE = {
    "head": "tied words",
    "cell": "lstm",
    "data": "carried, resets, accumulated",
    "dropout": "all",
    "layers": "plain",
    "optimizer": "momentum",
    "loop": "step",
}


@pytest.fixture(scope="module", params=TRANSPORTS)
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with Workers(transport=request.param) as started:
        yield started


@pytest.mark.sampled(6)
@pytest.mark.parametrize("plan", [plan for plan in PLANS if not plan.startswith("1,") and plan != "1"])
def test_any_transport_gives_the_answer_of_one_device(plan: str, workers: Workers) -> None:
    check({**CASE, "plan": plan}, workers, limit=LIMIT)
