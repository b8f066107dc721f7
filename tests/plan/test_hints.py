"""Hints of settings that would be much faster, from the profile of a real GPU that ships."""

from __future__ import annotations

from dataclasses import replace

import pytest

from carrywave.plan.cost.cluster import Cluster
from carrywave.plan.cost.profile import Link
from carrywave.plan.cost.shipped_profiles import shipped
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan
from carrywave.plan.search.predictor import Predictor
from carrywave.plan.show.hints import MUCH, Hint, hint_lines, one_device, other_settings
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec

H200 = shipped("h200")
ONE = Cluster.uniform(H200, 1)
FACTS = DataFacts(vocabulary=33278, sequences=1, steps=2_000_000, longest=2_000_000)


def spec(lanes: int = 20, hidden: int = 650, precision: str = "fp32") -> Spec:
    return parse({"model": {"hidden": hidden}, "batch": {"lanes": lanes, "steps": 35}, "train": {"precision": precision}})


def found(
    asked: Spec, *, facts: DataFacts = FACTS, cluster: Cluster = ONE, plan: Plan | None = None, bf16: bool = True
) -> dict[str, float]:
    units = Units.of(asked, facts)
    return {each.setting: each.gain for each in other_settings(asked, facts, units, cluster, plan or Plan(), bf16=bf16)}


def test_bf16_is_named_where_fp32_was_asked_for_on_such_a_gpu() -> None:
    # Measured by `benchmarks.step` and `benchmarks.train` on this GPU: several times as fast.
    assert 2 < found(spec())["train.precision=bf16"] < 10
    assert "train.precision=bf16" not in found(spec(precision="bf16"))
    assert "train.precision=bf16" not in found(spec(precision="fp64"))  # who asks for that has a reason
    assert "train.precision=bf16" not in found(spec(), bf16=False)


def test_the_gain_is_the_planners() -> None:
    def speed(asked: Spec) -> float:
        return Predictor(Units.of(asked, FACTS), ONE).predict(Plan()).tokens_per_second

    gain = found(spec(precision="bf16"))["batch.lanes=40"]
    assert gain == pytest.approx(speed(spec(40, precision="bf16")) / speed(spec(precision="bf16")))
    assert gain >= MUCH


def test_more_lanes_are_named_only_where_they_pay_and_the_data_has_enough() -> None:
    assert not found(spec(512, 2048, "bf16"))  # it fills the GPU
    few = replace(FACTS, steps=40 * 35 * 15, longest=40 * 35 * 15)  # 15 batches an epoch
    assert not found(spec(precision="bf16"), facts=few)
    assert not found(spec(precision="bf16"), facts=DataFacts(vocabulary=33278))  # how much data there is is not known
    sequences = parse({"task": "tagging", "batch": {"tokens": 2048}, "train": {"precision": "bf16"}})
    tags = DataFacts(vocabulary=500, labels=("a", "b"), sequences=10**5, steps=10**7, longest=100, histogram=((100, 10**5),))
    assert set(found(sequences, facts=tags)) <= {"batch.tokens=4096", "batch.tokens=8192"}
    assert found(sequences, facts=tags)


def test_what_does_not_fit_is_not_named() -> None:
    units = Units.of(spec(precision="bf16"), FACTS)
    memories = [
        Predictor(each, ONE).memories(Plan())[0].total
        for each in (units, *(replace(units, shapes=tuple(replace(s, lanes=n * s.lanes) for s in units.shapes)) for n in (2, 4)))
    ]
    small = replace(H200, memory_bytes=(memories[0] + memories[1]) // 2)
    assert not found(spec(precision="bf16"), cluster=Cluster.uniform(small, 1))


def test_one_device_instead_of_four_where_that_is_much_faster() -> None:
    slow = Cluster.uniform(replace(H200, within=Link(1e-3, 1e9), between=None), 4)
    units = Units.of(spec(hidden=128, precision="bf16"), FACTS)
    [hint] = one_device(units, slow, Plan(4))
    assert (hint.setting, hint.changes) == ("devices=1", "")
    assert not one_device(units, slow, Plan())  # it is one
    large = Units.of(spec(512, 2048), FACTS)
    assert not one_device(large, Cluster.uniform(H200, 4), Plan(4))


def test_one_line_that_is_true_of_each() -> None:
    precision, lanes = Hint("train.precision=bf16", 4.02, "h200", "the precision"), Hint("batch.lanes=40", 1.61, "h200", "the batch")
    assert hint_lines([]) == []
    assert hint_lines([lanes, precision]) == [
        "this run would be much faster with train.precision=bf16 (about 4.0 times as fast) or batch.lanes=40 (about 1.6 times as fast), as "
        "predicted from the profile of h200; the batch and the precision change the result of training, so the decision is yours"
    ]
    assert hint_lines([Hint("devices=1", 1.8, "h200")]) == [
        "this run would be much faster with devices=1 (about 1.8 times as fast), as predicted from the profile of h200"
    ]
    assert hint_lines([lanes])[0].endswith("; the batch changes the result of training, so the decision is yours")


def test_without_figures_nothing_is_said() -> None:
    assert not found(spec(), cluster=Cluster.uniform(replace(H200, samples=()), 1))
