from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from _machines import lstm_seconds, machine, samples

from carrywave.errors import PlanError
from carrywave.plan.cost.interpolation import Fit, Size, size_of
from carrywave.plan.cost.profile import Contention, Sample
from carrywave.plan.cost.stage_costs import Costs, far_off
from carrywave.plan.cost.units import Units
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec

FIT = Fit("lstm", [sample for sample in machine().samples if sample.kind == "lstm"])


def units(**parts: object) -> Units:
    return Units.of(Spec.model_validate({"model": {"hidden": 512, "layers": 4}, **parts}), DataFacts(vocabulary=4096))


def test_where_a_sample_matches_its_own_times_are_given() -> None:
    for sample in machine().samples:
        if sample.kind == "lstm":
            found = FIT(size_of(sample))
            assert found.forward == sample.forward_seconds
            assert found.backward + found.deferred == pytest.approx(sample.backward_seconds)


@settings(max_examples=60, deadline=None)
@given(st.integers(64, 2048), st.integers(64, 2048), st.integers(1, 512), st.integers(1, 512))
def test_between_and_beyond_samples_the_shape_of_the_work_is_found(inputs: int, hidden: int, lanes: int, steps: int) -> None:
    size = Size(inputs, hidden, lanes, steps)
    forward, backward, put_off = lstm_seconds(size)
    found = FIT(size)
    # The terms hold the formula, up to how the samples tell terms apart that grow together.
    assert found.forward == pytest.approx(forward, rel=0.2)
    assert found.backward + found.deferred == pytest.approx(backward, rel=0.2)
    assert found.deferred == pytest.approx(put_off, rel=0.3)


def test_what_a_few_samples_leave_open_grows_with_the_work() -> None:
    one = Fit("lstm", [Sample("lstm", "fp32", 512, 512, 16, 64, 1e-3, 2e-3, 5e-4)])
    assert one(Size(512, 512, 16, 128)).forward == pytest.approx(2e-3, rel=0.1)
    assert one(Size(1024, 1024, 16, 64)).forward > 2e-3


def test_a_neighbour_that_took_longer_than_the_rule_makes_sizes_near_it_take_longer() -> None:
    samples = [sample for sample in machine().samples if sample.kind == "lstm"]
    odd = next(sample for sample in samples if (sample.outputs, sample.lanes, sample.steps) == (512, 32, 32))
    slow = [replace(sample, forward_seconds=2 * sample.forward_seconds) if sample is odd else sample for sample in samples]
    near, far = Size(512, 512, 34, 30), Size(128, 128, 4, 128)
    assert Fit("lstm", slow)(near).forward > 1.5 * FIT(near).forward
    assert Fit("lstm", slow)(far).forward == pytest.approx(FIT(far).forward, rel=0.05)


def test_samples_that_differ_in_their_steps_lie_on_a_line() -> None:
    """Whatever the rule that is fitted to all says."""
    odd = [Sample("lstm", "fp32", 650, 650, 20, steps, 1e-3 + 7e-5 * steps, 2e-3 + 9e-5 * steps) for steps in (16, 128)]
    fit = Fit("lstm", [*samples(), *odd])
    for steps in (24, 35, 100, 150):
        found = fit(Size(650, 650, 20, steps))
        assert found.forward == pytest.approx(1e-3 + 7e-5 * steps, rel=0.01)
        assert found.backward == pytest.approx(2e-3 + 9e-5 * steps, rel=0.01)


def test_to_units_without_recurrence_steps_are_rows_like_lanes() -> None:
    fit = Fit("softmax", [Sample("softmax", "bf16", 400, 10_000, lanes, 8, 1e-5 * lanes, 2e-5 * lanes) for lanes in (16, 64)])
    assert fit(Size(400, 10_000, 128, 1)) == fit(Size(400, 10_000, 2, 64)) == fit(Size(400, 10_000, 16, 8))


def test_a_stage_is_the_sum_of_its_units() -> None:
    costs = Costs(units(), machine())
    whole = costs.stage(0, 6, 8, 16)
    assert whole.all == pytest.approx(sum(costs.unit(unit, 8, 16).all for unit in range(6)))


def test_layers_that_run_side_by_side_take_less_than_one_after_the_other_and_more_never_less() -> None:
    alone = FIT(Size(512, 512, 4, 32))
    together = Sample("lstm", "fp32", 512, 512, 4, 32, 2 * alone.forward, 2 * (alone.backward + alone.deferred), layers=4)
    costs = Costs(units(), machine(samples=(*machine().samples, together)))
    plain = Costs(units(), machine())
    assert costs.stage(1, 5, 4, 32).all == pytest.approx(plain.stage(1, 5, 4, 32).all / 2, rel=0.01)
    assert costs.unit(1, 4, 32) == plain.unit(1, 4, 32)
    rising = [costs.stage(1, last, 4, 32).all for last in range(2, 6)]
    assert rising == sorted(rising)


def test_two_directions_take_twice_as_long() -> None:
    facts = DataFacts(vocabulary=100, labels=("a", "b"))
    spec = {"task": "tagging", "batch": {"tokens": 1024}}
    one = Units.of(Spec.model_validate({**spec, "model": {"hidden": 512, "layers": 1}}), facts)
    both = Units.of(Spec.model_validate({**spec, "model": {"hidden": 512, "layers": 1, "bidirectional": True}}), facts)
    assert Costs(both, machine()).unit(1, 8, 8).forward == pytest.approx(2 * Costs(one, machine()).unit(1, 8, 8).forward)


def test_precisions_that_were_not_timed_are_refused_unless_alike() -> None:
    Costs(units(train={"precision": "tf32"}), machine()).unit(1, 8, 8)
    with pytest.raises(PlanError, match="profile made up has no sample of lstm in fp64"):
        Costs(units(train={"precision": "fp64"}), machine()).unit(1, 8, 8)


def test_a_stage_of_a_pipeline_is_timed_by_samples_of_one_where_there_are_any() -> None:
    slower = tuple(
        replace(sample, forward_seconds=2 * sample.forward_seconds, piped="launched")
        for sample in machine().samples
        if sample.kind == "lstm"
    )
    profile = machine(samples=(*machine().samples, *slower))
    alone, piped = (Costs(units(), profile, piped=piped) for piped in ("", "launched"))
    assert alone.unit(1, 8, 16) == Costs(units(), machine()).unit(1, 8, 16)
    assert piped.unit(1, 8, 16).forward == pytest.approx(2 * alone.unit(1, 8, 16).forward)
    assert piped.unit(5, 8, 16) == alone.unit(5, 8, 16)


def test_crowding_is_linear_between_what_was_measured() -> None:
    profile = machine(contention=(Contention(3, 1.2), Contention(5, 1.6)))
    found = [Costs(units(), profile, crowd=crowd).crowding for crowd in (1, 2, 3, 4, 5, 9)]
    assert found == pytest.approx([1.0, 1.1, 1.2, 1.4, 1.6, 1.6])


def test_samples_timed_with_as_many_workers_come_first() -> None:
    slow = tuple(replace(sample, forward_seconds=3 * sample.forward_seconds, workers=4) for sample in samples() if sample.kind == "lstm")
    profile = machine(samples=samples() + slow, contention=(Contention(4, 1.5), Contention(8, 2.0)))
    alone, two, four, eight = (Costs(units(), profile, crowd=crowd) for crowd in (1, 2, 4, 8))
    assert four.unit(1, 32, 32).forward == pytest.approx(3 * alone.unit(1, 32, 32).forward)
    assert four.unit(0, 32, 32) == alone.unit(0, 32, 32)  # its kind was timed alone only
    assert [alone.crowding, four.crowding, eight.crowding] == pytest.approx([1.0, 1.0, 2.0 / 1.5])
    assert two.workers == 4  # as near as one, and slower


def test_the_lag_is_linear_between_what_was_measured() -> None:
    profile = machine(contention=(Contention(2, lag=0.1), Contention(6, lag=0.3)))
    assert [Costs(units(), profile, crowd=crowd).lag for crowd in (1, 2, 4, 6, 9)] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.3])


def test_what_is_put_off_is_paid_in_one_product_or_by_chunks_where_only_short_chunks_put_off() -> None:
    layer = next(sample for sample in samples() if sample.kind == "lstm")
    whole = replace(layer, inputs=512, outputs=512, lanes=8, steps=64, forward_seconds=8e-3, backward_seconds=16e-3, deferred_seconds=3e-3)
    chunk = replace(whole, steps=16, forward_seconds=2e-3, backward_seconds=4e-3, deferred_seconds=1e-3)
    others = tuple(sample for sample in samples() if sample.kind != "lstm")
    one = Costs(units(), machine(samples=(*others, whole, chunk)))
    assert one.deferred(1, 2, 8, 64, 16) == pytest.approx(3e-3)
    assert one.deferred(1, 3, 8, 64, 16) == pytest.approx(6e-3)
    long = Costs(units(), machine(samples=(*others, replace(whole, deferred_seconds=1e-5), chunk)))
    assert long.deferred(1, 3, 8, 64, 16) == pytest.approx(8e-3)
    assert long.deferred(1, 3, 8, 64, 64) == pytest.approx(2e-5)


def test_the_update_grows_with_the_tensors() -> None:
    others = tuple(sample for sample in samples() if sample.kind != "optimizer")
    sizes = ((6, 10**5), (34, 10**5), (6, 3 * 10**6))
    timed = tuple(Sample("optimizer", "fp32", t, n, 1, 1, 1e-4 + 2e-5 * t + 1e-9 * n, name="adam") for t, n in sizes)
    costs = Costs(units(), machine(samples=(*others, *timed)))
    assert costs.update(10**6, 50) == pytest.approx(1e-4 + 1e-3 + 1e-3, rel=0.05)


def test_the_update_grows_with_the_parameters() -> None:
    costs = Costs(units(), machine())
    assert costs.update(0) == 0
    assert costs.update(10**8) == pytest.approx(1e-5 + 1e-2)
    assert Costs(units(train={"optimizer": "sgd"}), machine()).update(10**8) > 0


@pytest.mark.parametrize("kind", ["lstm", "softmax", "linear", "embedding"])
def test_one_sample_is_enough_to_know_that_more_steps_take_longer(kind: str) -> None:
    fit = Fit(kind, [Sample(kind, "fp32", 200, 1000, 20, 17, 0.06, 0.10, 0.04)])  # type: ignore[arg-type]
    assert fit(Size(200, 1000, 20, 34)).all == pytest.approx(2 * 0.16)


@pytest.mark.parametrize(
    ("hidden", "said"), [(128, None), (700, None), (1500, None), (40, "near 40 units (the nearest has 128)"), (4096, "near 4096")]
)
def test_sizes_far_from_all_samples_are_told(hidden: int, said: str | None) -> None:
    found = far_off(units(model={"hidden": hidden, "layers": 2}), machine())
    assert found is None if said is None else said in (found or "")


def test_cudnn_runs_a_stack_in_one_call_only_if_nothing_comes_between_its_layers() -> None:
    alone = FIT(Size(512, 512, 4, 32))
    together = Sample("lstm", "fp32", 512, 512, 4, 32, 2 * alone.forward, 2 * (alone.backward + alone.deferred), layers=4)
    timed = machine(samples=(*machine().samples, together))
    dropped = units(model={"hidden": 512, "layers": 4, "dropout": 0.5})
    assert Costs(dropped, timed).stage(1, 5, 4, 32) == Costs(dropped, machine()).stage(1, 5, 4, 32)
    in_half = machine(samples=tuple(replace(sample, precision="bf16") for sample in timed.samples))
    half = units(model={"hidden": 512, "layers": 4, "dropout": 0.5}, train={"precision": "bf16"})
    assert Costs(half, in_half).stage(1, 5, 4, 32).all < 0.6 * Costs(dropped, machine()).stage(1, 5, 4, 32).all


def test_weights_that_are_dropped_take_as_long_as_activations_of_their_size() -> None:
    dropout = [Sample("dropout", "fp32", width, width, 32, 32, 1e-6 + width * 1e-7, 2e-6 + width * 1e-7) for width in (128, 512)]
    timed = machine(samples=(*machine().samples, *dropout))
    costs = Costs(units(model={"hidden": 512, "layers": 4, "weight_drop": 0.5}), timed)
    one = Fit("dropout", dropout)(Size(512, 512, 4 * 512, 1)).all
    assert costs.weight_drop(0, 6) == pytest.approx(4 * one)
    assert costs.weight_drop(5, 6) == Costs(units(), timed).weight_drop(0, 6) == 0.0


@pytest.mark.parametrize(("wanted", "taken"), [("adamw", "adam"), ("ntasgd", "sgd"), ("sgd", "sgd")])
def test_an_optimizer_that_was_not_timed_takes_as_long_as_one_like_it(wanted: str, taken: str) -> None:
    updates = [Sample("optimizer", "fp32", 0, 10**6, 1, 1, seconds, name=name) for name, seconds in (("adam", 2e-4), ("sgd", 1e-4))]
    costs = Costs(units(train={"optimizer": wanted}), machine(samples=tuple(updates)))
    assert costs.update(10**6) == {"adam": 2e-4, "sgd": 1e-4}[taken]
