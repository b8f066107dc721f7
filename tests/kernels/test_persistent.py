"""The persistent kernel without a GPU: its algorithm in float64 against the definition, the stack around it, and that its source compiles.

Shapes: T time, B lane, I input, H hidden.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from _in_float64 import replace_launches
from _problems import CELLS, Stack, assert_same, each_kind

from carrywave.cells.cell import by_name
from carrywave.kernels import random, reference
from carrywave.kernels.carry import changed
from carrywave.kernels.cuda import nvrtc
from carrywave.kernels.dispatch import backends_of
from carrywave.kernels.hopper import persistent, recurrence
from carrywave.kernels.hopper.choice import alone, heads_for
from carrywave.kernels.hopper.layout import H200, LayerShape, Wave
from carrywave.kernels.layers import run_layers
from carrywave.kernels.step_marks import StepMarks
from carrywave.kernels.weights import LayerWeights


@pytest.fixture
def _block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "chip_of", lambda device: H200)
    monkeypatch.setattr(persistent, "_chip", lambda x: H200)
    replace_launches(monkeypatch)


@pytest.mark.sampled(9)
@pytest.mark.usefixtures("_block_by_block")
@each_kind
def test_the_algorithm_of_each_kind_is_the_definition(kind: dict[str, Any]) -> None:
    given_stack = Stack(1, 7, 20, 3, short=True, hidden=70, learned=True, **kind)
    assert_same(given_stack.at_once(Wave(LayerShape(128, 2, 8, 2), 1, 3)), given_stack.defined())


@pytest.mark.usefixtures("_block_by_block")
@pytest.mark.parametrize(("cell", "heads"), [("lstm", 1), ("gru", 1), ("slstm", 1), ("lstm", 2), ("gru", 2), ("slstm", 2)])
def test_a_layer_in_both_directions_is_the_definition(cell: str, heads: int) -> None:
    ways = [Stack(1, 6, 5, 4, cell=cell, hidden=66, heads=heads, seed=seed, resets=0.3, learned=True) for seed in (1, 2)]

    def joined(one: Any, other: Any) -> Any:
        return None if one is None else changed(one, lambda *parts: torch.cat(parts), other)

    carry, initial = joined(*(each.carries[0] for each in ways)), joined(*(each.initial[0] for each in ways))
    layer, x = tuple(way.layers[0] for way in ways), ways[0].x.clone().requires_grad_()
    assert ways[0].marks is not None
    resets = ways[0].marks[0].resets
    assert resets is not None
    resets[2:4, 4] = True  # of which the second is the first padded step: there, no direction starts again
    marks, lengths = StepMarks(resets, initial), torch.tensor([6, 0, 3, 6, 3])
    found = []
    for run in (partial(reference.layer, cell=by_name(cell)), partial(persistent.layer, cell=cell)):
        y, end = run(x, carry, layer, lengths, marks=marks)
        leaves = [x, *(leaf for way in ways for leaf in way.leaves)]
        weigh = [torch.cat([way.by for way in ways], dim=-1), *[torch.cat([way.by_ends[n] for way in ways]) for n in range(len(end))]]
        found.append([y.detach(), *(part.detach() for part in end), *torch.autograd.grad([y, *end], leaves, weigh)])
    assert_same(found[1], found[0])


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("_block_by_block")
@pytest.mark.parametrize("noise", ["", "training"])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("locked", [False, True])
def test_layers_at_the_same_time_are_layers_one_after_the_other(
    locked: bool, cell: str, noise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the contract, with dropout between the layers and after the last."""
    case = Stack(3, 7, 9, 5, short=True, cell=cell, hidden=70, resets=0.2, noise=noise, locked=locked)
    options: dict[str, Any] = {"dropout": 0.4, "locked": locked, "key": random.key(1), "sites": [random.site(name) for name in "abc"]}
    options |= {"backends": backends_of(by_name(cell)), "marks": case.marks}
    layers = [(layer,) for layer in case.layers]
    expected, ends = run_layers(case.x, case.carries, layers, case.lengths, backend="reference", **options)
    monkeypatch.setattr(persistent, "refusal", lambda *given: "")
    asked = []

    def wave_of(x: Tensor, layers: object, cell: str, *, plain: bool) -> Wave:
        asked.append(x.shape)
        return Wave(LayerShape(128, 2, 8, 1), 1, 3).of_cell(cell)

    monkeypatch.setattr(persistent, "wave_of", wave_of)
    y, after = run_layers(case.x, case.carries, layers, case.lengths, backend="persistent", **options)
    assert asked == [(7, 9, 5)]
    assert_same([y, *(part for end in after for part in end)], [expected, *(part for end in ends for part in end)])


def test_what_cannot_run_is_refused_with_a_reason() -> None:
    x, weights = torch.zeros(2, 3, 4, dtype=torch.bfloat16), (LayerWeights(torch.zeros(8, 4), torch.zeros(8, 2)),)
    assert persistent.refusal(x, weights) == "x is not on a GPU"


def compile_source(source_name: str, constants: tuple[tuple[str, int], ...], folder: Path) -> str:
    """With NVRTC or nvcc, whichever is there; returns what the assembler says of registers, where it says anything."""
    if not nvrtc.available():
        assert nvrtc.binary(source_name, constants, "sm_90a")[:4] == b"\x7fELF"
        return ""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("neither NVRTC nor nvcc is here")
    defines = [f"-D{name}={value}" for name, value in constants]
    with as_file(files("carrywave.kernels").joinpath("source")) as root:
        target = ["-gencode", "arch=compute_90a,code=sm_90a", "-cubin", "-std=c++17", "-Xptxas", "-v", "-I", str(root)]
        command = [nvcc, *target, *defines, "-o", str(folder / "out.cubin"), str(root / source_name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert (folder / "out.cubin").read_bytes()[:4] == b"\x7fELF"
    return done.stderr


SLOW = [(256, 64), (650, 20), (1024, 16), (1024, 64), (1024, 200), (1536, 40), (2048, 16), (2048, 64)]
KINDS = [("lstm", 1, 0), ("lstm", 2, 0), ("lstm", 1, 1), ("lstm", 1, 2), ("gru", 0, 0), ("gru", 2, 0), ("slstm", 0, 0), ("slstm", 1, 1)]


@pytest.mark.parametrize("fp16", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("hidden", "lanes", "cell", "resets", "noise"),
    [
        (64, 1, "lstm", 0, 0),
        (64, 1, "gru", 1, 1),
        pytest.param(64, 1, "slstm", 1, 2, marks=pytest.mark.slow),
        *(pytest.param(*sizes, "lstm", 0, 0, marks=pytest.mark.slow) for sizes in SLOW),
        *(pytest.param(1024, 64, *kind, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_the_source_compiles(
    hidden: int, lanes: int, cell: str, resets: int, noise: int, fp16: bool, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    used = alone(H200, hidden, lanes, 4)
    assert used is not None
    used, heads = used.of_cell(cell), heads_for(H200, hidden, 4, lanes, cell) if hidden <= 64 else None
    shapes = dict.fromkeys(each for each in (used.shape, used.back, heads) if each is not None)
    constants = (each.constants(fp16=fp16, resets=resets, noise=noise) for each in shapes)
    said = "".join(compile_source(recurrence.SOURCE, each, tmp_path) for each in constants)
    # Told, not judged: what they come to differs from compiler to compiler.
    for count, what in re.findall(r"(\d+) (bytes spill stores|registers)", said):
        record_property(what, count)


@pytest.mark.parametrize(
    ("hidden", "lanes", "gates", "pays"),
    [
        (1024, 64, 4, True),
        (1024, 256, 4, True),  # stream.cu
        (1024, 512, 4, False),  # eight passes, where cuDNN is faster
        (1150, 100, 4, True),  # four passes, but rows of 2,300 bytes
        (1152, 100, 4, False),
        (1150, 256, 4, True),  # fits nowhere, which `refusal` says before this is asked
        (1280, 96, 4, False),
        (1536, 64, 4, True),
        (1536, 80, 4, False),  # four passes
        (2044, 64, 4, True),
        (2048, 64, 4, True),
        (2048, 64, 3, False),
        (2048, 32, 3, True),
    ],
)
def test_cudnn_is_left_the_wide_layers_with_many_lanes(
    hidden: int, lanes: int, gates: int, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistent, "_chip", lambda x: H200)
    x_TBI = torch.empty(70, lanes, 8, dtype=torch.bfloat16)
    weights = (LayerWeights(torch.empty(gates * hidden, 8), torch.empty(gates * hidden, hidden)),)
    assert persistent.pays(x_TBI, weights) is pays
