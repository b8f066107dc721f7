from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _machines import GIB, machine

from carrywave.plan.cost.cluster import Cluster
from carrywave.plan.cost.units import Units
from carrywave.plan.search.memory_advice import fits
from carrywave.plan.search.partition import NoFit
from carrywave.plan.search.predictor import Prediction
from carrywave.plan.search.search import search
from carrywave.plan.search.space import Space
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec


def units_of(vocabulary: int = 4096, **parts: object) -> Units:
    spec = {"model": {"hidden": 1024, "layers": 4}, "batch": {"lanes": 64, "steps": 256}, **parts}
    return Units.of(Spec.model_validate(spec), DataFacts(vocabulary=vocabulary))


def refusal(units: Units, devices: int, gib: float) -> str:
    with pytest.raises(NoFit) as error:
        search(units, Cluster.uniform(machine(memory_bytes=int(gib * GIB)), devices))
    said = str(error.value)
    assert "\n" not in said
    return said


def test_what_would_make_it_fit_does() -> None:
    units = units_of()
    said = refusal(units, 1, 0.55)
    found = re.fullmatch(
        r"the model does not fit on 1 device: at best, stage 0 \(the encoder to the head\) exceeds the 563 MiB of its device by .*; "
        r"it fits with (\d+) such devices, train.optimizer=sgd or ([\d.]+) MiB more memory on each device",
        said,
    )
    assert found is not None, said
    devices, more = int(found[1]), float(found[2])
    small = machine(memory_bytes=int(0.55 * GIB))

    def space(units: Units = units, devices: int = 1, more: float = 0.0) -> Space:
        return Space(units, Cluster.uniform(replace(small, memory_bytes=small.memory_bytes + int(more * 2**20)), devices))

    assert not fits(space())
    assert fits(space(devices=devices))
    assert not fits(space(devices=devices - 1))
    assert fits(space(replace(units, states=0)))
    assert fits(space(more=more))
    assert not fits(space(more=more * 0.9))


def test_a_unit_that_no_device_holds_is_named_and_more_devices_are_not_offered() -> None:
    said = refusal(units_of(200_000), 4, 1.0)
    assert "the encoder alone exceeds" in said or "the head alone exceeds" in said
    assert "of the largest device" in said
    assert "such devices" not in said
    assert said.endswith(" more memory on each device")


def test_batches_that_must_be_smaller_are_told_how_much() -> None:
    """Where time is not cut, lanes are what is left to save, and micro-batches have a lane each at least."""

    def both_ways(tokens: int) -> Units:
        spec = {"task": "tagging", "model": {"hidden": 512, "layers": 4, "bidirectional": True}, "batch": {"tokens": tokens}}
        return Units.of(Spec.model_validate(spec), DataFacts(vocabulary=100, labels=("a", "b"), longest=4096))

    said = refusal(both_ways(4096 * 64), 1, 1.0)
    found = re.search(r"1/(\d+) of batch.tokens[, ]", said)
    assert found is not None, said
    cluster = Cluster.uniform(machine(memory_bytes=GIB), 1)
    assert fits(Space(both_ways(4096 * 64 // int(found[1])), cluster))
    assert not fits(Space(both_ways(4096 * 64 // (int(found[1]) - 1)), cluster))


def test_long_sequences_are_recomputed_and_at_two_levels_only_where_one_does_not_fit() -> None:
    """A million steps of one lane: chunks of 245 steps and their carries fit, and then a few of the carries."""
    units = units_of(64, model={"hidden": 512, "layers": 2}, batch={"lanes": 1, "steps": 1_000_000}, train={"optimizer": "sgd"})

    def best(gib: float) -> Prediction:
        return search(units, Cluster.uniform(machine(memory_bytes=int(gib * GIB)), 1)).best

    roomy, small, tiny = best(64.0), best(0.25), best(0.065)
    assert (roomy.plan.recompute, small.plan.recompute, tiny.plan.recompute) == (False, True, "twice")
    assert roomy.seconds < small.seconds < tiny.seconds
    assert tiny.stages[0].memory.total <= tiny.stages[0].limit_bytes
