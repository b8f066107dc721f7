from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from carrywave.plan.cost.sample_requests import LARGEST, Ask, asks_of
from carrywave.plan.cost.units import Units
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse


def units(model: dict[str, object] | None = None, **sections: object) -> Units:
    spec = {"task": "language", "model": {"hidden": 32, "layers": 3, **(model or {})}, "batch": {"lanes": 8, "steps": 64}, **sections}
    return Units.of(parse(spec), DataFacts(vocabulary=100, sequences=1, steps=1000, longest=1000))


def kinds(asks: list[Ask]) -> set[tuple[str, int, int]]:
    return {(ask.kind, ask.lanes, ask.steps) for ask in asks}


def test_alone_every_unit_is_asked_for_once_as_it_is_run() -> None:
    found = asks_of(units({"dropout": 0.2, "embedding": 16}), 1)
    assert kinds(found) == {(kind, 8, steps) for kind in ("embedding", "lstm", "softmax", "dropout") for steps in (64, 16)}
    assert sorted(ask.inputs for ask in found if ask.kind == "lstm" and ask.whole) == [16, 32]  # the second and third layer are alike
    assert all(ask.whole == (ask.steps == 64) for ask in found)


def test_several_workers_have_shares_of_the_lanes_and_chunks_of_the_window() -> None:
    found = asks_of(units(), 4)
    assert kinds(found) == {(kind, lanes, steps) for kind in ("embedding", "lstm", "softmax") for lanes in (8, 2) for steps in (64, 16, 4)}
    assert {ask.steps for ask in found if ask.whole} == {64}


def test_what_reads_both_ways_is_not_cut_in_time_and_a_pooled_head_has_one_row() -> None:
    spec = parse({"task": "classification", "model": {"hidden": 8, "bidirectional": True}, "batch": {"tokens": 256}})
    facts = DataFacts(vocabulary=50, labels=("a", "b"), sequences=10, steps=320, longest=32, histogram=((32, 10),))
    found = asks_of(Units.of(spec, facts), 2)
    assert {ask.steps for ask in found if ask.kind == "lstm"} == {32}
    assert {ask.steps for ask in found if ask.kind == "softmax"} == {1}


def test_large_calls_are_timed_on_fewer_steps() -> None:
    large = [ask for ask in asks_of(units({"hidden": 1500}), 1) if ask.kind == "lstm"]
    assert all(2 <= ask.steps < 64 for ask in large)
    assert all(ask.work <= 2 * LARGEST["cpu"] or ask.steps == 2 for ask in large)
    assert {ask.steps for ask in asks_of(units({"hidden": 1500}), 1, "cuda") if ask.kind == "lstm"} == {64, 16, 4, 2}


@pytest.mark.parametrize(("kind", "layers"), [("cpu", {1}), ("cuda", {1, 3})])
def test_on_a_gpu_equal_layers_are_timed_together(kind: str, layers: set[int]) -> None:
    assert {ask.layers for ask in asks_of(units(), 1, kind) if ask.kind == "lstm"} == layers


def test_several_layers_of_a_large_model_are_timed_as_few() -> None:
    [together] = [ask for ask in asks_of(units({"hidden": 8192, "layers": 24}), 1, "cuda") if ask.layers > 1]
    assert together.layers == 2
    assert together.work <= 1.1 * LARGEST["cuda"]  # steps are whole


def test_an_ask_travels_as_json() -> None:
    ask = Ask("lstm", 3, 4, 5, 6, 7, "bf16", 4, 2)
    assert Ask(**json.loads(json.dumps(asdict(ask)))) == ask
    assert ask.twice().steps == 12
