"""`bench pipeline` compares equals: every loop computes what one worker computes, and the table says what was measured."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from carrywave.benchmarks import pipeline
from carrywave.benchmarks.harness.shapes import LanguageShape
from carrywave.benchmarks.harness.workers import start
from carrywave.benchmarks.peers.pipeline_loops import balanced_cuts
from carrywave.benchmarks.pipeline import QUICK
from carrywave.benchmarks.stages.variants import Variant, bubble_of, plan_of, variants_of
from carrywave.errors import RunError

COLUMNS = (
    "case",
    "workers",
    "variant",
    "lstm",
    "step_ms",
    "spread",
    "speedup",
    "efficiency",
    "over_pipelining",
    "over_pipelining_nn_lstm",
    "over_ddp",
    "over_ddp_nn_lstm",
    "bubble",
    "peak_mib",
    "peak_share",
    "peak_mib_each",
    "target",
)

SERIAL = [7.6, 7.5, 7.4]


@pytest.fixture(scope="module")
def timed() -> list[dict[str, Any]]:
    variants = [asdict(each) for each in variants_of(QUICK, 2, quick=True)]
    job = {"what": "time", "case": asdict(QUICK), "variants": variants, "rounds": 1, "seconds": 0.0}
    return start("carrywave.benchmarks.pipeline", job, 2)[0]


@pytest.mark.slow
def test_every_loop_computes_what_one_worker_computes(timed: list[dict[str, Any]]) -> None:
    losses = {Variant(**row["variant"]): row["losses"] for row in timed}
    serial = losses[Variant("serial")]
    assert serial[0] - serial[2] > 1e-3 * serial[0]  # so that a loop which does not update would be seen
    for values in losses.values():
        assert values == pytest.approx(serial, rel=1e-6)  # sums of float32 in another order
    families = {each.family for each in losses}
    peers = {f"{peer}{kind}" for peer in ("DDP", "torch GPipe", "torch 1F1B") for kind in ("", " nn.LSTM")}
    assert families == {"serial", "serial PyTorch", "replicas", "sequential", "round-robin", "gpipe", "wavefront", *peers}


@pytest.mark.slow
def test_the_table_relates_loops_to_serial_and_peers(timed: list[dict[str, Any]]) -> None:
    variants = [Variant(**row["variant"]) for row in timed]
    plain = {each: {**row, "step_ms": 100.0} for each, row in zip(variants, timed, strict=True)}
    wave = Variant("wavefront", chunks=4)
    for variant, step_ms in ((Variant("serial PyTorch"), 80.0), (Variant("DDP"), 60.0), (wave, 50.0)):
        plain[variant]["step_ms"] = step_ms
    peaks = [[300.0] if each.family == "serial" else [90.0, 120.0] if each == wave else None for each in variants]
    rows = pipeline._rows(replace(QUICK, layers=8, hidden=256), 2, variants, list(plain.values()), peaks)
    assert all(tuple(row) == COLUMNS for row in rows)
    row = rows[variants.index(wave)]
    assert row["variant"] == "wavefront 4 chunks"
    assert (row["speedup"], row["efficiency"], row["over_pipelining"], row["over_ddp"]) == (1.6, 0.8, 2.0, 1.2)
    assert (row["peak_mib"], row["peak_share"], row["peak_mib_each"]) == (120.0, 0.4, "90 120")
    shared = rows[variants.index(replace(wave, share_head=True))]
    assert (shared["variant"], shared["bubble"]) == ("wavefront 4 chunks, head shared", 0.111)
    assert row["bubble"] == 0.172  # 2.5 of 14.5 moments: F0 F1 F2 F3 . . B3 …, a backward 1.5 times as long as a forward, then W
    assert row["target"] == "over_pipelining >= 1.7; over_ddp >= 1.0; efficiency >= 0.8; peak_share <= 0.6"
    others = [each["target"] for each in rows if each is not row]
    assert sorted(filter(None, others)) == ["peak_share <= 0.4", "peak_share <= 0.6"]


@pytest.mark.slow
def test_memory_counts_the_stage_of_a_worker() -> None:
    case = LanguageShape(layers=4, hidden=256, lanes=4, steps=16, vocabulary=2000)
    job = {"what": "memory", "case": asdict(case), "variant": asdict(Variant("wavefront", chunks=4)), "lstm": "cw.LSTM"}
    peaks = pipeline._peaks(job, 2)
    # Weights, gradients and Adam's two moments of half the layers, and of the embedding or the softmax.
    floats = 2 * (8 * 256 * 256 + 8 * 256) + 2000 * 256
    least_mib = 4 * 4 * floats / 2**20
    assert len(peaks) == 2
    # Twice that is the whole model; a few pages may have been in use before.
    assert all(0.95 * least_mib < peak < 2 * least_mib for peak in peaks), peaks


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param([7.6, 7.6, 7.6], id="no update"),
        pytest.param([7.6, 7.55, 7.5], id="half the gradient"),
        pytest.param([7.61, 7.51, 7.41], id="other weights"),
        pytest.param([7.6, 7.5, float("nan")], id="not a number"),
    ],
)
def test_a_loop_that_computes_something_else_does_not_count(losses: list[float]) -> None:
    with pytest.raises(RunError, match="peer has loss"):
        pipeline.check_losses({"serial": SERIAL, "peer": losses}, reference="serial")


def test_rounding_does_not_stop_a_loop() -> None:
    pipeline.check_losses({"serial": SERIAL, "peer": [7.600001, 7.500002, 7.4001]}, reference="serial")


def test_of_a_micro_batch_pipeline_the_best_count_stays() -> None:
    times = {
        Variant("torch GPipe", micro_batches=2): 3.0,
        Variant("torch GPipe", micro_batches=4): 2.0,
        Variant("wavefront", chunks=4): 1.0,
    }
    times |= {Variant("wavefront", chunks=8): 2.0}
    assert pipeline._best_of_families(times) == list(times)[1:]


def test_cuts_leave_the_slowest_stage_least() -> None:
    assert balanced_cuts(LanguageShape(4, 512, 16, 128, 2000), 2) == (3,)
    assert balanced_cuts(LanguageShape(8, 512, 16, 64, 2000), 8) == (2, 3, 4, 5, 6, 7, 8)
    # A softmax that weighs as much as two layers has them taken off its stage, unless it is shared.
    heavy = LanguageShape(4, 64, 16, 128, 2 * 16 * 64)
    assert (balanced_cuts(heavy, 2), balanced_cuts(heavy, 2, share_head=True)) == ((4,), (3,))


def test_what_is_tried_fits_the_case() -> None:
    tried = variants_of(LanguageShape(8, 512, 16, 64, 2000), 8)
    assert [each.chunks for each in tried if each.family == "wavefront" and each.micro_batches == 1 and not each.share_head] == [
        4,
        8,
        16,
        8,
    ]
    assert [each.chunks for each in tried if each.share_head] == [4, 8, 16]
    assert [each.micro_batches for each in tried if each.family == "torch 1F1B"] == [8]
    assert all(16 % each.micro_batches == 0 for each in tried)


def test_more_workers_than_layers_are_replicas() -> None:
    case = LanguageShape(8, 512, 16, 64, 2000)
    tried = variants_of(case, 16)
    assert {each.family for each in tried} == {"serial", "serial PyTorch", "DDP", "DDP nn.LSTM", "replicas", "replicas x wavefront"}
    assert [each.name for each in tried[-3:]] == ["16 replicas", "2 replicas x wavefront 8 chunks", "4 replicas x wavefront 8 chunks"]
    plans = [plan_of(each, case, 16) for each in tried[-3:]]
    assert [(plan.replicas, plan.stages) for plan in plans] == [(16, 1), (2, 8), (4, 4)]
    assert [bubble_of(each, 16) is None for each in tried[-3:]] == [True, False, False]


def test_every_variant_of_two_workers_has_a_schedule_or_none() -> None:
    for each in variants_of(LanguageShape(4, 512, 16, 128, 2000), 2):
        bubble = bubble_of(each, 2)
        assert bubble is None or 0.0 <= bubble < 1.0, each.name
