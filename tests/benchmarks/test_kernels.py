"""`bench kernels` compares equals, never takes one backend for another, and the floor is that of the derivation."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from carrywave.benchmarks import kernels
from carrywave.benchmarks.harness import gpu_timing
from carrywave.benchmarks.kernels import Measured
from carrywave.benchmarks.peers.gpu_stacks import Stack, StackCase, relative_error
from carrywave.cli.main import app
from carrywave.errors import UserError
from carrywave.kernels.hopper import persistent
from carrywave.kernels.hopper.layout import H200
from carrywave.kernels.lstm.dispatch import BACKENDS
from carrywave.measure.timing import Call

COLUMNS = (
    "case",
    "cell",
    "marks",
    "device",
    "dtype",
    "input",
    "dropout",
    "cudnn_eager_ms",
    "cudnn_graph_ms",
    "reference_ms",
    "compiled_eager_ms",
    "ours_eager_ms",
    "ours_graph_ms",
    "plain_graph_ms",
    "ratio",
    "floor_ms",
    "of_floor",
    "target_ms",
    "ours_error",
    "cudnn_error",
    "auto",
    "note",
)
CPU = torch.device("cpu")
SMALL = StackCase(2, 8, 3, 12, "fp32")
MS = {"cudnn_eager": 8.0, "cudnn_graph": 4.0, "reference": 90.0, "ours_eager": 2.5, "ours_graph": 2.0}

# A module that cannot be imported raises ImportError in place of being found.
WITHOUT = """
import sys
for name in ("typer", "rich", "pydantic"):
    sys.modules[name] = None
from carrywave.benchmarks import kernels
print(len(kernels.cases()))
"""


# What is run


@pytest.mark.parametrize("lengths", [False, True], ids=["padded", "lengths"])
def test_every_way_computes_the_same(lengths: bool) -> None:
    stack = Stack(replace(SMALL, lengths=lengths), CPU)
    exact = stack.exact()
    assert len(exact) == 2 + 4 * SMALL.layers  # outputs, inputs, all weights
    assert min(float(tensor.norm()) for tensor in exact) > 0
    for found in (stack.ours("reference"), stack.ours("aten"), stack.torchs()):
        assert relative_error(found, exact) < 1e-5  # float32 has 24 bits


@pytest.mark.parametrize("case", [{"cell": "gru"}, {"resets": 0.3}, {"cell": "gru", "resets": 0.3, "layers": 1}], ids=str)
def test_torch_computes_the_same_of_other_cells_and_between_resets(case: dict[str, object]) -> None:
    stack = Stack(replace(SMALL, **case), CPU)  # type: ignore[arg-type]
    assert relative_error(stack.torchs(), stack.exact()) < 1e-5  # float32 has 24 bits
    assert relative_error(stack.ours("reference"), stack.exact()) < 1e-5


@pytest.mark.parametrize("lengths", [False, True], ids=["padded", "lengths"])
def test_backends_draw_the_masks_of_the_exact_stack(lengths: bool) -> None:
    stack = Stack(replace(SMALL, lengths=lengths, dropout=0.5), CPU)
    exact = stack.exact()
    for backend in ("reference", "aten"):
        assert relative_error(stack.ours(backend), exact) < 1e-5  # float32 has 24 bits
    assert relative_error(Stack(replace(SMALL, lengths=lengths), CPU).ours("aten"), exact) > 0.1


def test_weights_are_numbers_that_the_short_dtype_knows() -> None:
    weights = Stack(replace(SMALL, dtype="bf16"), CPU).layers[0][0]
    assert weights.w_hh.dtype == torch.float32
    assert torch.equal(weights.w_hh, weights.w_hh.bfloat16().float())


def test_an_error_is_that_of_the_worst_tensor() -> None:
    exact = [torch.ones(4, dtype=torch.float64), torch.ones(9, dtype=torch.float64)]
    assert relative_error([exact[0] * 1.25, exact[1] * 1.5], exact) == pytest.approx(0.5)
    assert torch.isnan(torch.tensor(relative_error([exact[0], exact[1] * torch.nan], exact)))


def test_lengths_spread_from_all_steps_to_a_quarter() -> None:
    assert replace(SMALL, lanes=4, steps=256, lengths=True).lane_steps == [256, 192, 128, 64]
    assert replace(SMALL, lanes=1, lengths=True).lane_steps == [12]
    assert SMALL.lane_steps == [12, 12, 12]


def test_cases_are_every_shape_in_both_dtypes_with_and_without_lengths() -> None:
    cases = kernels.cases()
    several = sum(shape[0] > 1 for shape in kernels.SHAPES)
    assert len(set(cases)) == len(cases)
    plain = [case for case in cases if not case.special]
    assert len(plain) == 4 * (len(kernels.SHAPES) + several)
    marked = [case for case in cases if case.marked]
    assert {(case.cell, case.marks) for case in marked} == {
        (cell, mark) for cell in ("lstm", "gru") for mark in ("resets0.03", "zoneout0.1", "recurrent0.25")
    }
    assert {case.dropout for case in cases if case.layers == 1} == {0.0}
    # The time with lengths is judged by that with every step real, which so comes first.
    assert all(cases.index(replace(case, lengths=False)) < cases.index(case) for case in cases if case.lengths)


def test_rows_are_picked_by_words() -> None:
    assert kernels.cases(rows=["1x1024 B64 bf16 padded"]) == [StackCase(1, 1024, 64, 256)]
    found = kernels.cases(rows=["2x650 fp16 lengths", "8x512 B16 bf16 padded dropout0.5"])
    assert found == [StackCase(8, 512, 16, 256, "bf16", False, 0.5), *(StackCase(2, 650, 20, 35, "fp16", True, p) for p in (0.0, 0.5))]
    assert {case.cell for case in kernels.cases(rows=["gru bf16"])} == {"gru"}  # a row that is not plain is asked for by what it has
    assert kernels.cases(rows=["heads12 slstm"]) == [StackCase(1, 768, 16, 1024, cell="slstm", heads=12)]
    with pytest.raises(UserError, match="no case of bench kernels matches 3x7; use words such as"):
        kernels.cases(rows=["3x7"])


# The floor


def test_the_floor_of_one_layer() -> None:
    # 256 steps of 1.4 + 1.6 us, and four products of 8 x 1024^2 operations for each of 256 x 64 steps.
    products_ms = 4 * 8 * 1024**2 * 256 * 64 / 762e12 * 1e3
    assert kernels.floor_ms(1, 1024, [256] * 64) == pytest.approx(256 * 3.0e-3 + products_ms)


def test_layers_at_the_same_time_need_fewer_steps_where_they_fit() -> None:
    def recurrence_ms(layers: int, hidden: int) -> float:
        return kernels.floor_ms(layers, hidden, [256] * 16) - layers * 4 * 8 * hidden**2 * 256 * 16 / 762e12 * 1e3

    one_us = 2 * 0.95 + (0.45 + 0.65) * 16 * 512 / (64 * 1024)
    assert recurrence_ms(8, 512) == pytest.approx((256 + 7) * one_us / 1e3)
    assert recurrence_ms(8, 1024) == pytest.approx(8 * recurrence_ms(1, 1024))  # 64 MiB of recurrent weights do not fit


def test_the_floor_of_many_lanes_is_the_product_and_of_wide_layers_the_weights() -> None:
    assert kernels._step_us(1024, 1024, 1, 0.45) == pytest.approx(8 * 1024 * 1024**2 / 762e6)
    assert 18 < kernels._step_us(4096, 1, 1, 0.45) < 36


def test_short_lanes_lower_the_floor() -> None:
    case = StackCase(1, 1024, 64, 256, lengths=True)
    padded_ms = kernels.floor_ms(1, 1024, [256] * 64)
    assert 0.6 * padded_ms < kernels.floor_ms(1, 1024, case.lane_steps) < 0.8 * padded_ms


# Rows


def test_a_row_relates_ours_to_the_best_peer_the_floor_and_the_target() -> None:
    row = kernels.row_of(StackCase(1, 1024, 64, 256), "GPU", Measured(dict(MS), {"ours": 2.04e-3, "cudnn": 2e-3}, "persistent"), 2.0)
    assert tuple(row) == COLUMNS
    assert (row["case"], row["dtype"], row["input"], row["auto"]) == ("1x1024 B64 T256", "bf16", "padded", "persistent")
    assert (row["cudnn_graph_ms"], row["ours_graph_ms"], row["ratio"], row["target_ms"]) == (4.0, 2.0, 2.0, 2.5)
    assert row["of_floor"] == pytest.approx(row["floor_ms"] / 2.0, abs=1e-3)  # type: ignore[operator]
    assert (row["ours_error"], row["cudnn_error"], row["note"]) == (2.04e-3, 2e-3, "")


def test_a_refused_shape_has_the_reason_in_place_of_figures() -> None:
    found = Measured({name: MS[name] for name in kernels.PEERS if name in MS}, {"cudnn": 1e-3}, "aten", ["ours: too wide"])
    row = kernels.row_of(StackCase(1, 2048, 64, 256), "GPU", found, None)
    assert [row[name] for name in ("ours_eager_ms", "ours_graph_ms", "ratio", "of_floor", "ours_error")] == [None] * 5
    assert (row["note"], row["auto"], row["cudnn_eager_ms"]) == ("ours: too wide", "aten", 8.0)


@pytest.mark.parametrize("error", [1.51e-3, float("nan")])
def test_a_large_error_is_noted(error: float) -> None:
    row = kernels.row_of(SMALL, "GPU", Measured(dict(MS), {"ours": error, "cudnn": 1e-3}), None)
    assert row["note"] == "ours: its error is more than 1.5 times cuDNN's"


@pytest.mark.parametrize(
    ("case", "padded_ms", "target_ms"),
    [
        pytest.param(StackCase(2, 650, 20, 35), None, 0.45, id="table"),
        pytest.param(StackCase(2, 650, 20, 35, dropout=0.5), None, 0.45, id="table with dropout"),
        pytest.param(StackCase(1, 2048, 16, 256), None, 4.0, id="not in the table: cuDNN in a graph"),
        pytest.param(StackCase(8, 512, 16, 256), None, 1.0, id="wave"),
        pytest.param(StackCase(2, 650, 20, 35, "fp16"), None, 4.0, id="fp16: the best peer"),
        pytest.param(StackCase(2, 650, 20, 35, "fp16", True), 2.0, 1.6, id="lengths"),
        pytest.param(StackCase(2, 650, 20, 35, "bf16", True), None, None, id="lengths alone"),
    ],
)
def test_targets(case: StackCase, padded_ms: float | None, target_ms: float | None) -> None:
    assert kernels.target_ms(case, MS, padded_ms) == target_ms


# Measuring, with a stand-in for what only a GPU has


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_timing, "graphed", gpu_timing.warmed_up)
    monkeypatch.setattr(gpu_timing, "elapsed_ms", lambda call, repeats: 7.0)
    monkeypatch.setattr(gpu_timing, "time_calls", lambda calls, **how: {name: [1.0, 2.0, 9.0] for name in calls})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_a_backend_that_refuses_is_not_timed(host: None) -> None:
    found = kernels.measure(SMALL, CPU, budget_ms=1.0)
    assert found.ms == {"cudnn_eager": 2.0, "cudnn_graph": 2.0, "reference": 7.0}
    assert found.notes == ["ours: x is not on a GPU"]
    assert found.errors.keys() == {"cudnn"}
    stack = Stack(SMALL, CPU)
    assert found.auto == BACKENDS.choose("auto", stack.x_TBI, stack.layers[0])


def test_a_kernel_that_fails_is_not_timed_in_another_ones_guise(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "refusal", lambda *given: "")
    monkeypatch.setattr(BACKENDS, "choose", lambda asked, x, layer, marks=None: "aten")
    found = kernels.measure(replace(SMALL, lengths=True), CPU, budget_ms=1.0)
    assert found.ms.keys() == {"cudnn_eager", "cudnn_graph", "reference"}
    assert found.notes == ["ours: the kernel failed (see the warning)"]


def test_ours_is_timed_where_it_runs(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "chip_of", lambda device: H200)
    monkeypatch.setattr(persistent, "refusal", lambda *given: "")
    monkeypatch.setattr(BACKENDS, "choose", lambda asked, x, layer, marks=None: "reference" if asked == "reference" else "persistent")
    plain = BACKENDS.backends["reference"]
    monkeypatch.setattr(persistent, "wave_of", lambda *given, **named: None)
    monkeypatch.setattr(persistent, "layer", lambda x, carry, layer, lengths, *chunk, **clean: plain(x, carry, layer, lengths))
    found = kernels.measure(replace(SMALL, dropout=0.5), CPU, budget_ms=1.0)
    assert found.ms.keys() == {"cudnn_eager", "cudnn_graph", "ours_eager", "ours_graph"}  # no reference with dropout
    assert found.errors.keys() == {"ours", "cudnn"}
    assert (found.notes, found.auto) == ([], "persistent")


def test_a_peer_that_fails_is_noted_and_the_others_go_on(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Stack) -> None:
        raise RuntimeError("no\nsuch kernel")

    monkeypatch.setattr(Stack, "torchs", fail)
    found = kernels.measure(replace(SMALL, lengths=True), CPU, budget_ms=1.0)
    assert found.notes == ["ours: x is not on a GPU", "cudnn_eager: RuntimeError: no such kernel"]
    assert "cudnn_graph" in found.ms


def test_a_slow_reference_is_left_out(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_timing, "elapsed_ms", lambda call, repeats: 700.0)  # for 8 of 12 steps
    assert "reference" not in kernels.measure(SMALL, CPU, budget_ms=1.0).ms


def test_calls_take_turns() -> None:
    seen: list[tuple[str, int]] = []
    calls = {"fast": lambda: "fast", "slow": lambda: "slow"}

    def clock(call: Call, repeats: int) -> float:
        name = str(call())
        seen.append((name, repeats))
        return 1.0 if name == "fast" else 6.0

    found = gpu_timing.time_calls(calls, block_ms=4.0, budget_ms=30.0, rounds=(2, 9), clock=clock)
    assert found == {"fast": [1.0] * 3, "slow": [6.0] * 3}  # rounds of 4 x 1 + 1 x 6 ms
    assert seen == [("fast", 1), ("slow", 1), *[("fast", 4), ("slow", 1)] * 3]
    assert len(gpu_timing.time_calls(calls, block_ms=4.0, budget_ms=1.0, rounds=(2, 9), clock=clock)["slow"]) == 2
    assert len(gpu_timing.time_calls(calls, block_ms=4.0, budget_ms=1e6, rounds=(2, 9), clock=clock)["slow"]) == 9


# The command


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that seems to have a GPU, and measures at once."""

    def measure(case: StackCase, device: torch.device, *, budget_ms: float) -> Measured:
        refused = case.hidden == 64
        ms = {name: MS[name] for name in MS if not (refused and name.startswith("ours"))}
        return Measured(ms, {"cudnn": 1e-3}, "aten" if refused else "persistent", ["ours: too narrow"] if refused else [])

    monkeypatch.setattr(gpu_timing, "cuda_device", lambda bench: CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake GPU")
    monkeypatch.setattr(kernels, "measure", measure)


def test_lengths_are_judged_by_the_time_without(gpu: None) -> None:
    rows = kernels.run(quick=True, rows=["1x128 bf16"])
    assert [(row["input"], row["target_ms"]) for row in rows] == [("padded", 4.0), ("lengths", 1.6)]


def test_the_command_prints_a_table_and_writes_rows(gpu: None, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["bench", "kernels", "--quick", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "1x128 B16 T32" in result.stdout
    assert "too narrow" in result.stdout
    rows = json.loads(file.read_text())
    assert len(rows) == len(kernels.cases(quick=True))
    assert all(tuple(row) == COLUMNS for row in rows)


def test_without_a_gpu_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "kernels"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "carrywave: bench kernels needs a GPU, but torch found none that it can use; run it on a machine with an NVIDIA GPU\n"
    )


def test_a_forced_backend_is_refused(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYWAVE_KERNEL", "aten")
    with pytest.raises(UserError, match="CARRYWAVE_KERNEL=aten forces one backend"):
        kernels.run(quick=True)


def test_it_needs_nothing_but_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str(len(kernels.cases()))


@pytest.mark.gpu
def test_the_short_form_on_a_gpu() -> None:
    rows = kernels.run(quick=True)
    for row in rows:
        assert all(row[name] is not None for name in ("cudnn_eager_ms", "cudnn_graph_ms", "cudnn_error")), row
        assert row["ours_graph_ms"] is not None or str(row["note"]).startswith("ours: "), row
