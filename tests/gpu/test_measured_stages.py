"""Recorded chunks and messages in device memory are timed on the GPU that is there, and predictions follow from them."""

from __future__ import annotations

import shutil

import pytest
import torch

from carrywave.launch.shares.mps import TOOL, shares
from carrywave.measure.profiles import profile_of_shares
from carrywave.measure.recorded import recorded_task, time_chunk, time_recorded
from carrywave.measure.recorded_steps import step_overheads, time_update
from carrywave.plan.cost.cluster import Cluster
from carrywave.plan.cost.sample_requests import Ask
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan
from carrywave.plan.search.predictor import Predictor
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kind", ["lstm", "softmax", "embedding", "linear"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_kind_is_timed_as_a_recorded_chunk(kind: str, precision: str) -> None:
    device = torch.device("cuda")
    ask = Ask(kind, 256, 256, 16, 16, precision=precision, chunks=4)  # type: ignore[arg-type]
    task = recorded_task(device, precision)
    sample = time_chunk(ask, device, task)
    assert 0 <= task < 1e-4  # no host could launch it as fast
    assert sample.piped == "recorded"
    assert sample.forward_seconds > 0
    assert 0 <= sample.deferred_seconds <= sample.backward_seconds
    if kind == "lstm":
        whole = time_recorded(ask, device, task)
        assert min(whole.forward_seconds, whole.backward_seconds) > 0


@pytest.mark.skipif(shutil.which(TOOL) is None, reason=f"{TOOL} is not here")
def test_shares_are_measured_with_messages_and_sums_in_device_memory() -> None:
    spec = {"task": "language", "model": {"hidden": 256, "layers": 4}, "batch": {"lanes": 16, "steps": 64}, "train": {"precision": "bf16"}}
    units = Units.of(parse(spec), DataFacts(vocabulary=500, sequences=1, steps=10**6, longest=10**6))
    with shares(2) as environment:
        profile = profile_of_shares(units, environment, [2])
    assert profile.within.transport == "device memory"
    assert 1e-7 <= profile.within.latency_seconds < 1e-4
    assert 1e9 < profile.within.bytes_per_second < 1e13
    assert 0 < profile.overheads.recorded_message_seconds < 1e-4
    assert {reduction.workers for reduction in profile.reductions} == {2}
    assert {sample.piped for sample in profile.samples if sample.kind == "lstm"} == {"", "recorded"}
    found = Predictor(units, Cluster.uniform(profile, 2)).predict(Plan(1, 2, chunk_steps=8))
    assert found.transports.recorded == "steps"


def test_what_every_recorded_step_adds_is_small() -> None:
    device = torch.device("cuda")
    found = step_overheads(device, "bf16")
    assert 0 <= found["step_seconds"] < 1e-3
    assert 0 <= found["least_tensor_seconds"] < 1e-3
    assert 1e-5 < found["least_step_seconds"] + 6 * found["least_tensor_seconds"] < 5e-3
    _, few = time_update(device, "adam", 100_000, "bf16")
    _, many = time_update(device, "adam", 30_000_000, "bf16")
    assert 0 < few < many < 1e-2
