from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from carrywave.data.codec import Codec
from carrywave.errors import PlanError
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.model.lstm import class_of
from carrywave.model.model import Model
from carrywave.model.parameter_placement import Holding, hold, shared
from carrywave.plan.cost import UnitCosts
from carrywave.plan.memory import Footprint
from carrywave.plan.plan import Plan
from carrywave.plan.profile import shipped
from carrywave.plan.units import BatchShape, Units
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec
from carrywave.tasks.task import Task


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
        cell_norm=asked.cell_norm,
        num_heads=asked.heads,
        learned_carry=asked.learned_carry,
    )
    return units, Model(encoder, lstm, Softmax(lstm.output_size, 37, tied=encoder.weight if asked.tie else None))


POOLS = ("last", "attention", "mean_max")
MODELS: list[dict[str, Any]] = [
    {"hidden": 8, "layers": 2},
    {"hidden": [8, 12, 6], "layers": 3, "embedding": 5},
    {"hidden": 8, "layers": 2, "projection": 3, "layer_norm": True, "learned_carry": True},
    {"hidden": 8, "layers": 2, "tie": True},
    {"hidden": [8, 12], "layers": 2, "cell": "rnn", "learned_carry": True},
    {"hidden": 8, "layers": 2, "cell_norm": True, "zoneout": [0.1, 0.2], "recurrent_dropout": 0.1},
    {"hidden": [8, 12], "layers": 2, "cell": "slstm", "heads": 4, "learned_carry": True, "cell_norm": True},
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


FRONT = [{"channels": 5, "kernel": 5, "stride": 3}, {"channels": 6, "kernel": 3, "stride": 2}]
TEXT = DataFacts(vocabulary=7, labels=("O", "B-x", "I-x"), steps=1000, sequences=10, longest=100, histogram=((100, 10),))
NUMBERS = replace(TEXT, vocabulary=0, features=3)
SPELLED = replace(TEXT, characters=9, word_length=5)


@pytest.mark.parametrize(
    ("task", "facts", "model"),
    [
        *(("classification", facts, {"bidirectional": True, "front": FRONT, "pool": pool}) for facts in (NUMBERS, TEXT) for pool in POOLS),
        ("tagging", SPELLED, {"characters": 50, "front": "none", "dropout": 0.2}),
        *(("tagging", SPELLED, {"characters": 50, "crf": True, "word_scores": rows}) for rows in (0, 64)),
    ],
)
def test_every_part_has_the_parameters_of_the_model_and_costs_time(task: str, facts: DataFacts, model: dict[str, Any]) -> None:
    how = {"batch": {"tokens": 400}, "train": {"precision": "fp32"}}
    spec = Spec.model_validate({"task": task, "model": {"hidden": 8, "layers": 2, **model}, **how})
    units = Units.of(spec, facts)
    held = dict(Task(spec, Codec(task, "tokens" if facts.vocabulary else "steps"), facts).model().named_parameters())
    for first, last, names in ((0, 1, ("encoder",)), (1, 3, ("lstm",)), (3, 4, ("head",)), (0, 4, ("",))):
        assert units.parameters(first, last) == sum(parameter.numel() for name, parameter in held.items() if name.startswith(names))
    assert units.units[0].width_out == units.units[1].width_in
    plain = Units.of(spec.model_copy(update={"model": type(spec.model)(hidden=8, layers=2, crf=False)}), replace(facts, characters=0))
    for number in (0, 3) if "crf" in model else (0,):
        costs = [UnitCosts(each, shipped("h200"), 1)(number, 4, 100).all for each in (units, plain)]
        assert costs[0] > costs[1]


def test_a_front_makes_one_step_of_several() -> None:
    model = {"bidirectional": True, "front": FRONT}
    units = Units.of(Spec.model_validate({"task": "classification", "model": model, "batch": {"tokens": 400}}), NUMBERS)
    assert units.whole
    assert units.shapes == (BatchShape(4, 17),)  # 100 steps become 34, and those 17
    assert units.tokens == 4 * 17 * 6


def test_batches_of_sequences_stand_for_equal_parts_of_all_steps() -> None:
    spec = Spec.model_validate({"task": "classification", "batch": {"tokens": 1000}})
    facts = DataFacts(features=3, labels=("a", "b"), histogram=((10, 60), (50, 12), (100, 6)))
    units = Units.of(spec, facts)
    assert units.shapes == (BatchShape(100, 10, 1 / 3), BatchShape(20, 50, 1 / 3), BatchShape(10, 100, 1 / 3))
    assert units.tokens == pytest.approx(1000)
    assert (units.pooled, units.streams) == (True, False)
    one = Units.of(spec, DataFacts(features=3, labels=("a",), longest=2000))
    assert one.shapes == (BatchShape(1, 1000),)


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
    found = {}
    for precision in ("fp32", "bf16"):
        spec = Spec.model_validate({"model": {"hidden": 512, "layers": 4}, "train": {"precision": precision}})
        units = Units.of(spec, DataFacts(vocabulary=4096))
        kept, waiting = (sum(getattr(unit, name) for unit in units.units[1:3]) for name in ("kept", "deferred"))
        kept += units.units[1].width_in
        of_chunk = 8 * 16 * units.activation_bytes
        held = Footprint(Plan(chunk_steps=16), BatchShape(8, 64), units).memory(0, 1, 3).activations
        found[precision] = held, (4 * kept * of_chunk, 4 * waiting * of_chunk)
    assert found["fp32"][0] == max(found["fp32"][1])
    assert found["bf16"][0] == sum(found["bf16"][1])
