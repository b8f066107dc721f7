"""The persistent kernel without a GPU: its algorithm in float64 against the definition, the stack around it, and that its source compiles.

Shapes: T time, B lane, I input, H hidden, P = H padded, Q = 4P interleaved.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import _emulated

from carrywave.kernels import random, reference
from carrywave.kernels.carry import Carry
from carrywave.kernels.cuda import nvrtc
from carrywave.kernels.hopper import persistent, recurrence
from carrywave.kernels.hopper.layout import H200, LayerShape, Wave, alone
from carrywave.kernels.hopper.marks import NOTHING
from carrywave.kernels.hopper.recurrence import Dealt
from carrywave.kernels.layers import run_layers
from carrywave.kernels.lengths import last_real
from carrywave.kernels.weights import LayerWeights


class Problem(NamedTuple):
    x: Tensor
    carries: tuple[Carry, ...]
    layers: tuple[LayerWeights, ...]
    masks: tuple[Tensor | None, ...]
    lengths: Tensor | None
    weigh: list[Tensor]  # of the outputs, and of each layer's last h and c

    @property
    def leaves(self) -> list[Tensor]:
        weights = (each for layer in self.layers for each in layer if each is not None)
        return [self.x, *(part for carry in self.carries for part in carry), *weights]


def problem(
    steps: int,
    lanes: int,
    inputs: int,
    hidden: int,
    lengths: tuple[int, ...] | None,
    *,
    layers: int = 1,
    bias: bool = True,
    masked: bool = False,
    seed: int = 0,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).requires_grad_()

    widths = [inputs, *[hidden] * (layers - 1)]
    biases = [[make(4 * hidden) if bias else None for _ in range(2)] for _ in range(layers)]
    return Problem(
        make(steps, lanes, inputs),
        tuple(Carry(make(1, lanes, hidden), make(1, lanes, hidden)) for _ in range(layers)),
        tuple(
            LayerWeights(make(4 * hidden, width), make(4 * hidden, hidden, scale=hidden**-0.5), *biases[n])
            for n, width in enumerate(widths)
        ),
        tuple((make(steps if n % 2 else 1, lanes, hidden).detach() > 0).double() if masked else None for n in range(layers)),
        None if lengths is None else torch.tensor(lengths),
        [make(steps, lanes, hidden).detach(), *(make(1, lanes, hidden).detach() for _ in range(2 * layers))],
    )


def defined(given: Problem) -> list[Tensor]:
    """Outputs, carries and all gradients by the definition, and autograd."""
    y, ends = given.x, []
    for number, (carry, weights) in enumerate(zip(given.carries, given.layers, strict=True)):
        mask = given.masks[number - 1] if number else None
        y, end = reference.layer(y if mask is None else y * mask, carry, (weights,), given.lengths)
        ends += [*end]
    return [y.detach(), *(end.detach() for end in ends), *torch.autograd.grad([y, *ends], given.leaves, given.weigh)]


def emulated(given: Problem, shape: LayerShape, back: LayerShape | None = None) -> list[Tensor]:
    """The same of one layer, by one launch forward, one backward, and products over the whole sequence; all of it float64."""
    (layer,), (carry,) = given.layers, given.carries
    steps, lanes, inputs = given.x.shape
    hidden, padded = carry.h.shape[-1], shape.hidden
    x_NI = given.x.detach().reshape(steps * lanes, inputs)
    packed = _emulated.pack(layer, shape, inputs, x_NI, transposed=True)
    hs = _emulated.states(carry.h[0].detach(), shape, steps, x_NI)
    gates = x_NI @ packed.w_ih_QJ.t() + packed.bias_Q
    cells = torch.full((steps, lanes, padded), torch.nan, dtype=torch.float64)

    def wide(x_BH: Tensor) -> Tensor:
        return torch.nn.functional.pad(x_BH.detach(), (0, padded - hidden))

    first_c = wide(carry.c[0])
    last_c, grad_h, grad_c = (torch.empty_like(first_c) for _ in range(3))
    dealt = Dealt(None, None)
    if given.lengths is not None:
        dealt = Dealt(torch.argsort(given.lengths, descending=True, stable=True), given.lengths)
    _emulated.forward(shape, packed, hs, gates, cells, first_c, last_c, dealt, NOTHING)
    shape = back or shape
    grads, ring = _emulated.gradients(gates, shape, 1)
    bias = torch.full((shape.groups, 4 * padded), torch.nan, dtype=torch.float64)
    ends = (wide(given.weigh[1][0]), wide(given.weigh[2][0]))
    assert packed.turned_PQ is not None
    _emulated.backward(
        shape,
        packed.turned_PQ,
        gates,
        cells,
        first_c,
        wide(given.weigh[0]),
        ends,
        grads,
        (grad_h, grad_c),
        bias,
        ring,
        dealt,
        NOTHING,
        None,
    )
    assert not grads.view(steps, lanes, padded, 4)[:, :, hidden:].any()  # padded units stay out of everything
    products = grads.t() @ x_NI, grads.t() @ hs[:-1].reshape(steps * lanes, padded)
    dw_ih, dw_hh, db = _emulated.unpack(shape, *products, bias, x_NI, hidden, inputs, torch.float64)
    assert dw_ih is not None
    assert dw_hh is not None
    dx = (grads @ packed.w_ih_QJ).view(steps, lanes, inputs)
    c, dh, dc = (each[None, :, :hidden] for each in (last_c, grad_h, grad_c))
    y = hs[1:, :, :hidden]
    h = y[-1] if given.lengths is None else last_real(y, given.lengths, carry.h[0].detach())
    return [y, h[None], c, dx, dh, dc, dw_ih, dw_hh, *(db if layer.b_ih is not None else ())]


def assert_same(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert float((mine - theirs).detach().norm()) <= tolerance * float(theirs.detach().norm()), number


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, LayerShape]:
    steps, lanes, hidden = draw(st.integers(1, 6)), draw(st.integers(1, 40)), draw(st.integers(1, 140))
    units, width, groups = draw(st.sampled_from((16, 32))), draw(st.sampled_from((8, 16, 24, 32))), draw(st.integers(1, 5))
    shape = LayerShape(-(-hidden // (4 * units)) * 4 * units, groups, width, -(-lanes // (groups * width)), units)
    lengths = draw(st.none() | st.tuples(*[st.integers(0, steps)] * lanes))
    return problem(steps, lanes, draw(st.integers(1, 5)), hidden, lengths, bias=draw(st.booleans()), seed=draw(st.integers(0, 99))), shape


@given(cases())
@settings(max_examples=30)
def test_the_algorithm_is_the_definition_on_any_layout(case: tuple[Problem, LayerShape]) -> None:
    # float64 has 53 bits; sums of up to some hundred terms in another order lose a few.
    assert_same(emulated(*case), defined(case[0]), 1e-12)


@pytest.mark.parametrize(("hidden", "lanes"), [(65, 9), (128, 70), (192, 33), (257, 9)])
def test_the_algorithm_on_the_layouts_that_are_used(hidden: int, lanes: int) -> None:
    used = alone(H200, hidden, lanes, 4)
    assert used is not None
    case = problem(4, lanes, 3, hidden, tuple(n * 7 % 5 for n in range(lanes)))
    assert_same(emulated(case, used.shape, used.back), defined(case), 1e-12)


@pytest.fixture
def _no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "chip_of", lambda device: H200)
    for name in (*_emulated.AROUND, "forward", "backward"):
        monkeypatch.setattr(recurrence, name, getattr(_emulated, name))
    monkeypatch.setattr(persistent, "_chip", lambda x: H200)


@pytest.mark.usefixtures("_no_launches")
def test_a_layer_in_both_directions_is_the_definition() -> None:
    forward, back = (problem(6, 5, 4, 66, (6, 0, 3, 6, 2), seed=seed) for seed in (1, 2))
    carry = Carry(*(torch.cat(parts) for parts in zip(*forward.carries, *back.carries, strict=True)))
    layer = (*forward.layers, *back.layers)
    expected, got = (run(forward.x, carry, layer, forward.lengths) for run in (reference.layer, persistent.layer))
    assert_same([got[0], *got[1]], [expected[0], *expected[1]], 1e-5)  # the carry passes through float32


@pytest.mark.usefixtures("_no_launches")
@pytest.mark.parametrize("locked", [False, True])
def test_layers_at_the_same_time_are_layers_one_after_the_other(locked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the contract, with dropout between the layers and after the last."""
    case = problem(7, 9, 5, 70, (7, 0, 3, 7, 5, 2, 6, 1, 4), layers=3)
    options: dict[str, Any] = {"dropout": 0.4, "locked": locked, "key": random.key(1), "sites": [random.site(name) for name in "abc"]}
    layers = [(layer,) for layer in case.layers]
    expected, ends = run_layers(case.x, case.carries, layers, case.lengths, backend="reference", **options)
    monkeypatch.setattr(persistent, "refusal", lambda x, layer, marks=None: "")
    asked = []

    def wave_of(x: Tensor, layers: object, cell: str) -> Wave:
        asked.append(x.shape)
        return Wave(LayerShape(128, 2, 8, 1), 1, 3)

    monkeypatch.setattr(persistent, "wave_of", wave_of)
    y, after = run_layers(case.x, case.carries, layers, case.lengths, backend="persistent", **options)
    assert asked == [(7, 9, 5)]
    assert_same([y, *(part for end in after for part in end)], [expected, *(part for end in ends for part in end)], 1e-5)  # float32 of c


def test_what_cannot_run_is_refused_with_a_reason() -> None:
    x, weights = torch.zeros(2, 3, 4, dtype=torch.bfloat16), (LayerWeights(torch.zeros(8, 4), torch.zeros(8, 2)),)
    assert persistent.refusal(x, weights) == "x is not on a GPU"


def compile_source(constants: tuple[tuple[str, int], ...], folder: Path) -> str:
    """With NVRTC or nvcc, whichever is there; returns what the assembler says of registers, where it says anything."""
    if not nvrtc.available():
        assert nvrtc.binary(recurrence.SOURCE, constants, "sm_90a")[:4] == b"\x7fELF"
        return ""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("neither NVRTC nor nvcc is here")
    defines = [f"-D{name}={value}" for name, value in constants]
    with as_file(files("carrywave.kernels").joinpath("source", recurrence.SOURCE)) as source:
        target = ["-gencode", "arch=compute_90a,code=sm_90a", "-cubin", "-std=c++17", "-Xptxas", "-v"]
        command = [nvcc, *target, *defines, "-o", str(folder / "out.cubin"), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert (folder / "out.cubin").read_bytes()[:4] == b"\x7fELF"
    return done.stderr


SLOW = [(256, 64), (650, 20), (1024, 16), (1024, 64), (1024, 200), (1536, 40), (2048, 16), (2048, 64)]


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize(("hidden", "lanes"), [(64, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in SLOW)])
def test_the_source_compiles(hidden: int, lanes: int, fp16: bool, tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    used = alone(H200, hidden, lanes, 4)
    assert used is not None
    said = "".join(compile_source(each.constants(fp16=fp16), tmp_path) for each in dict.fromkeys((used.shape, used.back)))
    # Told, not judged: what they come to differs from compiler to compiler.
    for count, what in re.findall(r"(\d+) (bytes spill stores|registers)", said):
        record_property(what, count)


@pytest.mark.parametrize(
    ("hidden", "lanes", "pays"),
    [
        (1024, 64, True),
        (1024, 256, False),  # eight passes, where cuDNN is faster
        (1150, 100, True),  # four passes, but rows of 2,300 bytes
        (1152, 100, False),
        (1150, 256, True),  # fits nowhere, which `refusal` says before this is asked
        (2044, 64, True),
        (2048, 64, False),
    ],
)
def test_cudnn_is_left_the_wide_layers_with_many_lanes(hidden: int, lanes: int, pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "_chip", lambda x: H200)
    x_TBI = torch.empty(70, lanes, 8, dtype=torch.bfloat16)
    weights = (LayerWeights(torch.empty(4 * hidden, 8), torch.empty(4 * hidden, hidden)),)
    assert persistent.pays(x_TBI, weights) is pays
