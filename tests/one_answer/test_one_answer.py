"""Every plan computes what one device computes, in float64: losses, gradients, weights and evaluations.

A table in which every two of plan, head, cell, data, dropout, layers, optimizer and loop meet; on up to four real processes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _answers import FACTORS, LIMIT, Case, answered, check, errors, fits, limit_of, net, serial
from _models import NORMED
from _pairs import pairs
from _workers import Workers

QUICK = 24  # rows of the table, in which each value is at least once
TABLE = pairs(FACTORS, fits)
ROWS = [pytest.param(row, id="-".join(row.values()), marks=[pytest.mark.slow] if place >= QUICK else []) for place, row in enumerate(TABLE)]
CASE: Case = {
    "plan": "2x2, micro-batches",
    "head": "tied words",
    "cell": "lstm",
    "data": "carried",
    "dropout": "all",
    "layers": "plain",
    "optimizer": "momentum",
    "loop": "step",
}


def test_the_table_has_every_value_and_few_rows() -> None:
    for name, values in FACTORS.items():
        assert {row[name] for row in TABLE[:QUICK]} == set(values)
    assert all(fits(row) for row in TABLE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", ROWS)
def test_any_plan_gives_the_answer_of_one_device(row: dict[str, str], workers: Workers) -> None:
    """Whatever stands in padding."""
    check({**row, "odd": True}, workers, limit=limit_of(row))


@pytest.mark.parametrize(
    ("plan", "data"),
    [
        ({"replicas": 2}, "carried"),
        ({"replicas": 3}, "few lanes"),  # one worker has none
        ({"stages": 2, "cuts": [2]}, "lengths"),
        pytest.param({"replicas": 2, "stages": 2, "cuts": [2]}, "accumulated", marks=pytest.mark.slow),
    ],
)
def test_a_norm_is_over_the_global_batch(plan: dict[str, Any], data: str, workers: Workers) -> None:
    """Its running values, which are among the weights, are those of one device, too."""
    case = {**CASE, "head": NORMED, "plan": plan, "data": data, "loop": "resumed", "odd": True}
    check(case, workers, limit=LIMIT)
    assert "last encoder.1.running_var" in serial(case).weights


MISTAKES: dict[str, dict[str, Any]] = {
    "another seed of dropout": {"keys": {"seed": 4}},
    "dropout that is not there": {"dropout": "weights"},
    "a carry that is not passed on": {"data": "lengths"},
    "steps that are not accumulated": {"data": "carried, resets, accumulated"},
    "another clip": {"keys": {"clip": 0.4}},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    """Not by a hair: a mistake is no matter of rounding."""
    assert max(errors(serial({**CASE, **MISTAKES[mistake]}), serial(CASE)).values()) > 1e-6


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", ["1, chunks", "2x1, chunks, micro-batches", "1x2", "1x3, shared head", "2x2"])
@pytest.mark.parametrize(
    ("precision", "limit", "floor"),
    [
        # Some hundreds of terms, each rounded at 6e-8, in another order.
        ("fp32", 1e-5, 1e-2),
        # Every product and every message is rounded to 8 bits, or to 11; the norm averages over independent errors, and a few roundings in
        # a row remain that fall the other way: four units in the last place.
        ("bf16", 2.0**-6, 0.05),
        ("fp16", 2.0**-9, 0.05),
    ],
)
def test_other_precisions_differ_by_roundings(precision: str, limit: float, floor: float, plan: str, workers: Workers) -> None:
    case = {**CASE, "plan": plan, "optimizer": "sgd", "keys": {"precision": precision, "lr": 0.1}, "dtype": "float32"}
    check(case, workers, limit=limit, floor=floor)


@pytest.mark.parametrize("plan", ["2x1", pytest.param("2x2", marks=pytest.mark.slow)])
def test_an_overflow_on_one_worker_is_skipped_by_all(plan: str, workers: Workers) -> None:
    keys = {"precision": "fp16", "lr": 0.1}
    case = {**CASE, "plan": plan, "head": "numbers of a lane", "data": "lengths", "optimizer": "sgd", "keys": keys, "dtype": "float32"}
    start, found = net(case).state_dict(), answered({**case, "huge": True}, workers)
    assert all(torch.equal(found.weights[f"first {name}"], tensor) for name, tensor in start.items())
    assert not all(torch.equal(found.weights[f"last {name}"], tensor) for name, tensor in start.items())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", ["4x1", "2x2", "2x2, shared head"])
def test_bits_repeat(plan: str, workers: Workers) -> None:
    """With four workers: with two, a sum in another order has the same bits."""
    case = {**CASE, "plan": plan, "dtype": "float32"}
    first, second = answered(case, workers), answered(case, workers)
    assert first.numbers == second.numbers
    assert [name for name, tensor in first.weights.items() if not torch.equal(tensor, second.weights[name])] == []


def test_workers_serve_one_world_after_the_other(workers: Workers) -> None:
    """As trainers of a user do that are made one after the other in the same processes."""
    for plan in ("2x1", "1x2", "2x1"):
        check({**CASE, "plan": plan}, workers, limit=LIMIT)
