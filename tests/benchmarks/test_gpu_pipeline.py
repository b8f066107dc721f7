"""`bench gpu-pipeline`: what is tried, the table, predictions and the picture; and the workers themselves, on CPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from carrywave.benchmarks import gpu_pipeline, plan
from carrywave.benchmarks.gpu_pipeline import SETTINGS, WHOLE, Measured, Setting, Variant
from carrywave.benchmarks.stages.gpu_variants import TRANSPORTS
from carrywave.benchmarks.stages.gpu_worker import Split, SummedStack
from carrywave.cli.main import app
from carrywave.errors import RunError, UserError
from carrywave.launch.shares.mps import PERCENT
from carrywave.plan.cost.profile import Link, Overheads, Profile, Sample

COLUMNS = (
    "case",
    "shares",
    "multiprocessors",
    "variant",
    "transport",
    "how",
    "ms",
    "spread",
    "ratio",
    "efficiency",
    "over_launched",
    "bubble",
    "predicted_ms",
    "error",
    "kernel",
    "target",
    "note",
)

STACK, WIDE, SMALL = SETTINGS
TINY = Setting(SummedStack(2, 8, 4, 8), 25, (2,), ((2, 1),))
SHARE = {"device": "Fake GPU", "multiprocessors": 32, "kernel": "persistent", "note": ""}


def variant(setting: Setting, split: Split, percent: int | None = None) -> Variant:
    return Variant(setting, split, setting.percent if percent is None else percent)


# What is tried


def test_every_way_to_run_stages_is_tried() -> None:
    wanted = gpu_pipeline.variants(SETTINGS)
    of_stack = [each for each in wanted if each.setting == STACK]
    assert of_stack[0].is_base
    names = {(each.shares, each.name, each.how) for each in of_stack if each.transport != "NCCL"}
    over_nccl = {(each.shares, each.name, each.how) for each in of_stack if each.transport == "NCCL"}
    assert over_nccl - names == {("2 x 25%", "2 replicas DDP", "launched")}
    assert {(shares, f"wavefront {chunks} chunks", "recorded") for shares in ("2 x 25%", "4 x 25%") for chunks in (2, 32)} <= over_nccl
    assert {("4 x 25%", "wavefront 8 chunks", "launched"), ("2 x 25%", "2 replicas", "recorded")} <= over_nccl
    for shares in ("2 x 25%", "4 x 25%"):
        assert (shares, "sequential", "recorded") in names
        for chunks in (2, 4, 8, 16, 32):
            assert (shares, f"wavefront {chunks} chunks", "recorded") in names
            assert ((shares, f"wavefront {chunks} chunks", "launched") in names) == (chunks <= 8)
    assert {("4 x 25%", f"gpipe {parts} micro-batches", "recorded") for parts in (4, 8)} <= names
    assert {("2 x 25%", "2 replicas", "recorded"), ("4 x 25%", "2 replicas wavefront 8 chunks", "recorded")} <= names
    assert {("1 x 25%", "one share", "recorded"), ("1 x 25%", "one share", "launched"), ("whole GPU", "whole GPU", "recorded")} <= names
    assert len(names) + len(over_nccl) == len(of_stack)
    assert {each.split.workers for each in wanted if each.setting == SMALL} == {1, 8}


def test_chunks_are_not_shorter_than_a_few_steps() -> None:
    chunks = {each.split.chunks for each in gpu_pipeline.variants([replace(STACK, case=SummedStack(8, 512, 64, 32))])}
    assert chunks == {1, 2, 4, 8}
    with pytest.raises(UserError, match="cuts time into 1 chunks; use 2 or more"):
        gpu_pipeline.variants(SETTINGS, chunks=[4, 1])


def test_rows_are_chosen_by_words_and_one_share_is_always_there() -> None:
    found = gpu_pipeline.variants(SETTINGS, rows=["8x512 25% 4shares wavefront recorded 8chunks memory"])
    assert [each.name for each in found] == ["one share", "wavefront 8 chunks", "2 replicas wavefront 8 chunks"]
    assert [each.name for each in gpu_pipeline.variants(SETTINGS, rows=["8x1024 whole"])] == ["one share", "whole GPU"]
    with pytest.raises(UserError, match="no row of bench gpu-pipeline matches 9x9; use words such as 8x512"):
        gpu_pipeline.variants(SETTINGS, rows=["9x9"])


def test_the_rows_of_bench_plan_are_those_that_are_priced() -> None:
    found = gpu_pipeline.variants(SETTINGS, rows=plan.PRICED)
    assert found == [each for each in gpu_pipeline.variants(SETTINGS) if each.is_priced]


# The table


@pytest.fixture
def found() -> dict[Variant, Measured]:
    four = Split("wavefront", 4, chunks=8)
    ms = {
        variant(STACK, Split("wavefront")): [48.0, 49.0, 47.0],
        variant(STACK, Split("wavefront"), WHOLE): [12.0],
        variant(STACK, replace(four, chunks=4)): [20.0],
        variant(STACK, four): [15.0, 16.0, 14.0],
        variant(STACK, replace(four, recorded=False)): [60.0],
        variant(STACK, replace(four, recorded=False, chunks=4)): [24.0],
        variant(STACK, Split("wavefront", 1, 2)): [25.0],
        variant(STACK, Split("gpipe", 4, micro_batches=4)): [],
    }
    return {each: Measured(values, notes=[] if values else ["rank 1: it failed"]) for each, values in ms.items()}


def test_ratios_are_to_one_share_of_the_same_size(found: dict[Variant, Measured]) -> None:
    rows = [gpu_pipeline.row_of(each, found, {(STACK.case, 25): SHARE}) for each in found]
    assert all(tuple(row) == COLUMNS for row in rows)
    one, whole, four, best, launched, faster, replicas, failed = rows
    assert (one["shares"], one["variant"], one["ms"], one["ratio"], one["efficiency"]) == ("1 x 25%", "one share", 48.0, 1.0, 1.0)
    assert (one["multiprocessors"], one["kernel"], one["spread"]) == (32, "persistent", round(2 / 48, 3))
    assert (whole["shares"], whole["ratio"], whole["efficiency"], whole["multiprocessors"]) == ("whole GPU", 4.0, None, None)
    assert (best["ratio"], best["efficiency"], best["over_launched"]) == (3.2, 0.8, 1.6)  # over the launched one with 4 chunks
    assert best["target"] == "ratio >= 3.2 (stretch 3.5); over_launched >= 1.3"
    assert [row["target"] for row in (one, whole, four, launched, faster, replicas, failed)] == [""] * 7
    assert (launched["how"], launched["ratio"], launched["over_launched"]) == ("launched", 0.8, None)
    assert (replicas["variant"], replicas["shares"], replicas["bubble"], replicas["efficiency"]) == ("2 replicas", "2 x 25%", None, 0.96)
    assert (failed["ms"], failed["ratio"], failed["spread"], failed["note"]) == (None, None, None, "rank 1: it failed")
    assert best["bubble"] == round(
        7.5 / 31.5, 3
    )  # 3 units of time in each of 8 chunks, and 2.5 without weight gradients before each of 3 further stages


def test_targets_of_every_case() -> None:
    two = Split("wavefront", 2, chunks=8)
    assert gpu_pipeline.targets_of(variant(STACK, two), best=True) == ["ratio >= 1.8 (stretch 1.9)"]
    assert gpu_pipeline.targets_of(variant(WIDE, two), best=True) == ["ratio >= 1.75 (stretch 1.9)"]
    assert gpu_pipeline.targets_of(variant(STACK, replace(two, replicas=2)), best=True) == []


def test_the_last_row_holds_the_errors(found: dict[Variant, Measured]) -> None:
    for each, predicted_ms in zip(found, (48.0, None, 22.0, 12.0), strict=False):
        found[each].predicted_ms = predicted_ms
    row = gpu_pipeline.summary(found)
    assert row.keys() < set(COLUMNS)
    assert (row["error"], row["note"], row["variant"]) == (0.1, "median error 10.0%, worst 20.0%", "3 predicted")
    assert gpu_pipeline.row_of(list(found)[3], found, {})["error"] == -0.2
    assert gpu_pipeline.summary({})["note"] == "nothing was predicted and timed"


@pytest.mark.parametrize(
    ("losses", "note"),
    [
        ([1.0, 0.9, 0.8], ""),
        ([1.0, 0.91, 0.81], ""),
        ([1.0, 1.0, 1.0], "its loss at step 1 is 1, but 0.9 on one share"),
        ([1.0, 0.9, float("nan")], "its loss at step 2 is nan, but 0.8 on one share"),
        ([], ""),
    ],
)
def test_a_variant_must_compute_what_one_share_computes(losses: list[float], note: str) -> None:
    assert gpu_pipeline.differs(losses, [1.0, 0.9, 0.8]) == note


# Pools that take turns


class FakePool:
    """Answers as workers would; its n-th block takes n milliseconds more."""

    def __init__(self, workers: int, log: list[str], broken: str = "", kernel: str = "persistent") -> None:
        self.workers, self.log, self.broken, self.kernel, self.blocks = workers, log, broken, kernel, 0

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        self.log.append(f"{request['what']} {self.workers}")
        split = Split(**request["split"])
        if self.broken == request["what"]:
            raise RunError("worker 1 of bench gpu-pipeline exited with code 9")
        match request["what"]:
            case "describe":
                answer: dict[str, Any] = {**SHARE, "kernel": self.kernel}
            case "prepare":
                answer = {"note": "", "losses": [1.0, 0.9, 0.8], "ms": 5.0, "recorded": split.recorded and split.family != "gpipe"}
            case "time":
                self.blocks += 1
                answer = {"note": "", "ms": 10.0 + self.blocks}
            case _:
                answer = {"note": ""}
        return [{**answer, **({"ms": answer["ms"] + rank} if "ms" in answer else {})} for rank in range(self.workers)]


def fakes(log: list[str], **how: Any) -> dict[tuple[int, int, str], Any]:
    some = [(workers, transport) for workers in (2, 4, 8) for transport in TRANSPORTS]
    keys = [(percent, workers, transport) for percent in (12, 25, WHOLE) for workers, transport in [(1, ""), *some]]
    return {key: FakePool(key[1], log, **how) for key in keys}


def test_variants_take_turns_and_the_slowest_worker_counts() -> None:
    log: list[str] = []
    wanted = gpu_pipeline.variants([TINY], chunks=[2], rows=["wavefront recorded memory"])
    described, found = gpu_pipeline.measure(wanted, fakes(log), rounds=2)
    assert log == ["describe 1", "prepare 1", "prepare 2", *["time 1", "time 2"] * 2, "forget 1", "forget 2"]
    assert [each.ms for each in found.values()] == [[11.0, 12.0], [12.0, 13.0]]
    assert described[TINY.case, 25]["multiprocessors"] == 32
    assert [each.passes for each in found.values()] == [20, 17]  # 0.1 s of 5 ms, and of 6 ms on the slower worker


def test_what_was_not_recorded_says_so() -> None:
    wanted = gpu_pipeline.variants([TINY], rows=["gpipe"])
    _, found = gpu_pipeline.measure(wanted, fakes([]), rounds=0)
    assert {tuple(each.notes) for each in found.values()} == {(), ("it was not recorded",)}


@pytest.mark.parametrize("when", ["prepare", "time"])
def test_a_pool_that_is_gone_is_a_note_and_the_others_go_on(when: str) -> None:
    pools = fakes([])
    pools[25, 2, "nccl"] = FakePool(2, [], broken=when)
    wanted = gpu_pipeline.variants([TINY], chunks=[2])
    _, found = gpu_pipeline.measure(wanted, pools, rounds=2)
    for each, measured in found.items():
        assert len(measured.ms) == (0 if each.transport == "NCCL" else 2)
        assert ("exited with code 9" in " ".join(measured.notes)) == (each.transport == "NCCL")


def test_a_share_too_small_for_the_kernel_is_left_out() -> None:
    wanted = gpu_pipeline.variants([SMALL])
    log: list[str] = []
    _, found = gpu_pipeline.measure(wanted, fakes(log, kernel="aten (cuDNN)"), rounds=2)
    assert [each.notes for each in found.values()] == [["a layer does not fit on a share"]] * len(wanted)
    assert set(log) == {"describe 1"}
    _, found = gpu_pipeline.measure(wanted[:1], fakes([]), rounds=1)
    assert [each.notes for each in found.values()] == [[]]


# The workers, on CPUs


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[gpu_pipeline.Measurements, str]:
    wanted = [each for each in gpu_pipeline.variants([TINY], chunks=[2]) if each.transport != "NCCL"]
    file = tmp_path_factory.mktemp("trace") / "step.svg"
    with gpu_pipeline.pools(wanted, {}, {"device": "cpu", "precision": "fp32", "whole_step": False}) as ready:
        _, found = gpu_pipeline.measure(wanted, ready, rounds=2)
        prediction = gpu_pipeline.predictions_of(TINY, wanted, profile())
        gpu_pipeline.draw(file, found, prediction, ready)
    return found, file.read_text()


def profile() -> Profile:
    samples = [Sample("lstm", "bf16", 8, 8, 4, steps, 1e-3 * steps, 2e-3 * steps, 5e-4 * steps) for steps in (4, 8)]
    samples += [Sample("linear", "bf16", 8, 1, 4, steps, 1e-5, 1e-5) for steps in (4, 8)]
    return Profile("test", "test", "measured", 1 << 30, tuple(samples), Link(1e-6, 1e9), devices_per_host=2, overheads=Overheads(1e-6))


@pytest.mark.slow
def test_workers_run_every_variant(on_cpu: tuple[gpu_pipeline.Measurements, str]) -> None:
    found, _ = on_cpu
    assert {each.name for each in found} >= {"one share", "sequential", "gpipe 2 micro-batches", "wavefront 2 chunks", "2 replicas"}
    for each, measured in found.items():
        assert measured.notes == (["it was not recorded"] if each.split.recorded else []), each
        assert len(measured.ms) == 2
        assert min(measured.ms) > 0
        assert measured.losses[0] - measured.losses[-1] > 1e-4  # so that a variant which does not update would be seen
        assert measured.losses == pytest.approx(next(iter(found.values())).losses, rel=1e-5)  # sums of float32 in another order


@pytest.mark.slow
def test_a_step_is_drawn_beside_its_prediction(on_cpu: tuple[gpu_pipeline.Measurements, str]) -> None:
    _, text = on_cpu
    assert text.startswith("<svg")
    assert "2x8 B4 T8, 2 x 25%, wavefront 2 chunks" in text
    assert text.index("measured: ") < text.index("predicted: ")
    for stage in ("0: encoder, layer 1", "1: layer 2, head"):
        assert text.count(f">{stage}<") == 2
    for label in ("F", "B"):
        assert text.count(f'<rect class="{label}"') == 2 * 2 * 2 + 1  # pictures, stages, chunks; and the legend


# The command


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    sessions: list[tuple[int, int | None]] = []

    @contextmanager
    def shares(count: int, percent: int | None = None) -> Iterator[dict[str, str]]:
        sessions.append((count, percent))
        yield {"CUDA_MPS_PIPE_DIRECTORY": "/nowhere", PERCENT: str(percent)}

    @contextmanager
    def pools(wanted: Any, environment: Mapping[str, str], job: Mapping[str, Any]) -> Iterator[dict[tuple[int, int, str], Any]]:
        assert environment["CUDA_MPS_PIPE_DIRECTORY"] == "/nowhere"
        assert job["precision"] == "bf16"
        yield {key: FakePool(key[1], []) for key in map(gpu_pipeline._pool_of, wanted)}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_pipeline, "shares", shares)
    monkeypatch.setattr(gpu_pipeline, "pools", pools)
    return sessions


def test_the_command_prints_a_table_and_writes_rows(fake_gpu: list[tuple[int, int | None]], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["--rows", "8x512 25% 4shares wavefront", "--chunks", "4,8", "--rounds", "2"]
    result = CliRunner().invoke(app, ["bench", "gpu-pipeline", *words, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "wavefront 8 chunks" in result.stdout
    rows = json.loads(file.read_text())
    assert all(tuple(row) == COLUMNS for row in rows)
    assert {row["shares"] for row in rows} == {"1 x 25%", "4 x 25%"}
    assert fake_gpu == [(4, 25)]


def test_bench_plan_runs_on_shares(fake_gpu: list[tuple[int, int | None]], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, tuple[int, ...]]] = []

    def profiled(units: Any, environment: Mapping[str, str], counts: Any) -> Profile:
        asked.append((environment[PERCENT], tuple(counts)))
        hidden = units.units[1].outputs
        samples = [replace(each, inputs=hidden, outputs=1 if each.kind == "linear" else hidden) for each in profile().samples]
        return replace(profile(), samples=tuple(samples), devices_per_host=max(counts))

    monkeypatch.setattr(gpu_pipeline, "profile_of_shares", profiled)
    result = CliRunner().invoke(app, ["bench", "plan", "--shares", "--quick"])
    assert result.exit_code == 0, result.output
    assert "median error" in result.stdout
    assert asked == [("25", (1, 2)), ("25", (2,))]


def test_without_a_gpu_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "gpu-pipeline"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "carrywave: bench gpu-pipeline needs a GPU, but torch found none that it can use; run it on a machine with an NVIDIA GPU\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpu-pipeline", "--chunks", "4,x"], "--chunks 4,x is not a list of whole numbers; write it as in 4,8,16"),
        (["gpu-pipeline", "--chunks", "0,4"], "--chunks 0,4 has a number below 1; use 1 or more"),
        (["replicas", "--workers", "2,1"], "--workers 2,1 has a number below 2; use 2 or more"),
        (["gpu-pipeline", "--rows", "jax"], "no row of bench gpu-pipeline matches jax; use words such as 8x512"),
        (["gpu-pipeline", "--trace", "nowhere/step.svg"], "nowhere/step.svg cannot be written: folder nowhere not found"),
        (["heap", "--chunks", "4"], "bench heap has no --chunks; remove it"),
        (["gpu-pipeline", "--shares"], "bench gpu-pipeline has no --shares; remove it"),
    ],
)
def test_bad_options_are_one_line(fake_gpu: list[tuple[int, int | None]], words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", *words])
    assert (result.exit_code, result.stdout, fake_gpu) == (2, "", [])
    assert result.stderr.startswith(f"carrywave: {said}")
    assert result.stderr.count("\n") == 1


@pytest.mark.gpu
def test_the_short_form_on_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "step.svg"
    rows = gpu_pipeline.run(quick=True, chunks=[2, 4], rounds=2, trace=file)
    assert [row["note"] for row in rows] == [""] * len(rows)
    assert all(float(str(row["ms"])) > 0 for row in rows)
    assert file.read_text().startswith("<svg")
