from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from carrywave.errors import PlanError
from carrywave.model.encoders import Embedding
from carrywave.model.heads import Softmax
from carrywave.model.lstm import class_of
from carrywave.model.model import Model
from carrywave.model.parameter_placement import Holding, hold, shared
from carrywave.plan.cost.memory import Load, Split, one_micro_batch, stage_memory
from carrywave.plan.cost.units import BatchShape, Units
from carrywave.plan.plan import Plan
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec


def build(**model: Any) -> tuple[Units, Model]:
    spec = Spec.model_validate({"model": model})
    units = Units.of(spec, DataFacts(vocabulary=37))
    asked = spec.model
    encoder = Embedding(37, asked.embedding or asked.widths[0])
    lstm = class_of(asked.cell)(
        encoder.width,
        asked.widths,
        asked.layers,
        proj_size=asked.projection,
        layer_norm=asked.layer_norm,
        learned_carry=asked.learned_carry,
    )
    return units, Model(encoder, lstm, Softmax(lstm.output_size, 37, tied=encoder.weight if asked.tie else None))


MODELS: list[dict[str, Any]] = [
    {"hidden": 8, "layers": 2},
    {"hidden": [8, 12, 6], "layers": 3, "embedding": 5},
    {"hidden": 8, "layers": 2, "projection": 3, "layer_norm": True, "learned_carry": True},
    {"hidden": 8, "layers": 2, "tie": True},
    {"hidden": [8, 12], "layers": 2, "cell": "rnn", "learned_carry": True},
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("share_head", [False, True])
def test_each_stage_holds_the_parameters_that_the_runtime_gives_it(model: dict[str, Any], share_head: bool) -> None:
    units, _ = build(**model)
    for cuts in [(), (1,), (2,), (1, 2), (2, 3)]:
        if share_head and not cuts:
            continue
        edges = (0, *cuts, len(units))
        _, whole = build(**model)
        tied = {each.name: each.stages for each in shared(whole, cuts, share_head=share_head)}
        sizes = {name: parameter.numel() for name, parameter in whole.named_parameters()}
        count, members = units.common(edges, share_head=share_head)
        assert count == sum(sizes[name] for name in tied)
        assert set(tied.values()) <= {members}
        for first, last in pairwise(edges):
            _, part = build(**model)
            held = hold(part, Holding(first, last, next(part.parameters()).device, share_head), next(part.parameters()).dtype)
            assert units.parameters(first, last, share_head=share_head) == sum(tensor.numel() for tensor in held.values())
            assert units.tensors(first, last, share_head=share_head) == len(held)


def test_equal_layers_are_alike() -> None:
    units, _ = build(hidden=[8, 8, 8, 8, 6], layers=5, embedding=5)
    assert units.runs == [(0, 1), (1, 2), (2, 5), (5, 6), (6, 7)]
    assert units.alike(3, 5) == (2, 4)
    assert units.alike(4, 6) == (4, 6)
    assert units.alike(0, 7) == (0, 7)


def test_messages_are_as_wide_as_what_enters_a_unit() -> None:
    units, _ = build(hidden=[8, 12], layers=2, embedding=5)
    assert [unit.width_in for unit in units.units] == [0, 5, 8, 12]
    assert [unit.width_out for unit in units.units] == [5, 8, 12, 0]


def test_batches_of_sequences_stand_for_equal_parts_of_all_steps() -> None:
    spec = Spec.model_validate({"task": "classification", "batch": {"tokens": 1000}})
    facts = DataFacts(features=3, labels=("a", "b"), histogram=((10, 60), (50, 12), (100, 6)))
    units = Units.of(spec, facts)
    assert units.shapes == (BatchShape(100, 10, 1 / 3), BatchShape(20, 50, 1 / 3), BatchShape(10, 100, 1 / 3))
    assert units.tokens == pytest.approx(1000)
    assert (units.pooled, units.streams) == (True, False)
    one = Units.of(spec, DataFacts(features=3, labels=("a",), longest=2000))
    assert one.shapes == (BatchShape(1, 1000),)


def test_micro_batches_share_lanes_as_the_runtime_does_and_shards_take_their_place() -> None:
    units, _ = build(hidden=8, layers=2)
    assert units.micro_batches(Plan(micro_batches=3), 10) == [3, 3, 4]
    assert units.micro_batches(Plan(micro_batches=3), 2) == [1, 1]
    fixed = Units.of(Spec.model_validate({"train": {"reproducible": True}}), DataFacts(vocabulary=5))
    assert fixed.micro_batches(Plan(replicas=2), 16) == [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("task", "facts"), [("language", DataFacts()), ("tagging", DataFacts(features=2)), ("regression", DataFacts(features=2))]
)
def test_data_that_says_nothing_of_the_model_is_refused(task: str, facts: DataFacts) -> None:
    with pytest.raises(PlanError, match="the data has"):
        Units.of(Spec.model_validate({"task": task}), facts)


def test_what_an_optimizer_keeps() -> None:
    def states(**train: Any) -> int:
        return Units.of(Spec.model_validate({"train": train}), DataFacts(vocabulary=5)).states

    assert [states(optimizer="adam"), states(optimizer="sgd"), states(optimizer="sgd", momentum=0.9), states(optimizer="ntasgd")] == [
        2,
        0,
        1,
        1,
    ]


def test_a_window_in_half_precision_is_held_while_all_of_its_gradients_are_pending() -> None:
    """On GPUs the kernels free what they saved of a window after its last backward; in float32, chunk by chunk."""
    load, split = one_micro_batch(4, put_off=True), Split(8, 16, 64, 8, put_off=True, recompute=False, share_head=False, reduced=False)
    found = {}
    for precision in ("fp32", "bf16"):
        spec = Spec.model_validate({"model": {"hidden": 512, "layers": 4}, "train": {"precision": precision}})
        units = Units.of(spec, DataFacts(vocabulary=4096))
        parts = [stage_memory(units, 1, 3, Load((pair,)), split).activations for pair in ((4, 0), (0, 4))]
        found[precision] = stage_memory(units, 1, 3, load, split).activations, parts
    assert found["fp32"][0] == max(found["fp32"][1])
    assert found["bf16"][0] == sum(found["bf16"][1])
