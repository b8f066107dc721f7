from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from _machines import GIB, machine

from carrywave.errors import PlanError
from carrywave.plan.cost.cluster import Cluster, Host
from carrywave.plan.cost.profile import Contention, Link, Overheads, Sample
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan, resolve
from carrywave.plan.search import search as searching
from carrywave.plan.search.partition import NoFit, all_cuts
from carrywave.plan.search.predictor import Predictor
from carrywave.plan.search.scaling import scale
from carrywave.plan.search.search import GAIN_PER_DOUBLING, describe, price, search
from carrywave.plan.search.space import CHUNKS, MICRO_BATCHES
from carrywave.spec.facts import DataFacts
from carrywave.spec.plan_spec import PlanSpec
from carrywave.spec.spec import Spec


def units_of(vocabulary: int = 4096, **parts: Any) -> Units:
    spec = {"model": {"hidden": 512, "layers": 2}, "batch": {"lanes": 16, "steps": 32}, **parts}
    return Units.of(Spec.model_validate(spec), DataFacts(vocabulary=vocabulary))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Units, Cluster]:
    units = units_of(
        draw(st.sampled_from([50, 20000])),
        model={"hidden": draw(st.sampled_from([128, 512])), "layers": draw(st.integers(1, 2)), "tie": draw(st.booleans())},
        batch={"lanes": draw(st.sampled_from([2, 9, 64])), "steps": draw(st.sampled_from([5, 35]))},
        train={"accumulate": draw(st.integers(1, 2))},
    )
    link = Link(draw(st.sampled_from([1e-6, 1e-3])), draw(st.sampled_from([1e8, 1e11])))
    overheads = Overheads(2e-5, draw(st.sampled_from([0.0, 1e-4])), 1e-4, draw(st.sampled_from([0.0, 1.0])))
    profile = machine(within=link, overheads=overheads, contention=(Contention(8, 1.1, draw(st.sampled_from([0.0, 0.2]))),))
    return units, Cluster.uniform(profile, draw(st.integers(1, 6)))


def everything(units: Units, cluster: Cluster) -> list[Plan]:
    """Every plan of a small grid, also those that a search leaves out because others are surely as fast."""
    steps = {-(-shape.steps // chunks) for shape in units.shapes for chunks in CHUNKS}
    chunk_steps = [None, *(each for each in steps if 2 <= each < units.shapes[0].steps)]
    found = []
    for stages, replicas in product(range(1, len(units) + 1), range(1, cluster.devices + 1)):
        if stages * replicas <= cluster.devices and replicas <= units.lanes:
            micro_batches = [each for each in MICRO_BATCHES if each * replicas <= units.lanes]
            for cuts, each, parts, recompute, share in product(
                all_cuts(len(units), stages), chunk_steps, micro_batches, (False, True), (False, True) if stages > 1 else (False,)
            ):
                found.append(Plan(replicas, stages, cuts, each, parts, recompute, share_head=share))
    return found


@settings(max_examples=12)
@given(cases())
def test_it_finds_what_trying_everything_finds(case: tuple[Units, Cluster]) -> None:
    units, cluster = case
    predictor = Predictor(units, cluster)
    plans = everything(units, cluster)
    bounds = {plan: predictor.bound(plan) * price(plan.workers, GAIN_PER_DOUBLING) for plan in plans}
    # In the order of the bounds, so that not all need be simulated: none whose bound is over the best can win.
    best = float("inf")
    for plan in sorted(plans, key=bounds.__getitem__):
        if bounds[plan] >= best:
            break
        if predictor.fits(plan):
            best = min(best, predictor.predict(plan).seconds * price(plan.workers, GAIN_PER_DOUBLING))
    found = search(units, cluster, tolerance=0.0).best
    assert found.seconds * price(found.plan.workers, GAIN_PER_DOUBLING) == pytest.approx(best, rel=1e-9)


@st.composite
def wide_cases(draw: st.DrawFn) -> tuple[Units, Cluster]:
    """Also what bounds are easily wrong for: most parameters in a tied or shared matrix, pooled heads, both directions, unlike hosts."""
    task = draw(st.sampled_from(["language", "language", "classification", "tagging"]))
    language = task == "language"
    model = {"hidden": draw(st.sampled_from([64, 512])), "layers": draw(st.integers(1, 6)), "dropout": draw(st.sampled_from([0.0, 0.2]))}
    model |= {"tie": draw(st.booleans())} if language else {"bidirectional": draw(st.booleans())}
    batch = {"lanes": draw(st.sampled_from([2, 9, 64])), "steps": draw(st.sampled_from([5, 35, 128]))} if language else {"tokens": 4096}
    spec = Spec.model_validate({"task": task, "model": model, "batch": batch, "train": {"accumulate": draw(st.integers(1, 2))}})
    vocabulary = draw(st.sampled_from([50, 20_000, 300_000]))
    facts = DataFacts(vocabulary=vocabulary, labels=() if language else ("a", "b"), histogram=() if language else ((8, 50), (90, 20)))
    link = Link(draw(st.sampled_from([1e-6, 1e-3])), draw(st.sampled_from([1e8, 1e11])))
    overheads = Overheads(2e-5, draw(st.sampled_from([0.0, 1e-4])), 1e-4, draw(st.sampled_from([0.0, 1.0])))
    profile = machine(within=link, overheads=overheads, contention=(Contention(8, 1.1, draw(st.sampled_from([0.0, 0.2]))),))
    other = replace(profile, samples=tuple(_slower(sample) if sample.kind == "lstm" else sample for sample in profile.samples))
    hosts = (Host(draw(st.integers(1, 6)), profile), Host(draw(st.integers(1, 4)), draw(st.sampled_from([profile, other]))))
    return Units.of(spec, facts), Cluster(hosts)


def _slower(sample: Sample) -> Sample:
    forward, backward, put_off = sample.forward_seconds, sample.backward_seconds, sample.deferred_seconds
    return replace(sample, forward_seconds=3 * forward, backward_seconds=3 * backward, deferred_seconds=3 * put_off)


@settings(max_examples=60, deadline=None)
@given(wide_cases(), st.data())
def test_no_plan_takes_less_than_its_bounds(case: tuple[Units, Cluster], data: st.DataObject) -> None:
    units, cluster = case
    stages = data.draw(st.integers(1, min(len(units), cluster.devices)))
    replicas = data.draw(st.integers(1, min(cluster.devices // stages, units.lanes)))
    cuts = data.draw(st.sampled_from(all_cuts(len(units), stages)))
    share = stages > 1 and not units.pooled and data.draw(st.booleans())
    chunk_steps = data.draw(st.sampled_from([None, 2, 8, 18]))
    plan = Plan(replicas, stages, cuts, chunk_steps, data.draw(st.integers(1, 2)), data.draw(st.booleans()), share_head=share)
    predictor = Predictor(units, cluster)
    seconds = predictor.predict(plan).seconds
    assert predictor.bound(plan) <= seconds * (1 + 1e-9)
    assert predictor.least(plan) <= seconds * (1 + 1e-9)
    assert searching._SURELY * predictor.shared_out(Plan(replicas, stages)) <= seconds


def test_rivals_are_near_the_best_of_their_kind() -> None:
    units = units_of(50, model={"hidden": 512, "layers": 12}, batch={"lanes": 64, "steps": 128})
    found = searching.Search(Predictor(units, Cluster.uniform(machine(), 64)), use_all=False, tolerance=0.01)
    best, near = found.best(searching._both, gain=0.0), found.rival(searching._both)
    assert best is not None
    assert near is not None
    assert best.seconds <= near.seconds * 1.01
    assert near.seconds <= 1.2 * best.seconds


@settings(max_examples=15)
@given(cases())
def test_the_choice_is_never_slower_than_one_device_and_can_be_carried_out(case: tuple[Units, Cluster]) -> None:
    units, cluster = case
    choice = search(units, cluster)
    assert choice.serial is not None
    assert choice.best.seconds <= choice.serial.seconds
    plan = choice.best.plan
    asked = PlanSpec(
        replicas=plan.replicas,
        stages=plan.stages,
        cuts=plan.cuts or None,
        chunk_steps=plan.chunk_steps,
        micro_batches=plan.micro_batches,
        share_head=plan.share_head,
    )
    found = resolve(asked, layers=units.layers, workers=plan.workers, lanes=units.lanes)
    assert (found.cuts, found.replicas, found.stages) == (plan.cuts, plan.replicas, plan.stages)
    for rival in choice.rivals:
        assert rival.plan != plan
        assert "\n" not in rival.why
        if rival.prediction is not None and rival.prediction.plan.workers <= plan.workers:
            assert rival.prediction.seconds >= choice.best.seconds * (1 - 0.01)


def test_more_memory_is_never_slower_and_less_ends_in_a_refusal() -> None:
    units = units_of(model={"hidden": 2048, "layers": 2}, batch={"lanes": 64, "steps": 128})
    before = 0.0
    refused = []
    for memory in (16.0, 2.0, 1.0, 0.5, 0.2):
        try:
            found = search(units, Cluster.uniform(machine(memory_bytes=int(memory * GIB)), 6), tolerance=0.0).best
        except NoFit as error:
            refused.append(str(error))
            continue
        assert not refused
        assert found.seconds >= before
        assert all(stage.memory.total <= stage.limit_bytes for stage in found.stages)
        before = found.seconds
    assert before > 0
    assert "layer" in refused[-1]
    assert "exceeds the 205 MiB of the largest device" in refused[-1]


def test_memory_that_is_short_is_saved_by_recomputation_or_micro_batches() -> None:
    units = units_of(batch={"lanes": 64, "steps": 512})
    plain = Predictor(units, Cluster.uniform(machine(), 1)).memories(Plan())[0]
    short = machine(memory_bytes=plain.total - plain.activations // 3)
    found = search(units, Cluster.uniform(short, 1))
    assert found.best.plan.recompute or found.best.plan.micro_batches > 1
    assert found.serial == found.best
    assert found.best.stages[0].memory.total <= short.memory_bytes


def test_slow_links_keep_everything_on_one_device_and_it_says_so() -> None:
    slow = Link(5e-3, 1e6)
    choice = search(
        units_of(model={"hidden": 128, "layers": 2}, batch={"lanes": 4, "steps": 35}),
        Cluster.uniform(machine(within=slow, between=slow), 2),
    )
    assert choice.best.plan == Plan.serial()
    assert choice.why.startswith("1 device: uses 1 of 2 devices, and more would not help; the best on more devices, 2 ")
    assert {rival.plan.workers for rival in choice.rivals} == {2}
    assert all(rival.why.startswith("slower by ") for rival in choice.rivals)


def test_more_devices_for_little_gain_are_left_idle_and_it_says_so() -> None:
    units = units_of(50, model={"hidden": 128, "layers": 2}, batch={"lanes": 4, "steps": 16})
    choice = search(units, Cluster.uniform(machine(), 16))
    assert choice.best.plan == Plan.serial()
    assert choice.why.startswith("1 device: uses 1 of 16 devices, because 2 replicas saves only 4.")
    [more] = [rival for rival in choice.rivals if rival.plan == Plan(2)]
    assert more.prediction is not None
    assert more.prediction.seconds < choice.best.seconds
    assert more.why.endswith("less time for 2 times the devices: below the 5% that each doubling must save")


def test_a_heavy_head_that_one_lane_has_is_shared() -> None:
    units = units_of(32768, batch={"lanes": 1, "steps": 64})
    choice = search(units, Cluster.uniform(machine(), 4))
    assert choice.best.plan.shares_head
    assert any(rival.plan == replace(choice.best.plan, share_head=False) and "slower" in rival.why for rival in choice.rivals)


def test_a_search_that_ends_before_it_is_sure_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    units, cluster = units_of(32768, batch={"lanes": 8, "steps": 64}), Cluster.uniform(machine(), 6)
    sure = search(units, cluster)
    assert sure.left == 0.0
    assert "simulated" not in sure.why
    monkeypatch.setattr(searching, "MOST_SIMULATED", 1)
    ended = search(units, cluster)
    assert ended.left > 0.0
    assert f"(1 plans were simulated; any other could be faster by at most {ended.left:.1%})" in ended.why
    scores = [each.best.seconds * price(each.best.plan.workers, GAIN_PER_DOUBLING) for each in (ended, sure)]
    assert scores[0] <= scores[1] * (1 + ended.left)


def test_all_devices_can_be_asked_for() -> None:
    units = units_of(50, model={"hidden": 128, "layers": 2}, batch={"lanes": 4, "steps": 6})
    assert search(units, Cluster.uniform(machine(), 8), use_all=True).best.plan.workers == 8
    with pytest.raises(PlanError, match=r"4 lanes and 4 units .* cannot use all 64 devices"):
        search(units, Cluster.uniform(machine(), 64), use_all=True)


def test_a_heavy_head_moves_the_cuts_or_is_shared() -> None:
    units = units_of(32768, model={"hidden": 512, "layers": 8}, batch={"lanes": 8, "steps": 128})
    predictor = Predictor(units, Cluster.uniform(machine(), 2))
    balanced = predictor.balanced(Plan(1, 2, (), 8))
    assert balanced is not None
    even = predictor.predict(Plan(1, 2, (), 8))
    assert predictor.predict(Plan(1, 2, balanced, 8)).seconds < even.seconds
    assert balanced > even.plan.cuts
    assert predictor.predict(Plan(1, 2, (), 8, share_head=True)).seconds < even.seconds


def test_faster_devices_get_more_layers() -> None:
    units = units_of(50, model={"hidden": 1024, "layers": 8}, batch={"lanes": 8, "steps": 256})
    cluster = Cluster((Host(1, machine(speed=3.0)), Host(1, machine())))
    assert Predictor(units, cluster).balanced(Plan(1, 2)) is None
    search_for = searching.Search(Predictor(units, cluster), use_all=True, tolerance=0.01)
    found = search_for.best(lambda plan: plan.stages == 2, gain=0.0)
    assert found is not None
    assert found.plan.cuts[0] > 6


def test_layers_that_read_both_ways_are_not_cut_in_time_and_pooled_heads_not_shared() -> None:
    spec = {"task": "classification", "model": {"hidden": 512, "layers": 6, "bidirectional": True}, "batch": {"tokens": 64 * 32}}
    units = Units.of(Spec.model_validate(spec), DataFacts(features=12, labels=("a", "b"), longest=32))
    choice = search(units, Cluster.uniform(machine(memory_bytes=GIB // 4), 4))
    assert all(plan.chunk_steps is None and not plan.share_head for plan in (choice.best.plan, *(rival.plan for rival in choice.rivals)))


def test_sequences_of_a_crf_are_not_cut_and_its_head_is_not_shared() -> None:
    spec = {"task": "tagging", "model": {"hidden": 512, "layers": 6, "crf": True}, "batch": {"tokens": 64 * 32}}
    units = Units.of(Spec.model_validate(spec), DataFacts(features=12, labels=("a", "b"), longest=32))
    choice = search(units, Cluster.uniform(machine(memory_bytes=GIB // 4), 4))
    assert all(plan.chunk_steps is None and not plan.share_head for plan in (choice.best.plan, *(rival.plan for rival in choice.rivals)))


def test_a_gradient_sum_is_hidden_behind_backward_only_where_it_can_be() -> None:
    units = units_of(50, model={"hidden": 1024, "layers": 4}, batch={"lanes": 64, "steps": 64})

    def seconds(overlap: float, within: Link) -> float:
        cluster = Cluster.uniform(machine(within=within, overheads=Overheads(overlap=overlap)), 2)
        return Predictor(units, cluster).predict(Plan(2)).seconds

    fast, slow = Link(0.0, 1e15), Link(0.0, 1e10)
    alone, hidden, shown = seconds(1.0, fast), seconds(1.0, slow), seconds(0.0, slow)
    parameters = units.parameters(0, len(units)) * 4
    assert shown - alone == pytest.approx(parameters / 1e10, rel=1e-3)  # two workers send everything once
    assert alone < hidden < alone + 0.3 * (shown - alone)


def test_replicas_wait_for_the_slowest_of_them() -> None:
    units = units_of(batch={"lanes": 16, "steps": 32})
    even, uneven = (Predictor(units, Cluster.uniform(machine(contention=(Contention(4, lag=lag),)), 4)) for lag in (0.0, 0.5))
    for plan in (Plan(), Plan(1, 2, (2,), 8)):
        assert uneven.predict(plan).seconds == even.predict(plan).seconds
    for plan in (Plan(4), Plan(2, 2, (2,), 8)):
        work = max(max(span.end for span in row if span.label in ("B", "W")) for row in even.predict(plan).timeline.rows)
        assert uneven.predict(plan).seconds - even.predict(plan).seconds == pytest.approx(0.5 * work, rel=1e-6)


def test_traffic_is_what_crosses_the_edges() -> None:
    units = units_of(batch={"lanes": 16, "steps": 32})
    found = Predictor(units, Cluster.uniform(machine(), 4)).predict(Plan(2, 2, (2,), 8))
    assert found.sent_bytes == 2 * 32 * 16 * 512 * 4  # forward and backward, over both replicas, which have half of the lanes each
    assert found.reduced_bytes == max(units.parameters(0, 2), units.parameters(2, 4)) * 4
    assert found.tokens_per_second == pytest.approx(16 * 32 / found.seconds)
    assert [span.label for span in found.timeline.rows[0]][-2:] == ["reduce", "update"]


def test_recomputation_keeps_less_and_takes_longer() -> None:
    units = units_of(batch={"lanes": 16, "steps": 128})
    predictor = Predictor(units, Cluster.uniform(machine(), 2))
    plain = Plan(1, 2, (2,), 16)
    kept, again = predictor.predict(plain), predictor.predict(replace(plain, recompute=True))
    assert all(a.memory.activations < b.memory.activations / 2 for a, b in zip(again.stages, kept.stages, strict=True))
    # A forward is about a quarter of the work.
    assert all(1.2 < a.seconds / b.seconds < 1.5 for a, b in zip(again.stages, kept.stages, strict=True))
    assert again.seconds > 1.2 * kept.seconds


def test_scale_grows_until_it_stops_paying() -> None:
    units = units_of(batch={"lanes": 8, "steps": 64})
    found = scale(units, machine(), most=16)
    assert [point.devices for point in found.points] == [1, 2, 4, 8, 16]
    speeds = [point.prediction.tokens_per_second for point in found.points]
    assert speeds == sorted(speeds)
    assert found.points[0].efficiency == 1
    assert found.points[-1].efficiency < 0.9
    assert 1 <= found.pays_up_to <= 16
    assert [point.devices for point in scale(units, machine(between=None), most=64).points] == [1, 2, 4, 8]
    with pytest.raises(NoFit):
        scale(units, machine(memory_bytes=1 << 20), most=2)


def test_plans_in_words() -> None:
    assert describe(Plan()) == "1 device"
    assert (
        describe(Plan(4, 2, (), 16, 2, True, share_head=True))
        == "4 replicas x 2 stages, chunks of 16 steps, 2 micro-batches, recompute, shared head"
    )
