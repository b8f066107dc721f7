"""A window that arrives chunk by chunk on a Hopper GPU: it has the bits of one call, and each chunk costs its launches alone.

Shapes: T time, B lane, I input, H hidden.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from carrywave.kernels import deferred_gradients, reference
from carrywave.kernels.carry import Carries, Carry
from carrywave.kernels.deferred_gradients import Deferred, deferring
from carrywave.kernels.hopper import wave, windowed
from carrywave.kernels.hopper.chip import chip_of
from carrywave.kernels.hopper.choice import alone
from carrywave.kernels.hopper.layout import LayerShape, Wave
from carrywave.kernels.pass_cache import pass_cache
from carrywave.kernels.weights import LayerWeights
from carrywave.kernels.window import ChunkedWindow, WindowChunk

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# layers, steps, lanes, inputs, hidden, steps of a chunk, how (None: a layer alone)
CASES: list[tuple[int, int, int, int, int, int, Wave | None]] = [
    (1, 40, 64, 512, 512, 8, None),
    (1, 33, 20, 100, 650, 8, None),
    (1, 24, 48, 1024, 1024, 7, None),
    (1, 30, 20, 256, 256, 7, None),  # clusters of a whole group
    (3, 40, 16, 512, 512, 16, Wave(LayerShape(512, 1, 16, 1, 32), 3, 8)),
    (4, 33, 20, 650, 650, 18, Wave(LayerShape(704, 1, 24, 1), 2, 9)),
    (1, 33, 200, 100, 500, 8, Wave(LayerShape(512, 2, 64, 2, cluster=2, streamed=4), 1, 8)),
    (3, 40, 16, 512, 512, 16, Wave(LayerShape(512, 1, 16, 1, joined=3), 1, 16)),
    (2, 33, 20, 650, 650, 18, Wave(LayerShape(704, 1, 24, 1, joined=2), 1, 9, LayerShape(704, 1, 24, 1, cluster=4, joined=2))),
]


@pytest.fixture(autouse=True, scope="module")
def _on_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


class Stack:
    """Layers, one window, and what the outputs and the last carry are weighted with."""

    def __init__(
        self, count: int, steps: int, lanes: int, inputs: int, hidden: int, chunk: int, how: Wave | None, *, short: bool = False
    ) -> None:
        torch.manual_seed(0)

        def make(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda")

        def weight(*shape: int) -> Tensor:
            # Exact in bf16, so that the definition has the same ones.
            drawn: Tensor = (torch.rand(*shape, device="cuda") * 2 - 1) * hidden**-0.5
            return drawn.bfloat16().float().requires_grad_()

        widths = [inputs, *[hidden] * (count - 1)]
        self.layers = [
            LayerWeights(weight(4 * hidden, width), weight(4 * hidden, hidden), weight(4 * hidden), weight(4 * hidden)) for width in widths
        ]
        self.carries: Carries = tuple(
            Carry(make(1, lanes, hidden).bfloat16().float().requires_grad_(), make(1, lanes, hidden).requires_grad_()) for _ in range(count)
        )
        self.x = make(steps, lanes, inputs).bfloat16()
        self.masks: list[Tensor | None] = [
            *((torch.rand(steps, lanes, hidden, device="cuda") > 0.5).bfloat16() * 2 for _ in range(count - 1)),
            None,
        ]
        self.lengths = torch.randint(0, steps + 1, (lanes,), device="cuda") if short else None
        self.spans = tuple(pairwise([*range(0, steps, chunk), steps]))
        found = how or alone(chip_of(0), hidden, lanes, chunk)
        assert found is not None
        self.how, self.chunk = found, chunk
        self.by = make(steps, lanes, hidden).bfloat16()
        self.by_ends = [make(1, lanes, hidden) for _ in range(2 * count)]
        self.leaves = [*(part for carry in self.carries for part in carry), *(part for layer in self.layers for part in layer[:4])]

    def at_once(self) -> list[Tensor]:
        """Outputs, last carries, and the gradients of x and of the leaves: in one call, with the same pieces if they divide the chunks."""
        x = self.x.clone().requires_grad_()
        y, ends = wave.run(x, self.carries, self.layers, self.masks, self.lengths, self.how)
        last = [part for end in ends for part in end]
        found = torch.autograd.grad([y, *last], [x, *self.leaves], [self.by, *self.by_ends])  # type: ignore[arg-type]
        return [y.detach(), *(part.detach() for part in last), *found]

    def defined(self) -> list[Tensor]:
        x = self.x.double().requires_grad_()
        y, ends = x, list[Tensor]()
        for layer, carry, mask in zip(self.layers, self.carries, self.masks, strict=True):
            wide = LayerWeights(*(None if part is None else part.double() for part in layer))  # type: ignore[arg-type]
            y, end = reference.layer(y, Carry(carry.h.double(), carry.c.double()), (wide,), self.lengths)
            y = y if mask is None else y * mask
            ends += [*end]
        found = torch.autograd.grad([y, *ends], [x, *self.leaves], [each.double() for each in (self.by, *self.by_ends)])  # type: ignore[arg-type]
        return [y.detach(), *(part.detach() for part in ends), *found]

    def by_chunks(self) -> list[Tensor]:
        """The same, chunk by chunk as the executor does it."""
        for leaf in self.leaves:
            leaf.grad = None  # type: ignore[union-attr]
        deferred, window = Deferred(), ChunkedWindow(self.spans, self.lengths)
        xs = [self.x[first:end].detach().requires_grad_() for first, end in self.spans]
        kept: list[tuple[Tensor, Carries, Carries]] = []
        carries = self.carries
        with deferring(deferred), pass_cache():
            for index, x in enumerate(xs):
                entered = carries
                if index:
                    entered = tuple(Carry(*(part.detach().requires_grad_() for part in carry)) for carry in carries)
                first, end = self.spans[index]
                masks = [None if mask is None else mask[first:end] for mask in self.masks]
                lengths = None if self.lengths is None else (self.lengths - first).clamp(0, end - first)
                y, carries = windowed.run(x, entered, self.layers, masks, lengths, self.how, WindowChunk(window, index))
                kept.append((y, carries, entered))
            handed: list[Tensor | None] = list(self.by_ends)
            for index in reversed(range(len(xs))):
                (y, left, entered), (first, end) = kept[index], self.spans[index]
                pairs = zip([part for carry in left for part in carry], handed, strict=True)
                roots = [(part, grad) for part, grad in pairs if grad is not None and part.requires_grad]
                deferred_gradients.backward([y, *(root for root, _ in roots)], [self.by[first:end], *(grad for _, grad in roots)])
                handed = [part.grad for carry in entered for part in carry]
        deferred.flush()
        dx = torch.cat([x.grad for x in xs if x.grad is not None])
        grads = [leaf.grad for leaf in self.leaves if leaf is not None and leaf.grad is not None]
        assert len(grads) == len(self.leaves)
        return [torch.cat([y.detach() for y, _, _ in kept]), *(part.detach() for carry in carries for part in carry), dx, *grads]


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_chunks_have_the_bits_of_the_same_launches_in_one_call(case: tuple[int, ...], short: bool) -> None:
    stack = Stack(*case, short=short)  # type: ignore[arg-type]
    for own, expected in zip(stack.by_chunks(), stack.at_once(), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_chunks_are_the_definition(case: tuple[int, ...], short: bool) -> None:
    stack = Stack(*case, short=short)  # type: ignore[arg-type]
    for own, expected in zip(stack.by_chunks(), stack.defined(), strict=True):
        # bf16 keeps 8 bits, and errors grow a little from layer to layer.
        assert (own.double() - expected.double()).norm() <= 1.2e-2 * expected.double().norm()


@pytest.mark.parametrize("case", CASES)
def test_a_recording_has_the_same_bits(case: tuple[int, ...]) -> None:
    stack = Stack(*case, short=True)  # type: ignore[arg-type]
    expected = [each.clone() for each in stack.by_chunks()]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        stack.by_chunks()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = stack.by_chunks()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(expected, recorded, strict=True))


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_a_chunk_launches_a_product_and_the_recurrence() -> None:
    """Counted over whole windows of 4 and 8 chunks: each further chunk adds two launches forward and two backward."""
    counts = []
    for chunk in (10, 5):
        stack = Stack(1, 40, 64, 512, 512, chunk, None)
        stack.by_chunks()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            stack.by_chunks()
            torch.cuda.synchronize()
        names = [event.name for event in profile.events() if str(event.device_type).endswith("CUDA")]
        if not names:
            pytest.skip("the profiler sees no launches here")
        counts.append(len(names))
    # A product may be followed by one more launch where its sum is split.
    assert 4 * 4 <= counts[1] - counts[0] <= 4 * 6
