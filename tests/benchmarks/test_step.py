"""`bench step` compares equals: every loop trains the same model on the same windows, and one that does not train is not timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from carrywave.benchmarks import step
from carrywave.benchmarks.harness import gpu_timing
from carrywave.benchmarks.peers import gpu_loops as peers
from carrywave.benchmarks.peers.gpu_loops import Recipe
from carrywave.cli.main import app
from carrywave.errors import UserError

COLUMNS = (
    "case",
    "device",
    "loop",
    "kernel",
    "tokens_per_second",
    "step_ms",
    "spread",
    "over_eager",
    "over_graph",
    "over_compile",
    "first_loss",
    "last_loss",
    "target",
    "note",
)

CPU = torch.device("cpu")
SMALL = Recipe(2, 16, 4, 8, 40, tied=True, optimizer="sgd", lr=1.0, clip=0.25, precision="fp32")
WIKITEXT, DEEP = step.RECIPES


@pytest.mark.parametrize(
    "recipe",
    [SMALL, replace(SMALL, optimizer="adam", lr=0.01, clip=1.0, tied=False)],
    ids=["sgd, tied", "adam"],
)
def test_loops_train_alike(recipe: Recipe) -> None:
    model, windows = recipe.model(), recipe.windows(step.WINDOWS, CPU)
    losses = {}
    for name in ("carrywave", "eager"):
        loop = step.build(name, recipe, model, windows)
        losses[name] = [float(loop()) for _ in range(step.CHECKED)]
    assert losses["carrywave"] == pytest.approx(losses["eager"], rel=1e-5)  # float32, summed in another order, over some steps
    assert peers.check_falls(losses["eager"], step.WINDOWS) == ""


def test_the_recorded_loop_goes_on_from_its_carry() -> None:
    """What is recorded is the plain step, on tensors that stay: here without a graph."""

    class Again(peers.GraphedLoop):
        def __init__(self, recipe: Recipe, weights: dict[str, Tensor], windows: peers.Windows) -> None:
            peers.PlainLoop.__init__(self, recipe, weights, windows)
            self._x_TB, self._target_TB = (tensor.clone() for tensor in windows[0])

        def _train_on(self, x_TB: Tensor, target_TB: Tensor) -> Tensor:
            self._x_TB.copy_(x_TB)
            self._target_TB.copy_(target_TB)
            return self._again()

    weights, windows = SMALL.model().state_dict(), SMALL.windows(3, CPU)
    again, plain = Again(SMALL, weights, windows), peers.PlainLoop(SMALL, weights, windows)
    places = [tensor.data_ptr() for tensor in again.carry]
    assert [float(again.step()) for _ in range(5)] == [float(plain.step()) for _ in range(5)]
    assert [tensor.data_ptr() for tensor in again.carry] == places


def test_windows_follow_each_other() -> None:
    windows = SMALL.windows(4, CPU)
    assert all(x.shape == target.shape == (8, 4) for x, target in windows)
    assert all(torch.equal(x[1:], target[:-1]) for x, target in windows)
    assert all(torch.equal(before[1][-1], after[0][0]) for before, after in pairwise(windows))
    tokens = torch.cat([x for x, _ in windows])
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < SMALL.vocabulary


@pytest.mark.parametrize(
    ("losses", "note"),
    [
        ([3.0, 3.1, 2.9, 2.8], ""),
        ([3.0, 3.1, 3.0, 3.1], "its loss does not fall: 3.0500, then 3.0500"),
        ([3.0, 3.1, float("nan"), 2.0], "its loss is not finite"),
        ([3.0, 3.1, float("inf"), 2.0], "its loss is not finite"),
    ],
)
def test_losses_must_fall(losses: list[float], note: str) -> None:
    assert peers.check_falls(losses, 2) == note


def test_rows_relate_loops_to_each_other() -> None:
    ms = {"carrywave": [2.0, 1.9, 2.2], "eager": [8.0, 9.0, 7.0], "graph": [3.0, 3.0, 3.0]}
    losses = {name: [10.0, 9.0] for name in ms}
    notes = dict.fromkeys(ms, "") | {"compile": "RuntimeError: no compiler"}
    rows = step.rows_of(WIKITEXT, "GPU", step.LOOPS, ms, losses, notes)
    assert all(tuple(row) == COLUMNS for row in rows)
    ours, _, _, compiled = rows
    assert (ours["tokens_per_second"], ours["step_ms"], ours["spread"]) == (350_000, 2.0, 0.15)
    assert (ours["over_eager"], ours["over_graph"], ours["over_compile"]) == (4.0, 1.5, None)
    assert ours["target"] == "over_eager >= 4.0; over_graph >= 1.5"
    assert (ours["first_loss"], ours["last_loss"]) == (10.0, 9.0)
    assert (compiled["tokens_per_second"], compiled["first_loss"], compiled["note"]) == (None, None, "RuntimeError: no compiler")
    assert {row["target"] for row in step.rows_of(DEEP, "GPU", step.LOOPS, ms, losses, notes)} == {""}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that seems to have a GPU: one loop trains, one does not, one cannot be built."""

    def build(name: str, *given: Any) -> Callable[[], Tensor]:
        if name == "graph":
            raise RuntimeError("cannot be\nrecorded")
        losses = iter(range(1000, 0, -1)) if name == "carrywave" else iter([5] * 1000)
        return lambda: torch.tensor(float(next(losses)))

    monkeypatch.setattr(gpu_timing, "cuda_device", lambda bench: CPU)
    monkeypatch.setattr(gpu_timing, "time_calls", lambda calls, **how: {name: [1.0] for name in calls})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(step, "build", build)


def test_a_loop_that_does_not_train_is_not_timed(gpu: None) -> None:
    rows = step.run(quick=True, rows=["2x64"])
    assert [(row["loop"], row["step_ms"], row["note"]) for row in rows] == [
        ("carrywave", 1.0, ""),
        ("eager", None, "its loss does not fall: 5.0000, then 5.0000"),
        ("graph", None, "RuntimeError: cannot be recorded"),
    ]


def test_the_command_prints_a_table_and_writes_rows(gpu: None, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["bench", "step", "--quick", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "RuntimeError: cannot be recorded" in result.stdout
    rows = json.loads(file.read_text())
    assert [row["loop"] for row in rows] == [*step.LOOPS[:-1]] * 2
    assert all(tuple(row) == COLUMNS for row in rows)


def test_models_and_loops_are_picked_by_name(gpu: None) -> None:
    assert step.chosen(step.RECIPES, ["8x1024", "adam V1"]) == [DEEP]
    with pytest.raises(UserError, match="no model of bench step matches 3x3; use one of 2x650, 8x1024"):
        step.chosen(step.RECIPES, ["3x3"])
    assert [row["loop"] for row in step.run(quick=True, loops=["eager"])] == ["eager"] * 2
    with pytest.raises(UserError, match="bench step has no loop jax; use some of carrywave, eager"):
        step.run(quick=True, loops=["jax"])


def test_without_a_gpu_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "step"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "carrywave: bench step needs a GPU, but torch found none that it can use; run it on a machine with an NVIDIA GPU\n"
    )


@pytest.mark.gpu
def test_the_short_form_on_a_gpu() -> None:
    rows = step.run(quick=True)
    assert [row["note"] for row in rows] == [""] * len(rows)
    assert all(row["last_loss"] < row["first_loss"] for row in rows)  # type: ignore[operator]
