"""Every plan computes what one device computes: drawn cases on up to four real processes, dropout on, against `Plan.serial()`.

One crew of workers serves all cases. Compared are the loss and the norm of every step, every gradient of the first step and every
weight after the last; and replicas, and stages that share a tied matrix, must hold the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from _broken import MISTAKES
from _cases import CELLS, Case, changed
from _check import check, check_drawn, run
from _crew import Crew
from _fixed import LONG, PLANS, SHARED, a_case, a_plan, sequences, windows_of_64


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(4) as workers:
        yield workers


@pytest.fixture(scope="module")
def ordered() -> Iterator[Crew]:
    with Crew(4, backend="in order") as workers:
        yield workers


@pytest.fixture(scope="module")
def mapped() -> Iterator[Crew]:
    with Crew(4, backend="mapped") as workers:
        yield workers


@pytest.fixture(scope="module")
def strict() -> Iterator[Crew]:
    with Crew(4, backend="one at a time") as workers:
        yield workers


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("workers", "examples"), [(1, 6), (2, 6), (3, 6), (4, 6)])
def test_any_plan_gives_the_answer_of_one_device(workers: int, examples: int, crew: Crew) -> None:
    check_drawn(workers, examples, crew)


@pytest.mark.parametrize("plan", PLANS)
def test_resets_give_the_answer_of_one_device(plan: str, crew: Crew) -> None:
    """In lanes that go on from window to window, whose initial carry is learned."""
    check(a_case(plan=PLANS[plan], resets=0.3), crew)
    check(a_case(plan={**PLANS[plan], "recompute": "twice"}, resets=0.3), crew)
    check(sequences(task="tagging", plan={**PLANS[plan], "chunk_steps": None}, model__bidirectional=True, resets=0.3), crew)


@pytest.mark.parametrize("plan", ["replicas", *(pytest.param(plan, marks=pytest.mark.slow) for plan in PLANS if plan != "replicas")])
@pytest.mark.parametrize("pool", ["last", "mean_max", "attention"])
def test_sequences_in_a_lane_that_are_pooled_give_the_answer_of_one_device(pool: str, plan: str, crew: Crew) -> None:
    check(sequences(plan=PLANS[plan], model__pool=pool, resets=0.3), crew)
    check(sequences(task="regression", plan={**PLANS[plan], "chunk_steps": 1, "recompute": "twice"}, model__pool=pool, resets=0.3), crew)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", [*PLANS, "head shared by three"])
@pytest.mark.parametrize("kind", ["cnn", "lstm"])
def test_characters_of_words_give_the_answer_of_one_device(kind: str, plan: str, crew: Crew) -> None:
    """Also with rare words that are read as unknown ones, cut in time, and in lanes that hold several sequences."""
    words = sequences(task="tagging", plan=(PLANS | SHARED)[plan], model__numbers=False, model__characters=kind)
    check(words, crew)
    check(changed(words, resets=0.3, padding="odd"), crew)


@pytest.mark.parametrize("plan", ["both", *(pytest.param(plan, marks=pytest.mark.slow) for plan in (PLANS | SHARED) if plan != "both")])
def test_weights_of_targets_give_the_answer_of_one_device(plan: str, crew: Crew) -> None:
    asked = (PLANS | SHARED)[plan]
    check(a_case(plan=asked, weights="step"), crew)
    check(a_case(plan={**asked, "recompute": "twice"}, weights="lane"), crew)
    check(a_case(task="forecasting", model__numbers=True, model__tie=False, model__quantiles=True, plan=asked, weights="ahead"), crew)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_weights_of_sequences_give_the_answer_of_one_device(task: str, plan: str, crew: Crew) -> None:
    check(sequences(task=task, plan=PLANS[plan], weights="lane"), crew)
    check(sequences(task=task, plan={**PLANS[plan], "chunk_steps": 1}, model__pool="mean_max", resets=0.3, weights="lane"), crew)


STAGES = {name: plan for name, plan in (PLANS | SHARED | LONG).items() if plan["stages"] > 1}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", STAGES)
def test_messages_over_pairs_give_the_answer_of_one_device(plan: str, ordered: Crew) -> None:
    """As NCCL gets them, carried by gloo: a group for each pair of stages, in batches, and sums after them."""
    check(a_case(plan=STAGES[plan]), ordered)


@pytest.mark.slow
@pytest.mark.parametrize("plan", STAGES)
def test_messages_one_at_a_time_give_the_answer_of_one_device(plan: str, strict: Crew) -> None:
    """The same where a batch waits for all that its stage issued before it, whichever pair they belong to."""
    check(a_case(plan=STAGES[plan]), strict)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", PLANS | SHARED)
def test_messages_written_into_the_neighbours_memory_give_the_answer_of_one_device(plan: str, mapped: Crew) -> None:
    """As between GPUs of one host: read in place, in buffers that are used again, with sums by the same way."""
    check(a_case(plan=(PLANS | SHARED)[plan]), mapped)


@pytest.mark.parametrize("schedule", ["sequential", "gpipe"])
@pytest.mark.parametrize("stages", [2, 4])
def test_other_schedules_in_the_neighbours_memory(schedule: str, stages: int, mapped: Crew) -> None:
    chunk_steps = None if schedule == "gpipe" else 2
    plan = a_plan(stages=stages, cuts=[], chunk_steps=chunk_steps, micro_batches=3 if schedule == "gpipe" else 1)
    model = {"model__widths": [5, 5, 5, 5], "model__tie": False}
    check(a_case(plan=plan, schedule=schedule, **model), mapped)


def test_more_chunks_wait_for_a_shared_head_than_there_are_signals_in_shared_memory(mapped: Crew) -> None:
    check(windows_of_64(plan=a_plan(stages=2, cuts=[2], chunk_steps=1, share_head=True)), mapped)


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_messages_in_shared_memory_on_any_plan(workers: int, mapped: Crew) -> None:
    check_drawn(workers, 8, mapped)


def test_ranks_dealt_out_over_hosts_give_the_answer_of_one_device(crew: Crew) -> None:
    """Ranks 0 and 2 are on one host, 1 and 3 on another, as Slurm may deal them out: each host has a replica of two stages."""
    plan = a_plan(replicas=2, stages=2, cuts=[2], share_head=True)
    check(a_case(plan=plan, hosts=["a", "b", "a", "b"]), crew)


def test_a_stage_without_parameters_sends_what_the_others_send(crew: Crew) -> None:
    """Numbers need no encoder: the first stage has nothing to sum over replicas, and takes part in the sums of the step all the same."""
    plan = a_plan(replicas=2, stages=2, cuts=[1])
    check(a_case(task="forecasting", model__numbers=True, model__tie=False, model__learned_carry=False, plan=plan), crew)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_messages_over_pairs_on_any_plan(workers: int, ordered: Crew) -> None:
    check_drawn(workers, 40, ordered)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_messages_one_at_a_time_on_any_plan(workers: int, strict: Crew) -> None:
    check_drawn(workers, 40, strict)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_any_of_many_plans_gives_the_answer_of_one_device(workers: int, crew: Crew) -> None:
    check_drawn(workers, 100, crew)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [2, 4])
def test_float32_differs_by_the_order_of_summation(workers: int, crew: Crew) -> None:
    # Some hundreds of terms, each rounded at 6e-8, in another order. Not Adam: it divides a gradient by its own size, so that
    # one that is nothing but rounding counts as much as any other.
    check_drawn(workers, 4, crew, limit=1e-5, floor=1e-2, precision="fp32", optimizers=("sgd", "momentum"))


# For each mistake a case and a plan that it does harm to.
WRONG: list[tuple[str, Case]] = [
    ("mean of means", sequences(task="tagging")),
    ("mean of means", windows_of_64()),
    ("last padded step", sequences()),
    ("last padded step", sequences(plan=a_plan(stages=2, cuts=[2], chunk_steps=2))),
    ("tail dropped", windows_of_64()),
    ("tail counted twice", windows_of_64()),
    ("carry not reset", a_case()),
    ("carry not reset", a_case(plan=PLANS["stages"], model__learned_carry=False)),
    ("resets of the first chunk", a_case(plan=PLANS["stages"], resets=0.3)),
    ("changes across resets", a_case(resets=0.3)),
    ("rank-keyed dropout", a_case()),
    ("rank-keyed dropout", a_case(plan=PLANS["stages"])),
    ("local lanes", a_case()),
    ("carry gradient dropped", a_case(plan=PLANS["stages"])),
    ("tied not summed", a_case(plan=PLANS["stages"])),
    ("tied not summed", a_case(plan=SHARED["head shared by three"])),
    ("head not summed", a_case(plan=SHARED["head shared"], model__tie=False)),
    ("head not summed", a_case(plan=SHARED["head shared by replicas"])),
    ("score not returned", a_case(plan=SHARED["head shared by three"])),
    ("summed twice", a_case(train__clip=None)),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("mistake", "case"), WRONG, ids=[name for name, _ in WRONG])
def test_a_mistake_is_seen(mistake: str, case: Case, crew: Crew) -> None:
    check(case, crew)
    with pytest.raises(AssertionError, match=r"is off by|differs in its bits"):
        # Not by a hair: a mistake is no matter of rounding.
        check(changed(case, broken=mistake), crew, limit=1e-6)


def test_every_mistake_is_tried() -> None:
    assert {mistake for mistake, _ in WRONG} == set(MISTAKES)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("task", ["tagging", "classification"])
@pytest.mark.parametrize("plan", PLANS)
def test_several_labels_give_the_answer_of_one_device(plan: str, task: str, crew: Crew) -> None:
    check(sequences(task=task, model__multi_label=True, model__class_weights=True, plan=PLANS[plan]), crew)
    check(sequences(task=task, model__multi_label=True, plan=PLANS[plan], resets=0.3), crew)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("distribution", "past"), [("normal", 0), ("student_t", 4), ("negative_binomial", 1), ("negative_binomial", 4), ("poisson", 4)]
)
def test_distributions_give_the_answer_of_one_device(plan: str, distribution: str, past: int, crew: Crew) -> None:
    how = {"model__numbers": True, "model__tie": False, "model__distribution": distribution, "model__past": past}
    check(a_case(task="forecasting", **how, plan=PLANS[plan]), crew)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("plan", SHARED)
@pytest.mark.parametrize(
    "case",
    [
        a_case(),
        a_case(model__tie=False, plan__recompute="twice"),
        a_case(task="forecasting", model__numbers=True, model__tie=False, model__distribution="negative_binomial", model__past=4),
        a_case(task="forecasting", model__numbers=True, model__tie=False, model__quantiles=True),
        a_case(task="forecasting", model__numbers=True, model__tie=False, model__past=5),
        sequences(task="tagging", model__bidirectional=True, model__class_weights=True),
        sequences(task="tagging", model__multi_label=True, model__class_weights=True),
    ],
    ids=["tied", "recomputed twice", "counts", "forecasting", "past values", "both ways", "several labels"],
)
def test_a_shared_head_gives_the_answer_of_one_device(case: Case, plan: str, crew: Crew) -> None:
    asked = {**SHARED[plan], "recompute": case["plan"]["recompute"]}
    check(changed(case, plan=asked), crew)


# Cells that run on their definition on some plans, one that has a backward of its own on all of them.
CELL_PLANS = [
    pytest.param(cell, plan, marks=[] if plan == "both" else pytest.mark.slow)
    for cell in CELLS
    if cell != "lstm"
    for plan in (PLANS | SHARED | LONG if cell == "gru" else PLANS)
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("cell", "plan"), CELL_PLANS)
def test_every_cell_gives_the_answer_of_one_device(cell: str, plan: str, crew: Crew) -> None:
    """Streams with lengths, fresh lanes, dropout everywhere and a learned carry, in chunks that are computed twice."""
    check(a_case(plan={**(PLANS | SHARED | LONG)[plan], "recompute": "twice"}, model__cell=cell), crew)


def test_an_adaptive_softmax_gives_the_answer_of_one_device(crew: Crew) -> None:
    """Clusters that some chunks need on some workers, and others do not."""
    check(a_case(plan=SHARED["head shared by replicas"], model__tie=False, model__adaptive=True), crew)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "plan",
    [a_plan(replicas=3), a_plan(stages=2, cuts=[2], micro_batches=3), a_plan(replicas=2, stages=2, cuts=[1], micro_batches=2)],
    ids=["replicas", "stages", "both"],
)
@pytest.mark.parametrize("head", ["chain", "crf"])
def test_a_head_that_reads_whole_sequences_gives_the_answer_of_one_device(plan: dict[str, Any], head: str, crew: Crew) -> None:
    """A user's own, and ours with forbidden transitions and steps without a label."""
    check(sequences(task="tagging", plan=plan, model__cell="rnn", **{f"model__{head}": True}), crew)


@pytest.mark.parametrize(
    "plan",
    [
        a_plan(replicas=2, micro_batches=2),
        a_plan(stages=2, cuts=[2], micro_batches=3),
        a_plan(replicas=2, stages=2, cuts=[1], recompute=True),
    ],
    ids=["replicas", "stages", "both"],
)
def test_scores_of_words_give_the_answer_of_one_device(plan: dict[str, Any], crew: Crew) -> None:
    """Whatever stands in padding, and although features are left out at random."""
    asked = {"numbers": False, "characters": "cnn", "crf": True, "word_scores": True}
    check(sequences(task="tagging", plan=plan, padding="odd", **{f"model__{name}": value for name, value in asked.items()}), crew)


FRONT = [(4, 5, 2), (5, 3, 2)]


@pytest.mark.parametrize(
    ("plan", "asked"),
    [
        (a_plan(replicas=3), {"upsample": 2}),
        (a_plan(stages=2, cuts=[2], micro_batches=3), {"upsample": 3, "bidirectional": True, "numbers": False}),
        (a_plan(replicas=2, stages=2, cuts=[1], micro_batches=2, recompute=True), {"upsample": 1, "bidirectional": True}),
        (a_plan(replicas=2, micro_batches=2), {"upsample": 4, "front": FRONT}),
    ],
    ids=["replicas", "stages", "both", "front"],
)
def test_a_transcription_gives_the_answer_of_one_device(plan: dict[str, Any], asked: dict[str, Any], crew: Crew) -> None:
    """Also for lanes without labels, and for lanes without steps."""
    case = sequences(task="transcription", plan=plan, train__beta=0.0, **{f"model__{name}": value for name, value in asked.items()})
    check(case, crew)


@pytest.mark.parametrize(
    ("plan", "pool"),
    [
        (a_plan(replicas=3), "mean_max"),
        (a_plan(stages=2, cuts=[1], micro_batches=3), "attention"),
        (a_plan(replicas=2, stages=2, cuts=[2], micro_batches=2, recompute=True), "max"),
    ],
    ids=["replicas", "stages", "both"],
)
def test_a_front_gives_the_answer_of_one_device(plan: dict[str, Any], pool: str, crew: Crew) -> None:
    """Also for lanes that are shorter than its stride, or have no step at all."""
    asked = {"front": FRONT, "pool": pool, "bidirectional": True, "label_smoothing": 0.1}
    check(sequences(plan=plan, train__beta=0.0, **{f"model__{name}": value for name, value in asked.items()}), crew)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "case",
    [
        a_case(task="forecasting", model__numbers=True, model__tie=False),
        sequences(),
        sequences(task="regression", model__pool="mean"),
        sequences(task="tagging", model__bidirectional=True),
        sequences(task="tagging", model__bidirectional=True, model__cell="gru"),
        sequences(model__front=FRONT, model__pool="attention", train__beta=0.0),
        sequences(task="transcription", model__upsample=2),
        a_case(),
    ],
    ids=["forecasting", "last", "mean", "both ways", "gru both ways", "front", "transcription", "words"],
)
def test_what_stands_in_padding_changes_no_bit(case: Case, plan: str, crew: Crew) -> None:
    """NaN among numbers, another word among words; targets too."""
    case = changed(case, plan=PLANS[plan])
    if case["model"].get("front") or case["task"] == "transcription":
        case = changed(case, plan__chunk_steps=None)
    plain, odd = (run(changed(case, padding=kind), crew).bits() for kind in ("plain", "odd"))
    assert plain.keys() == odd.keys()
    assert [name for name, tensor in plain.items() if not torch.equal(tensor, odd[name])] == []
    assert all(tensor.isfinite().all() for tensor in odd.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bucket_bytes", [None, 64])
@pytest.mark.parametrize(
    "plan",
    [
        a_plan(replicas=4),
        PLANS["both"],
        SHARED["head shared by replicas"],
    ],
    ids=["replicas", "both", "head shared"],
)
def test_bits_repeat(plan: dict[str, Any], bucket_bytes: int | None, crew: Crew) -> None:
    """With four workers: with two, a sum in another order has the same bits."""
    case = a_case(plan=plan, bucket_bytes=bucket_bytes, train__precision="fp32")
    first, second = run(case, crew).bits(), run(case, crew).bits()
    assert first.keys() == second.keys()
    assert [name for name, tensor in first.items() if not torch.equal(tensor, second[name])] == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", PLANS | SHARED)
@pytest.mark.parametrize(
    ("precision", "limit"),
    # Every product and every message is rounded to 8 bits, or to 11. Rounding errors of a tensor's elements are independent, and the
    # norm averages over them; a few roundings in a row remain, which here and there fall the other way: four units in the last place.
    [("bf16", 2.0**-6), ("fp16", 2.0**-9)],
)
def test_halves_differ_by_a_few_roundings(precision: str, limit: float, plan: str, crew: Crew) -> None:
    case = a_case(plan=(PLANS | SHARED)[plan], train__precision=precision, train__optimizer="sgd", train__lr=0.1, model__layer_norm=False)
    print(f"the largest relative error is {check(case, crew, limit=limit, floor=0.05):.2g}")


@pytest.mark.parametrize("plan", ["replicas", "both"])
def test_an_overflow_on_one_worker_is_skipped_by_all(plan: str, crew: Crew) -> None:
    """The targets of the last lane are so large that its gradient overflows fp16, on the replica that holds it and nowhere else."""
    small = {"steps": 3, "lengths": [3, 2, 3, 1], "fresh": [True] * 4}
    large = {**small, "target_factors": {"3": 1e6}}
    case = sequences(task="regression", train__precision="fp16", train__alpha=0.0, train__beta=0.0, plan=PLANS[plan])
    start, after = run(changed(case, groups=[]), crew), run(changed(case, groups=[[large]]), crew)
    assert (start.scale, after.scale) == (1024.0, 512.0)  # on every worker, as the crew checks
    assert after.finite == [True]  # skipped, which is no failure
    assert all(torch.equal(tensor, start.weights[name]) for name, tensor in after.weights.items())
    went_on = run(changed(case, groups=[[large], [small]]), crew)
    assert went_on.scale == 512.0
    assert not all(torch.equal(tensor, start.weights[name]) for name, tensor in went_on.weights.items())


@pytest.mark.parametrize("plan", PLANS)
def test_numbers_at_every_step_give_the_answer_of_one_device(plan: str, crew: Crew) -> None:
    """With targets that are missing, each with a weight, in lanes that go on from window to window."""
    numbers = {"task": "steps", "model__numbers": True, "model__tie": False, "plan": PLANS[plan]}
    check(a_case(**numbers), crew)
    check(a_case(**numbers, weights="step"), crew)
