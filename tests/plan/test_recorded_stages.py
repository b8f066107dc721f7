"""Stages whose steps are recorded as CUDA graphs: when the planner expects that, what it charges, and how near it comes to an H200."""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _machines import machine

from carrywave.plan.cost.cluster import Cluster, Host
from carrywave.plan.cost.profile import Link, Overheads, Profile, Sample
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan
from carrywave.plan.search.predictor import Prediction, Predictor
from carrywave.plan.search.search import search
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse

US = 1e-6
GPU = Overheads(110 * US, 20 * US, 0.0, 1.0, recorded_seconds=2 * US, recorded_message_seconds=3 * US)


def units(hidden: int = 512, lanes: int = 64, steps: int = 256, precision: str = "bf16", **train: object) -> Units:
    """The stack of `benchmarks.gpu_pipeline`."""
    spec = {
        "task": "forecasting",
        "model": {"hidden": hidden, "layers": 8},
        "data": {"horizon": 1},
        "batch": {"lanes": lanes, "steps": steps},
        "train": {"precision": precision, **train},
    }
    return Units.of(parse(spec), DataFacts(features=hidden, outputs=1, sequences=1, steps=10**6, longest=10**6))


def gpu(**changes: object) -> Profile:
    """A made-up GPU: the made-up machine's samples, in bf16 and as recorded chunks that take half as long, with a tenth of it put off."""
    whole = [replace(sample, precision="bf16") if sample.kind != "optimizer" else sample for sample in machine().samples]
    chunks = [
        replace(
            s, piped="recorded", forward_seconds=s.forward_seconds / 2, backward_seconds=s.backward_seconds / 2, deferred_seconds=0.1e-3
        )
        for s in whole
        if s.kind == "lstm"
    ]
    return machine(**{"samples": (*whole, *chunks), "overheads": GPU, "within": Link(2 * US, 200e9), **changes})


def predict(profile: Profile, plan: Plan, of: Units | None = None, *, devices: int = 4) -> Prediction:
    return Predictor(of or units(), Cluster.uniform(profile, devices)).predict(plan)


FOUR = Plan(1, 4, chunk_steps=16)


def test_a_recorded_stage_has_no_host_cost() -> None:
    slow_host = replace(GPU, task_seconds=1.0, message_seconds=1.0)
    for plan in (Plan(), FOUR, Plan(2, 2, chunk_steps=16), Plan(4)):
        assert predict(gpu(overheads=slow_host), plan).seconds == predict(gpu(), plan).seconds
        slow = replace(GPU, recorded_seconds=102 * US)
        tasks = sum(span.label in "FB" for span in predict(gpu(), plan).timeline.rows[0])
        assert predict(gpu(overheads=slow), plan).seconds >= predict(gpu(), plan).seconds + 0.99 * tasks * 100 * US


def test_a_recorded_step_takes_no_less_than_the_host_needs_to_prepare_one() -> None:
    for plan in (Plan(), FOUR, Plan(4)):
        seconds = predict(gpu(), plan).seconds
        assert predict(gpu(overheads=replace(GPU, least_step_seconds=0.9 * seconds)), plan).seconds == seconds
        assert predict(gpu(overheads=replace(GPU, least_step_seconds=2 * seconds)), plan).seconds == 2 * seconds
        assert predict(gpu(overheads=replace(GPU, step_seconds=1.0)), plan).seconds == pytest.approx(seconds + 1.0)
        by_tensors, of = replace(GPU, least_step_seconds=1.0, least_tensor_seconds=0.5), units()
        assert predict(gpu(overheads=by_tensors), plan, of).seconds == pytest.approx(1.0 + 0.5 * of.tensors(0, len(of)) / plan.stages)
    on_cpu = replace(GPU, recorded_seconds=None, least_step_seconds=10.0)
    assert predict(gpu(overheads=on_cpu), Plan()).seconds < 10.0


def test_what_is_not_recorded_is_launched_by_the_host() -> None:
    recorded = predict(gpu(), FOUR)
    over_gloo = predict(gpu(within=replace(gpu().within, transport="gloo")), FOUR)
    assert (recorded.transports.messages, recorded.transports.recorded) == ("device memory", "steps")
    assert (over_gloo.transports.messages, over_gloo.transports.recorded) == ("gloo", "")
    assert over_gloo.seconds > recorded.seconds + 30 * 100 * US  # at least 15 chunks, forward and backward, on some stage
    wide = replace(gpu(), samples=tuple(replace(s, precision="fp64") for s in gpu().samples))
    assert predict(wide, FOUR, units(precision="fp64")).transports.recorded == ""  # nothing is captured in fp64


def test_messages_and_sums_over_nccl_are_recorded_too() -> None:
    apart = replace(gpu(), devices_per_host=2)
    crossing = predict(apart, FOUR)
    assert (crossing.transports.messages, crossing.transports.recorded) == ("NCCL", "steps")
    asked = predict(gpu(within=replace(gpu().within, transport="NCCL")), FOUR)
    assert (asked.transports.messages, asked.transports.recorded) == ("NCCL", "steps")
    pipelines = predict(apart, Plan(2, 2, chunk_steps=16))
    assert str(pipelines.transports) == "messages in device memory, sums over NCCL; whole steps are recorded as CUDA graphs"
    replicas = predict(gpu(), Plan(4))
    assert str(replicas.transports) == "sums in device memory; whole steps are recorded as CUDA graphs"
    several = predict(gpu(), Plan(4), units(accumulate=2))
    assert several.transports.recorded == "passes"
    assert str(predict(gpu(), Plan()).transports) == ""
    on_cpu = replace(gpu(), overheads=replace(GPU, recorded_seconds=None))
    assert str(predict(on_cpu, FOUR).transports) == "messages and sums over gloo"
    mixed = Cluster((Host(2, gpu()), Host(2, on_cpu)))
    assert Predictor(units(), mixed).predict(FOUR).transports.recorded == ""


def test_chunks_of_a_window_have_samples_of_their_own_and_a_window_of_one_chunk_has_not() -> None:
    slower = replace(gpu(), samples=tuple(replace(s, forward_seconds=9 * s.forward_seconds) if s.piped else s for s in gpu().samples))
    assert predict(slower, FOUR).seconds > 2 * predict(gpu(), FOUR).seconds
    for plan in (Plan(), Plan(1, 4), replace(FOUR, recompute=True)):  # recomputation defers nothing, so that there is no window to share
        assert predict(slower, plan).seconds == predict(gpu(), plan).seconds


def test_without_samples_of_chunks_those_of_a_single_device_are_taken() -> None:
    plain = replace(gpu(), samples=tuple(sample for sample in gpu().samples if not sample.piped))
    launched = tuple(replace(sample, forward_seconds=1.0, piped="launched") for sample in plain.samples if sample.kind == "lstm")
    found = predict(replace(plain, samples=(*plain.samples, *launched)), FOUR)
    assert found.transports.recorded == "steps"
    assert found.seconds == predict(plain, FOUR).seconds < 1.0


def test_the_sender_pays_for_copies_in_device_memory() -> None:
    quick, slow = (predict(gpu(within=Link(2 * US, rate)), FOUR).seconds for rate in (200e9, 2e9))
    message = 16 * 64 * 512 * 2
    # Middle stages send 16 messages each way, one after another, and work meanwhile only if somebody else copies.
    assert slow - quick > 32 * message * (1 / 2e9 - 1 / 200e9) * 0.9
    carried = gpu(within=Link(2 * US, 2e9, transport="NCCL"))
    assert predict(carried, FOUR).seconds < slow


# Measured on one H200 on 2026-11-16 in bf16, by the workers of `benchmarks.gpu_pipeline`: what kernels take on a share of 32 (512 units)
# or 66 (1,024) multiprocessors, and how long forward and backward of stacks of 8 layers take, recorded. By hidden units, in microseconds:
# the forward and the backward recurrence (per step, per launch), the product of 16 steps before the one and after the other, and a product
# of weight gradients for the whole window, of which a layer has two.
KERNELS = {
    512: ((8.19, 9.0), (12.75, 11.0), 24.0, 25.0, 200.0),
    1024: ((6.05, 7.0), (7.87, 11.0), 37.0, 43.0, 187.0),
}
WHOLE_MS = {512: 48.3, 1024: 20.2}  # the stack on one share
MEASURED_MS = {  # (hidden, stages, chunks)
    (512, 2, 8): 29.5,
    (512, 2, 12): 29.5,
    (512, 2, 16): 29.5,
    (512, 4, 12): 18.4,
    (512, 4, 16): 18.1,
    (512, 4, 20): 18.1,
    (512, 4, 24): 18.3,
    (1024, 2, 6): 14.9,
    (1024, 2, 8): 14.9,
    (1024, 2, 12): 15.8,
}
STEPS = {512: 256, 1024: 128}


def h200_share(hidden: int) -> Profile:
    """A profile of those figures. The head, which only adds up, and tasks are assumed to take a few kernels of 2 us."""
    forward, backward, product, its_gradient, weights = KERNELS[hidden]
    window = STEPS[hidden]
    samples = []
    # A step of fewer lanes is hardly shorter: 0.65 times with a quarter of them, as on the whole GPU (profile h200, 512 units, 128 steps).
    for lanes, of_step in ((64, 1.0), (16, 0.65)):
        for steps in (64, 16, 8):
            # Products were timed for 16 steps alone; those of fewer rows are taken to last as long.
            rows = max(steps * lanes / 64, 16) / 16
            put_off = 2 * weights * steps / window * lanes / 64
            there = of_step * forward[0] * steps + forward[1] + product * rows
            back = of_step * backward[0] * steps + backward[1] + its_gradient * rows
            chunk = Sample("lstm", "bf16", hidden, hidden, lanes, steps, there * US, (back + put_off) * US, put_off * US, piped="recorded")
            samples += [chunk, Sample("linear", "bf16", hidden, 1, lanes, steps, 12 * US, 10 * US, 1 * US, piped="recorded")]
        whole = of_step * WHOLE_MS[hidden] * 1e-3 / 8
        samples.append(Sample("lstm", "bf16", hidden, hidden, lanes, window, 0.4 * whole, 0.6 * whole))
        samples.append(Sample("linear", "bf16", hidden, 1, lanes, window, 12 * US, 10 * US))
    samples.append(Sample("optimizer", "fp32", 0, 10**7, 1, 1, 100 * US, name="adam"))
    # 1 MB is copied in 3.4 us; a signal takes 2.4 us, a wait about 3.
    overheads = Overheads(111 * US, 20 * US, 0.0, 1.0, recorded_seconds=2 * US, recorded_message_seconds=2.7 * US)
    link = Link(1 * US, 2**20 / (3.4 * US), transport="device memory")
    return Profile("a share", "H200", "measured", 32 << 30, tuple(samples), link, devices_per_host=4, overheads=overheads)


def milliseconds(profile: Profile, hidden: int, stages: int, chunks: int) -> float:
    """Forward and backward, as the benchmark times them."""
    plan = Plan(1, stages, chunk_steps=-(-STEPS[hidden] // chunks) if chunks > 1 else None)
    found = predict(profile, plan, units(hidden, steps=STEPS[hidden]), devices=stages)
    return 1e3 * max(span.end for row in found.timeline.rows for span in row if span.label != "update")


def test_shares_of_an_h200_are_predicted_to_ten_percent() -> None:
    errors = {case: milliseconds(h200_share(case[0]), *case) / measured - 1 for case, measured in MEASURED_MS.items()}
    print({case: f"{error:+.1%}" for case, error in errors.items()})
    assert statistics.median(map(abs, errors.values())) <= 0.10  # the target
    assert max(map(abs, errors.values())) <= 0.15
    for hidden, whole_ms in WHOLE_MS.items():  # the profile's own sample
        assert milliseconds(h200_share(hidden), hidden, 1, 1) == pytest.approx(whole_ms, rel=0.01)


def test_the_host_would_cost_more_than_the_kernels() -> None:
    recorded, launched = h200_share(512), h200_share(512)
    launched = replace(launched, within=replace(launched.within, transport="gloo"))
    assert milliseconds(launched, 512, 4, 24) > 1.2 * milliseconds(recorded, 512, 4, 24)
    # Launched stages are fastest with fewer chunks than recorded ones.
    assert milliseconds(launched, 512, 4, 8) < milliseconds(launched, 512, 4, 32)


def test_on_four_shares_the_planner_chooses_a_wavefront_of_twelve_to_twenty_four_chunks() -> None:
    found = search(units(), Cluster.uniform(h200_share(512), 4)).best
    assert (found.plan.replicas, found.plan.stages) == (1, 4)
    assert 12 <= found.plan.chunks(256) <= 24
    assert found.transports.recorded == "steps"
    assert predict(h200_share(512), Plan(), devices=1).seconds / found.seconds > 2.5
