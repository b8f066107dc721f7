"""A stack as a wave on a Hopper GPU: the same as layer by layer, bit for bit from run to run and under capture; cross entropy.

Shapes: T time, B lane, H hidden.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from carrywave.kernels import cross_entropy, reference, torch_kernels
from carrywave.kernels.carry import Carry
from carrywave.kernels.cuda import aligned
from carrywave.kernels.hopper import wave
from carrywave.kernels.hopper.layout import LayerShape, Wave
from carrywave.kernels.layers import run_layers
from carrywave.kernels.weights import LayerWeights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def streamed(hidden: int, groups: int, passes: int, in_registers: int) -> LayerShape:
    """A layout of `stream.cu`."""
    return LayerShape(hidden, groups, 64, passes, cluster=2, streamed=in_registers)


WAVES = [
    (3, 20, 16, 128, Wave(LayerShape(128, 1, 16, 1), 3, 6)),
    (8, 40, 16, 512, Wave(LayerShape(512, 1, 16, 1, 32), 8, 8)),
    (4, 33, 20, 650, Wave(LayerShape(704, 1, 24, 1), 2, 9)),
    (8, 40, 16, 512, Wave(LayerShape(512, 1, 16, 1, 32), 8, 8, LayerShape(512, 1, 16, 1, 32, 4))),  # more clusters than run at once
    (3, 30, 20, 256, Wave(LayerShape(256, 3, 8, 1, 16, 16), 2, 7)),
    (2, 20, 150, 256, Wave(LayerShape(256, 1, 64, 3), 1, 8, LayerShape(256, 1, 64, 3, cluster=4))),
    (2, 20, 90, 200, Wave(LayerShape(256, 2, 64, 1), 2, 7, LayerShape(256, 2, 64, 1, cluster=4))),
    (5, 40, 120, 500, Wave(streamed(512, 1, 2, 4), 4, 9, streamed(512, 1, 2, 3))),
    (2, 90, 380, 384, Wave(streamed(384, 2, 3, 3), 2, 31)),
    (8, 40, 16, 512, Wave(LayerShape(512, 1, 16, 1, 32, joined=8), 1, 40)),
    (3, 33, 20, 500, Wave(LayerShape(512, 1, 24, 1, joined=3), 1, 14, LayerShape(512, 1, 24, 1, cluster=4, joined=3))),
    (2, 30, 20, 650, Wave(LayerShape(704, 1, 24, 1, joined=2), 1, 30, LayerShape(704, 1, 24, 1, cluster=4, joined=2))),
    (3, 50, 7, 100, Wave(LayerShape(128, 1, 8, 1, joined=3), 1, 50)),
]


@pytest.fixture(autouse=True, scope="module")
def _on_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


class Stack:
    """Layers, inputs, and what the outputs are multiplied with to give a number."""

    def __init__(self, count: int, steps: int, lanes: int, hidden: int, *, short: bool) -> None:
        torch.manual_seed(0)

        def make(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda")

        def weight(*shape: int) -> Tensor:
            # Exact in bf16, so that the definition has the same ones.
            drawn: Tensor = (torch.rand(*shape, device="cuda") * 2 - 1) * hidden**-0.5
            return drawn.bfloat16().float().requires_grad_()

        shapes = ((4 * hidden, hidden), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,))
        self.layers = [LayerWeights(*(weight(*shape) for shape in shapes)) for _ in range(count)]
        self.x = make(steps, lanes, hidden).bfloat16().requires_grad_()
        self.carries = tuple(Carry(make(1, lanes, hidden).bfloat16().float(), make(1, lanes, hidden)) for _ in range(count))
        keep = [(torch.rand(steps, lanes, hidden, device="cuda") > 0.5).bfloat16() * 2 for _ in range(count - 1)]
        self.masks: list[Tensor | None] = [*keep, None]
        self.lengths = torch.randint(0, steps + 1, (lanes,), device="cuda") if short else None
        self.by = make(steps, lanes, hidden)
        self.leaves = [self.x, *(part for layer in self.layers for part in layer if part is not None)]

    def run(self, plan: Wave) -> list[Tensor]:
        y, ends = wave.run(self.x, self.carries, self.layers, self.masks, self.lengths, plan)
        return self._with_gradients(y, list(ends))

    def defined(self) -> list[Tensor]:
        y, ends = self.x.double(), []
        for layer, carry, mask in zip(self.layers, self.carries, self.masks, strict=True):
            wide = LayerWeights(*(None if part is None else part.double() for part in layer))  # type: ignore[arg-type]
            y, end = reference.layer(y, Carry(carry.h.double(), carry.c.double()), (wide,), self.lengths)
            y = y if mask is None else y * mask
            ends.append(end)
        return self._with_gradients(y, ends)

    def _with_gradients(self, y: Tensor, ends: list[Carry]) -> list[Tensor]:
        total = (y * self.by.to(y.dtype)).double().sum() + torch.stack([part.double().sum() for end in ends for part in end]).sum()
        return [y.detach(), *(part.detach() for end in ends for part in end), *torch.autograd.grad(total, self.leaves)]


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize(("count", "steps", "lanes", "hidden", "plan"), WAVES)
def test_a_wave_is_the_definition(count: int, steps: int, lanes: int, hidden: int, plan: Wave, short: bool) -> None:
    stack = Stack(count, steps, lanes, hidden, short=short)
    for own, expected in zip(stack.run(plan), stack.defined(), strict=True):
        # bf16 keeps 8 bits, and errors grow a little from layer to layer.
        assert (own.double() - expected.double()).norm() <= 1.2e-2 * expected.double().norm()


@pytest.mark.parametrize(("count", "steps", "lanes", "hidden", "plan"), WAVES)
def test_bits_repeat_and_a_recording_has_them_too(count: int, steps: int, lanes: int, hidden: int, plan: Wave) -> None:
    stack = Stack(count, steps, lanes, hidden, short=True)
    first, second = stack.run(plan), stack.run(plan)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        stack.run(plan)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = stack.run(plan)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(first, recorded, strict=True))


@pytest.mark.parametrize("directions", [1, 2])
def test_a_stack_in_one_call_of_cudnn_is_the_definition(directions: int) -> None:
    torch.manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").double().requires_grad_()

    widths = (12, 20 * directions, 20 * directions)
    layers = [tuple(LayerWeights(make(80, width), make(80, 20), make(80), make(80)) for _ in range(directions)) for width in widths]
    carries = tuple(Carry(make(directions, 5, 20), make(directions, 5, 20)) for _ in layers)
    x = make(9, 5, 12)
    assert torch_kernels.stackable(x, layers)
    leaves = [x, *(part for carry in carries for part in carry), *(part for layer in layers for each in layer for part in each[:4])]
    found = []
    for backend in ("aten", "reference"):
        y, ends = run_layers(x, carries, layers, backend=backend)
        outputs = [y, *(part for end in ends for part in end)]
        weigh = [torch.ones_like(each) for each in outputs]
        found.append([*outputs, *torch.autograd.grad(outputs, [each for each in leaves if each is not None], weigh)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [2, 7, 1000, 33_278])
def test_cross_entropy_is_torchs(dtype: torch.dtype, classes: int) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(300, classes, device="cuda") * 4).to(dtype).requires_grad_()
    target = torch.randint(0, classes, (300,), device="cuda")
    target[::7] = -100
    total = cross_entropy.summed(logits, target, -100)
    expected = functional.cross_entropy(logits.double(), target, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    [own], [theirs] = (torch.autograd.grad(each * 3.0, [logits]) for each in (total, expected))
    assert own.dtype == dtype
    # Both are rounded from nearly the same number; next to the target it is the difference of two, in float32.
    torch.testing.assert_close(own.double(), theirs.double(), rtol=2.0**-7 if dtype == torch.bfloat16 else 2.0**-9, atol=5e-6)
    assert torch.equal(own, torch.autograd.grad(cross_entropy.summed(logits, target, -100) * 3.0, [logits])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cross_entropy_of_weighted_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(300, 1000, device="cuda") * 4).to(dtype).requires_grad_()
    target, weights = torch.randint(0, 1000, (300,), device="cuda"), torch.rand(300, device="cuda") * 3
    target[::7], weights[::5] = -100, 0.0
    total = cross_entropy.summed(logits, target, -100, weights_N=weights)
    expected = (functional.cross_entropy(logits.double(), target, ignore_index=-100, reduction="none") * weights).sum()
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    [own], [theirs] = (torch.autograd.grad(each, [logits]) for each in (total, expected))
    torch.testing.assert_close(own.double(), theirs.double(), rtol=2.0**-7 if dtype == torch.bfloat16 else 2.0**-9, atol=5e-6)
    plain, ones = (cross_entropy.summed(logits, target, -100, weights_N=each) for each in (None, torch.ones_like(weights)))
    assert torch.equal(plain, ones)
    assert torch.equal(*(torch.autograd.grad(each, [logits])[0] for each in (plain, ones)))
    assert not cross_entropy._cuda_kernel.failures


def test_logits_that_begin_anywhere_and_other_targets() -> None:
    torch.manual_seed(0)
    wide = torch.randn(5, 12, device="cuda").bfloat16().requires_grad_()
    target = torch.tensor([0, 1, 9, 3, 4], device="cuda")
    for logits in (wide[:, 1:11], wide[:, 2:12]):
        expected = functional.cross_entropy(logits.float(), target, reduction="sum")
        torch.testing.assert_close(cross_entropy.summed(logits, target, -100), expected, rtol=1e-5, atol=0)
        [own], [theirs] = (torch.autograd.grad(each, [wide]) for each in (cross_entropy.summed(logits, target, -100), expected))
        torch.testing.assert_close(own, theirs, rtol=2.0**-7, atol=1e-4)
    with pytest.raises(RuntimeError):
        cross_entropy.summed(wide, target.int().float(), -100)


def test_the_first_backward_of_a_process() -> None:
    """Its thread has not called torch before, and so has no context of the driver's."""
    program = (
        "import torch; from carrywave.kernels import cross_entropy\n"
        "logits = torch.randn(4, 8, device='cuda').bfloat16().requires_grad_()\n"
        "cross_entropy.summed(logits, torch.arange(4, device='cuda'), -100).backward()\n"
        "assert logits.grad.isfinite().all()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "is not used" not in ended.stderr


def test_without_gradients() -> None:
    stack = Stack(3, 20, 16, 128, short=True)
    with torch.no_grad():
        y, _ = wave.run(stack.x, stack.carries, stack.layers, stack.masks, stack.lengths, WAVES[0][4])
    assert torch.equal(y, stack.run(WAVES[0][4])[0])


@pytest.mark.parametrize("biased", [False, True])
def test_odd_widths_are_laid_out_for_the_fast_products(biased: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 7, 65, device="cuda", requires_grad=True), torch.randn(1003, 65, device="cuda", requires_grad=True)
    bias = torch.randn(1003, device="cuda", requires_grad=True) if biased else None
    leaves = [x, weight, *([] if bias is None else [bias])]
    with torch.autocast("cuda", torch.bfloat16):
        assert aligned.serves(x, weight)
        y, expected = aligned.linear(x, weight, bias), functional.linear(x, weight, bias)
    assert y.stride(-2) % 8 == 0
    by = torch.randn_like(y)
    results = [(each, *torch.autograd.grad((each * by).sum(), leaves)) for each in (y, expected)]
    for own, theirs in zip(*results, strict=True):
        assert (own.double() - theirs.double()).norm() <= 4e-3 * theirs.double().norm()


def test_a_target_that_is_no_class_shows_in_the_loss() -> None:
    logits = torch.randn(2, 8, device="cuda").bfloat16()
    assert cross_entropy.summed(logits, torch.tensor([1, 8], device="cuda"), -100).isnan()
