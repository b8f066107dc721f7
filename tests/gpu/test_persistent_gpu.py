"""The persistent kernel on a Hopper GPU: errors against float64 beside cuDNN's own, and that nothing hangs, leaks or varies.

Run it with `pytest tests/gpu/test_persistent_gpu.py`. The first use of each layout compiles for some seconds.

Shapes: T time, B lane, I input, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.data.loader import build
from carrywave.data.order import Cursor, StreamOrder
from carrywave.data.sequences import View
from carrywave.kernels import random
from carrywave.kernels.carry import Carry
from carrywave.kernels.cuda import nvrtc
from carrywave.kernels.hopper.chip import chip_of
from carrywave.kernels.hopper.choice import shape_for
from carrywave.kernels.hopper.layout import H200
from carrywave.kernels.weights import Layer, LayerWeights
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.spec.load import parse
from carrywave.step.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]  # each layout compiles once

DTYPES = [torch.bfloat16, torch.float16]
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}  # half a step between two numbers: nobody does better
EMPTY = -1  # all bits set, as an int16: what the kernel's buffers hold before they are written


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    monkeypatch.delenv("CARRYWAVE_KERNEL", raising=False)


@dataclass(frozen=True)
class Case:
    steps: int
    lanes: int
    inputs: int
    hidden: int
    dtype: torch.dtype = torch.bfloat16
    directions: int = 1
    bias: bool = True
    varied: bool = False  # lengths from 0 to all steps
    seed: int = 0


class Problem:
    """Tensors that the short dtype holds exactly, so that errors are the kernels' own; kept in float32, as a trainer does."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator("cuda").manual_seed(case.seed)

        def make(*shape: int, scale: float = 1.0) -> Tensor:
            drawn = torch.randn(*shape, generator=generator, device="cuda") * scale
            return drawn.to(case.dtype).float()

        self.case = case
        self.x = make(case.steps, case.lanes, case.inputs)
        self.carry = Carry(*(make(case.directions, case.lanes, case.hidden, scale=0.5) for _ in range(2)))

        def weights() -> LayerWeights:
            pair = (make(4 * case.hidden, width, scale=width**-0.5) for width in (case.inputs, case.hidden))
            return LayerWeights(*pair, *(make(4 * case.hidden, scale=0.3) if case.bias else None for _ in range(2)))

        self.layer: Layer = tuple(weights() for _ in range(case.directions))
        drawn = torch.randint(0, case.steps + 1, (case.lanes,), generator=generator, device="cuda")
        self.lengths = drawn if case.varied else None
        self.weigh = [make(case.steps, case.lanes, case.hidden * case.directions), *(make(*self.carry.h.shape) for _ in range(2))]

    def leaves(self, x_dtype: torch.dtype, dtype: torch.dtype) -> tuple[Tensor, Carry, Layer, dict[str, Tensor]]:
        x = self.x.to(x_dtype, copy=True).requires_grad_()
        h, c = (each.to(dtype, copy=True).requires_grad_() for each in self.carry)
        layer = tuple(
            LayerWeights(*(None if each is None else each.to(dtype, copy=True).requires_grad_() for each in weights))  # type: ignore[arg-type]
            for weights in self.layer
        )
        names = LayerWeights._fields
        named = {
            f"{name}{n}": each for n, weights in enumerate(layer) for name, each in zip(names, weights, strict=True) if each is not None
        }
        return x, Carry(h, c), layer, {"x": x, "h": h, "c": c, **named}


Run = Callable[[Tensor, Carry, Layer, Tensor | None], tuple[Tensor, Carry]]
Found = dict[str, Tensor]


def on(backend: str) -> Run:
    def how(x: Tensor, carry: Carry, layer: Layer, lengths: Tensor | None) -> tuple[Tensor, Carry]:
        assert LSTM.backends.choose(backend, x, layer) == backend  # cuDNN in its place would prove nothing
        return LSTM.backends.run(backend, x, carry, layer, lengths)

    return how


def solve(problem: Problem, how: Run, x_dtype: torch.dtype, dtype: torch.dtype = torch.float32) -> Found:
    """What the layer gives, and the gradients of everything it was given."""
    x, carry, layer, named = problem.leaves(x_dtype, dtype)
    y, end = how(x, carry, layer, problem.lengths)
    outputs = {"y": y, "end.h": end.h, "end.c": end.c}
    weigh = [each.to(out.dtype) for each, out in zip(problem.weigh, outputs.values(), strict=True)]
    slopes = torch.autograd.grad(list(outputs.values()), list(named.values()), weigh)
    return {name: out.detach() for name, out in outputs.items()} | {f"d {name}": slope for name, slope in zip(named, slopes, strict=True)}


def ours(problem: Problem) -> Found:
    return solve(problem, on("persistent"), problem.case.dtype)


def errors(found: Found, truth: Found) -> dict[str, float]:
    return {name: float((found[name].double() - want).norm() / want.norm().clamp_min(1e-30)) for name, want in truth.items()}


def judge(problem: Problem, how: Run) -> None:
    """No more than 1.5 times cuDNN's own error, or what rounding alone makes of it."""
    dtype, truth = problem.case.dtype, solve(problem, on("reference"), torch.float64, torch.float64)
    mine, theirs = (errors(solve(problem, each, dtype), truth) for each in (how, on("aten")))
    wrong = {name: (mine[name], theirs[name]) for name in truth if not mine[name] <= 1.5 * theirs[name] + ROUNDING[dtype]}
    assert not wrong, f"(ours, cuDNN's) of {problem.case}"


def same_bits(first: Found, second: Found) -> None:
    different = [name for name in first if not torch.equal(bits(first[name]), bits(second[name]))]
    assert different == []


def bits(x: Tensor) -> Tensor:
    """Compared as integers: a NaN equals itself."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    # Few padded widths, because each compiles anew; all widths within them.
    hidden = 64 * draw(st.sampled_from((1, 2, 3, 8, 11, 16, 18))) - draw(st.integers(0, 63))
    steps, lanes, inputs = draw(st.integers(1, 40)), draw(st.integers(1, 140)), draw(st.integers(1, 200))
    assume(shape_for(H200, min(hidden, 1100), lanes) is not None)
    kind = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 2)), draw(st.booleans()), draw(st.booleans())
    return Case(steps, lanes, inputs, min(hidden, 1100), *kind, seed=draw(st.integers(0, 1000)))


@given(cases())
@settings(max_examples=40)
def test_errors_are_at_most_those_of_cudnn(case: Case) -> None:
    judge(Problem(case), on("persistent"))


SOME = [
    Case(20, 20, 65, 65, varied=True),
    Case(12, 64, 256, 256, torch.float16),
    Case(70, 40, 30, 200, varied=True),
    Case(90, 110, 12, 100, torch.float16, varied=True),
    Case(8, 30, 90, 512, varied=True),
    Case(5, 20, 300, 2048, varied=True),
    Case(4, 16, 64, 1800, torch.float16),
    Case(9, 60, 128, 1792, torch.float16, varied=True),  # four passes, owned by the two halves of the threads in turn
    Case(7, 62, 40, 1536, varied=True),  # three passes
    Case(40, 64, 64, 2048, varied=True),
    Case(35, 20, 650, 650, varied=True),
    Case(9, 100, 40, 1024, torch.float16, varied=True),
    Case(11, 100, 40, 1150, varied=True),  # wide.cu
    Case(7, 128, 64, 1088, torch.float16),
    Case(150, 256, 40, 1024, varied=True),  # stream.cu
    Case(60, 200, 30, 900, torch.float16),
    Case(40, 520, 20, 512, directions=2, varied=True),
    Case(5, 3, 7, 130, directions=2, bias=False, varied=True),
]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_bits_repeat(case: Case) -> None:
    problem = Problem(case)
    first = ours(problem)
    for _ in range(5):
        same_bits(ours(problem), first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [1, 7, 16])
def test_chunks_that_hand_the_carry_on_are_the_whole(cut: int, dtype: torch.dtype) -> None:
    def chunked(x: Tensor, carry: Carry, layer: Layer, lengths: Tensor | None) -> tuple[Tensor, Carry]:
        pieces = []
        for first in range(0, x.shape[0], cut):
            chunk = x[first : first + cut]
            real = None if lengths is None else (lengths - first).clamp(0, chunk.shape[0])
            y, carry = LSTM.backends.run("persistent", chunk, carry, layer, real)
            pieces.append(y)
        return torch.cat(pieces), carry

    for varied in (False, True):
        judge(Problem(Case(33, 12, 30, 96, dtype, varied=varied)), chunked)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_a_recorded_graph_replays_the_same_bits(case: Case) -> None:
    problems = [Problem(replace(case, seed=seed)) for seed in (1, 2)]
    expected = [ours(problem) for problem in problems]  # compiles, too
    own = Problem(replace(case, seed=3))
    x, carry, layer, named = own.leaves(case.dtype, torch.float32)
    weigh = [own.weigh[0].to(case.dtype), *own.weigh[1:]]

    def step() -> Found:
        y, end = LSTM.backends.run("persistent", x, carry, layer, own.lengths)
        slopes = torch.autograd.grad([y, *end], list(named.values()), weigh)
        return {"y": y, "end.h": end.h, "end.c": end.c} | {f"d {name}": slope for name, slope in zip(named, slopes, strict=True)}

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for problem, want in zip(problems, expected, strict=True):
        values = problem.leaves(case.dtype, torch.float32)[3]
        for name, leaf in named.items():
            leaf.detach().copy_(values[name].detach())
        for to, source in zip(weigh, problem.weigh, strict=True):
            to.copy_(source)
        if own.lengths is not None and problem.lengths is not None:
            own.lengths.copy_(problem.lengths)
        for _ in range(2):
            graph.replay()
            same_bits(recorded, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [float("nan"), float("inf"), "bits"])
def test_what_is_not_a_number_comes_out_as_such_and_nothing_waits_for_it(kind: float | str, dtype: torch.dtype) -> None:
    """`bits` is the very pattern that the kernel's buffers hold before they are written."""
    problem = Problem(Case(12, 20, 24, 200, dtype))
    x, carry, layer, named = problem.leaves(dtype, dtype)
    clean, _ = LSTM.backends.run("persistent", x, carry, layer, None)
    weigh = problem.weigh[0].to(dtype)
    with torch.no_grad():
        if kind == "bits":
            for each in (x[3, 5], carry.h[0, 7], weigh[8, 9]):
                each.view(torch.int16).fill_(EMPTY)
        else:
            x[3, 5] = float(kind)
    y, end = LSTM.backends.run("persistent", x, carry, layer, None)
    slopes = torch.autograd.grad(y, list(named.values()), weigh)
    torch.cuda.synchronize()
    bad = y.isnan()
    assert bool(bad[4:, 5].all())
    assert bool(end.c[:, 5].isnan().all())
    assert bool(bad[:, 7].all()) == (kind == "bits")
    fine = [lane for lane in range(20) if lane not in (5, 7)]
    assert torch.equal(y[:, fine], clean[:, fine])
    assert torch.equal(y[:3, 5], clean[:3, 5])
    assert bool(slopes[1][0, 5].isnan().all())  # of the initial h of that lane
    assert bool(slopes[1][0, 9].isnan().all()) == (kind == "bits")
    assert bool(slopes[1][0, 0].isfinite().all())


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_of_nan_changes_no_bit(dtype: torch.dtype, directions: int) -> None:
    problem = Problem(Case(15, 20, 30, 100, dtype, directions, varied=True))
    assert problem.lengths is not None
    problem.lengths[:2] = torch.tensor([0, 15])
    expected = ours(problem)
    padding = torch.arange(15, device="cuda")[:, None] >= problem.lengths
    problem.x = torch.where(padding[..., None], torch.nan, problem.x)
    same_bits(ours(problem), expected)
    assert not expected["y"][padding].any()
    assert not expected["d x"][padding].any()
    assert torch.equal(expected["end.c"][:, 0], problem.carry.c[:, 0])
    assert torch.equal(expected["d c"][:, 0], problem.weigh[2][:, 0])


@pytest.mark.parametrize("used", [0, 1, 2])
def test_every_output_alone_and_without_keeping_anything(used: int) -> None:
    problem = Problem(Case(6, 9, 12, 70, varied=True))
    found = []
    for backend, x_dtype, dtype in (("persistent", torch.bfloat16, torch.float32), ("reference", torch.float64, torch.float64)):
        x, carry, layer, named = problem.leaves(x_dtype, dtype)
        y, end = LSTM.backends.run(backend, x, carry, layer, problem.lengths)
        slopes = torch.autograd.grad((y, *end)[used].sum(), list(named.values()), materialize_grads=True)
        found.append(dict(zip(named, slopes, strict=True)))
        with torch.no_grad():
            again, _ = LSTM.backends.run(backend, x, carry, layer, problem.lengths)
        assert torch.equal(again, y)
    # bf16 has 8 bits; gates and their gradients are rounded to it at each of 6 steps.
    assert all(error < 0.03 for error in errors(*found).values())


def test_an_output_changed_in_place_is_noticed() -> None:
    x, carry, layer, _ = Problem(Case(3, 2, 8, 64)).leaves(torch.bfloat16, torch.float32)
    y, _ = LSTM.backends.run("persistent", x, carry, layer, None)
    with pytest.raises(RuntimeError, match="inplace"):
        y.mul_(2).sum().backward()


def test_streams_beside_each_other_change_nothing() -> None:
    """Two of them want nearly the whole chip, and a third is busy with products: each waits its turn."""
    problems = [Problem(replace(case, seed=seed)) for case in SOME[:4] for seed in (1, 2)]
    expected = [ours(problem) for problem in problems]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    busy = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for number, problem in enumerate(problems):
        with torch.cuda.stream(streams[2]):
            busy = (busy @ busy).clamp(-1, 1)
        with torch.cuda.stream(streams[number % 2]):
            found.append(ours(problem))
    torch.cuda.synchronize()
    for got, want in zip(found, expected, strict=True):
        same_bits(got, want)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_nothing_is_written_outside_and_nothing_left_out(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer that a kernel is given lies between two strips of a pattern, which must not change."""
    problem, margin, pattern = Problem(case), 1 << 14, 0xA5
    expected = ours(problem)
    plain, strips = nvrtc.Kernel.__call__, 0

    def guarded(self: nvrtc.Kernel, *arguments: Any, **options: Any) -> None:
        nonlocal strips
        held: dict[int, tuple[Tensor, Tensor]] = {}  # by storage, because arguments may be parts of one buffer
        given = list(arguments)
        for number, each in enumerate(arguments):
            if isinstance(each, Tensor) and each.numel():
                own = torch.empty(0, dtype=torch.uint8, device=each.device).set_(each.untyped_storage())
                if own.data_ptr() not in held:
                    whole = torch.full((own.numel() + 2 * margin,), pattern, dtype=torch.uint8, device=each.device)
                    whole[margin:-margin].copy_(own)
                    held[own.data_ptr()] = own, whole
                inner = held[own.data_ptr()][1][margin:-margin].view(each.dtype)
                given[number] = inner.as_strided(each.shape, each.stride(), inner.storage_offset() + each.storage_offset())
        plain(self, *given, **options)
        for own, whole in held.values():
            own.copy_(whole[margin:-margin])
            assert all(bool((strip == pattern).all()) for strip in (whole[:margin], whole[-margin:]))
            strips += 2

    monkeypatch.setattr(nvrtc.Kernel, "__call__", guarded)
    found = ours(problem)
    assert strips > 0
    same_bits(found, expected)
    assert not (bits(found["y"]) == EMPTY).any()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_stack_under_autocast_with_dropout(precision: str) -> None:
    """Three layers of different widths, dropout between them, both directions: beside cuDNN's error, through the module."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    torch.manual_seed(0)
    lstm = LSTM(24, [80, 100, 72], dropout=0.5, bidirectional=True).cuda()
    x, key = torch.randn(14, 10, 24, device="cuda"), random.key(5).cuda()
    lengths = torch.tensor([14, 3, 0, 14, 9, 1, 7, 14, 2, 5], device="cuda")
    assert LSTM.backends.choose("auto", x.to(dtype), lstm.weights(0)) == "persistent"

    def outcome(kernel: str, *, long: bool) -> Found:
        lstm.kernel = kernel
        lstm.to(torch.float64 if long else torch.float32).zero_grad()
        with torch.autocast("cuda", dtype, enabled=not long):
            y, _ = lstm(x.double() if long else x, None, lengths, key)
        y.double().square().sum().backward()
        return {"y": y.detach()} | {name: p.grad.clone() for name, p in lstm.named_parameters() if p.grad is not None}

    truth = outcome("reference", long=True)
    mine, theirs = (errors(outcome(kernel, long=False), truth) for kernel in ("persistent", "aten"))
    assert {name: each for name, each in mine.items() if not each <= 1.5 * theirs[name] + ROUNDING[dtype]} == {}


def batches(count: int) -> list[Batch]:
    """A stream in which each token follows from the one before the last, but for noise."""
    draw = np.random.default_rng(0)
    follows, tokens = draw.permutation(40), draw.integers(40, size=16 * 32 * count + 1)
    for place in np.flatnonzero(draw.random(len(tokens)) < 0.8)[2:]:
        tokens[place] = follows[tokens[place - 2]]
    view = View(tokens, np.array([0]), np.array([len(tokens) - 1]), targets_at=lambda rows: tokens[rows + 1])
    order = StreamOrder(view.lengths, lanes=16, steps=32)
    return [build(view, order.window(Cursor(0, step)), Cursor(0, step)) for step in range(order.num_steps(0))]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_200_steps_of_training_go_as_with_cudnn(precision: str) -> None:
    data = batches(200)
    curves = {}
    for kernel in ("persistent", "aten"):
        torch.manual_seed(0)
        model = Model(Embedding(40, 64), LSTM(64, 128, 2, dropout=0.1, kernel=kernel), Softmax(128, 40))
        spec = parse({"train": {"precision": precision, "optimizer": "adam", "lr": 5e-3, "clip": 1.0}}, defaults=False).train
        trainer = Trainer(model, spec, device="cuda", keep_state=True)
        curves[kernel] = [float(trainer.step(batch.to(torch.device("cuda")))) for batch in data]
    ends = {kernel: float(np.mean(curve[-20:])) for kernel, curve in curves.items()}
    assert ends["persistent"] < 0.8 * curves["persistent"][0]  # it learns something
    # Rounding differs from the first step on; the paths part and end at the same height.
    assert ends["persistent"] == pytest.approx(ends["aten"], rel=0.04)


def test_the_chip_is_what_the_driver_says() -> None:
    chip, count = chip_of(0), torch.cuda.get_device_properties(0).multi_processor_count
    assert chip.multiprocessors == count - count // 32
    assert 0 < chip.in_sixteens <= chip.in_eights <= chip.in_fours <= chip.multiprocessors
    if count == 132:
        assert chip == H200
