"""A stack as a wave, without a GPU: the launches of `recurrence` are replaced by what they define, in float64.

Every buffer holds NaN until it is written, and a launch may only read what was written before it in the order of the streams: so
this also shows that chunks and layers come after what they need, and that nothing is left out.

Shapes: T time, B lane, I input, H hidden, P padded, Q = 4P.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from _emulated import deal, last_state, real_rows

from carrywave.errors import UserError
from carrywave.kernels import reference
from carrywave.kernels.carry import Carry
from carrywave.kernels.hopper import recurrence, stack, wave
from carrywave.kernels.hopper.layout import H200, Chip, LayerShape, Wave, wave_for
from carrywave.kernels.hopper.recurrence import Dealt, Packed
from carrywave.kernels.weights import LayerWeights

SHAPE = LayerShape(64, 1, 8, 1)
NAN = float("nan")


def pack(weights: LayerWeights, shape: LayerShape, pitch: int, like: Tensor, *, transposed: bool) -> Packed:
    hidden = weights.w_hh.shape[1]

    def packed(weight_GI: Tensor, width: int) -> Tensor:
        out = like.new_zeros(shape.hidden, 4, width)
        out[:hidden, :, : weight_GI.shape[1]] = weight_GI.view(4, hidden, -1).transpose(0, 1)
        return out.view(4 * shape.hidden, width)

    w_hh, bias = packed(weights.w_hh, shape.hidden), like.new_zeros(shape.hidden, 4)
    if weights.b_ih is not None and weights.b_hh is not None:
        bias[:hidden] = (weights.b_ih + weights.b_hh).view(4, hidden).t()
    return Packed(packed(weights.w_ih, pitch), w_hh, w_hh.t().contiguous() if transposed else None, bias.view(-1))


def states(h_BH: Tensor, shape: LayerShape, steps: int, like: Tensor) -> Tensor:
    hs = like.new_full((steps + 1, h_BH.shape[0], shape.hidden), NAN)
    hs[0] = torch.nn.functional.pad(h_BH, (0, shape.hidden - h_BH.shape[1]))
    return hs


def gradients(gates_NQ: Tensor, shape: LayerShape, launches: int) -> tuple[Tensor, Tensor]:
    return torch.full_like(gates_NQ, NAN), torch.zeros(launches, 1)


def forward(
    shape: LayerShape,
    packed: Packed,
    hs: Tensor,
    gates: Tensor,
    cells: Tensor | None,
    first_c: Tensor,
    last_c: Tensor,
    dealt: Dealt,
) -> None:
    steps, lanes = hs.shape[0] - 1, hs.shape[1]
    by_step, c = gates.view(steps, lanes, -1, 4), first_c.clone()
    lengths = torch.full((lanes,), steps) if dealt.lengths_B is None else dealt.lengths_B
    for step in range(steps):
        at = lengths > step
        i, f, g, o = (by_step[step, at] + (hs[step, at] @ packed.w_hh_QP.t()).view(-1, shape.hidden, 4)).unbind(-1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c[at] = f * c[at] + i * g
        hs[step + 1] = 0.0
        hs[step + 1, at] = o * c[at].tanh()
        by_step[step, at] = torch.stack((i, f, g, o), dim=-1)
        if cells is not None:
            cells[step, at] = c[at]
    last_c.copy_(c)


def backward(
    shape: LayerShape,
    turned: Tensor,
    gates: Tensor,
    cells: Tensor,
    first_c: Tensor,
    grad_y: Tensor,
    grad_last: tuple[Tensor | None, Tensor | None],
    grads: Tensor,
    grad_first: tuple[Tensor, Tensor],
    bias: Tensor,
    ring: Tensor,
    dealt: Dealt,
) -> None:
    steps, lanes = cells.shape[:2]
    lengths = torch.full((lanes,), steps) if dealt.lengths_B is None else dealt.lengths_B
    dh, dc = (torch.zeros_like(first_c) if each is None else each.clone() for each in grad_last)
    by_step = grads.view(steps, lanes, -1, 4)
    bias.zero_()
    for step in reversed(range(steps)):
        at = lengths > step
        by_step[step] = 0.0
        i, f, g, o = gates.view(steps, lanes, -1, 4)[step, at].unbind(-1)
        before = cells[step - 1, at] if step else first_c[at]
        slope = cells[step, at].tanh()
        own = dh[at] + grad_y[step, at]
        through = dc[at] + own * o * (1 - slope * slope)
        four = through * g * i * (1 - i), through * before * f * (1 - f), through * i * (1 - g * g), own * slope * o * (1 - o)
        by_step[step, at] = torch.stack(four, dim=-1)
        dh[at] = by_step[step, at].flatten(1) @ turned.t()
        dc[at] = through * f
        bias[0] += by_step[step].sum(0).flatten()
    for to, value in zip(grad_first, (dh, dc), strict=True):
        to.copy_(value)


def unpack(
    grad_ih: Tensor | None, grad_hh: Tensor | None, bias: Tensor, like: Tensor, hidden: int, inputs: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    def plain(grad: Tensor | None, width: int) -> Tensor | None:
        return None if grad is None else grad.view(-1, 4, grad.shape[1])[:hidden, :, :width].transpose(0, 1).reshape(4 * hidden, width)

    return plain(grad_ih, inputs), plain(grad_hh, hidden), bias.sum(0).view(-1, 4)[:hidden].t().reshape(-1).expand(2, -1).clone()


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "prepare_backward", lambda shape, like: None)
    for replaced in (pack, states, gradients, deal, real_rows, last_state, forward, backward, unpack):
        monkeypatch.setattr(recurrence, replaced.__name__, replaced)
    padded_to, new_empty = recurrence.padded_to, Tensor.new_empty

    def empty(self: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        made = new_empty(self, *shape, dtype=torch.float64 if dtype == torch.float32 else dtype)
        return made.fill_(NAN) if made.is_floating_point() else made

    monkeypatch.setattr(recurrence, "padded_to", lambda x, width, dtype: padded_to(x, width, torch.float64))
    monkeypatch.setattr(Tensor, "new_empty", empty)


def make(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@settings(max_examples=40)
@given(
    count=st.integers(1, 4),
    steps=st.integers(1, 9),
    lanes=st.integers(1, 6),
    inputs=st.integers(1, 12),
    chunk=st.integers(1, 9),
    short=st.booleans(),
    dropped=st.sampled_from(["", "steps", "locked"]),
    biased=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_wave_is_the_definition(
    count: int, steps: int, lanes: int, inputs: int, chunk: int, short: bool, dropped: str, biased: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden = 20
    shapes = [((4 * hidden, hidden if layer else inputs), (4 * hidden, hidden), *([(4 * hidden,)] * 2 * biased)) for layer in range(count)]
    layers = [LayerWeights(*[make(*each).mul_(0.3).requires_grad_() for each in of_layer]) for of_layer in shapes]
    carries = tuple(Carry(*(make(1, lanes, hidden).requires_grad_() for _ in "hc")) for _ in range(count))
    x = make(steps, lanes, inputs).requires_grad_()
    masks: list[Tensor | None] = [None] * count
    if dropped:
        of_mask = (steps if dropped == "steps" else 1, lanes, hidden)
        masks[:-1] = [(torch.rand(of_mask) > 0.5).to(torch.float64) * 2 for _ in range(count - 1)]
    lengths = torch.randint(0, steps + 1, (lanes,)) if short else None
    leaves = [x, *(part for carry in carries for part in carry), *(part for layer in layers for part in layer if part is not None)]

    y_expected, ends_expected = x, []
    for layer, carry, mask in zip(layers, carries, masks, strict=True):
        y_expected, end = reference.layer(y_expected, carry, (layer,), lengths)
        y_expected = y_expected if mask is None else y_expected * mask
        ends_expected.append(end)
    y, ends = wave.run(x, carries, layers, masks, lengths, Wave(SHAPE, 1, min(chunk, steps)))

    outputs = [(y, y_expected)]
    for end, expected_end in zip(ends, ends_expected, strict=True):
        outputs += zip(end, expected_end, strict=True)
    for own, expected in outputs:
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)
    weights = [make(*own.shape) for own, _ in outputs]
    sums = [torch.stack([(weight * pair[which]).sum() for weight, pair in zip(weights, outputs, strict=True)]).sum() for which in (0, 1)]
    for own, expected in zip(*(torch.autograd.grad(total, leaves) for total in sums), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-11, atol=1e-11)


def test_padding_may_hold_anything() -> None:
    torch.manual_seed(0)
    layers = [LayerWeights(make(80, 20), make(80, 20), make(80), make(80)) for _ in range(2)]
    carries = tuple(Carry(make(1, 3, 20), make(1, 3, 20)) for _ in range(2))
    lengths, x = torch.tensor([4, 0, 2]), make(4, 3, 20)
    spoiled = torch.where((torch.arange(4)[:, None] < lengths)[..., None], x, NAN)
    for each in layers:
        each.w_ih.requires_grad_()
    results = []
    for given_x in (x, spoiled):
        y, _ = wave.run(given_x, carries, layers, [None, None], lengths, Wave(SHAPE, 1, 3))
        results.append([y, *torch.autograd.grad(y.sum(), [each.w_ih for each in layers])])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_gradient_of_a_gradient_is_refused() -> None:
    x = make(4, 3, 20).requires_grad_()
    layers = [LayerWeights(make(80, 20), make(80, 20))]
    y, _ = wave.run(x, (Carry(make(1, 3, 20), make(1, 3, 20)),), layers, [None], None, Wave(SHAPE, 1, 4))
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    with pytest.raises(UserError, match="the persistent LSTM kernel has no second derivative; build the LSTM with kernel='reference'"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(UserError, match="or to compute many at once"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape, dtype=torch.float64), is_grads_batched=True)


def test_without_gradients_nothing_is_kept() -> None:
    layers = [LayerWeights(make(80, 20), make(80, 20))]
    y, [end] = wave.run(make(4, 3, 20), (Carry(make(1, 3, 20), make(1, 3, 20)),), layers, [None], None, Wave(SHAPE, 1, 4))
    assert y.grad_fn is None
    assert torch.equal(end.h[0], y[-1])


def test_where_gradients_are_off_nothing_is_kept_for_weights_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run = recurrence.forward

    def forward(*given: Any) -> None:
        seen.append(given[4] is not None)
        run(*given)

    monkeypatch.setattr(recurrence, "forward", forward)
    layers = [LayerWeights(make(80, 20).requires_grad_(), make(80, 20).requires_grad_())]
    carries = (Carry(make(1, 3, 20), make(1, 3, 20)),)
    with torch.no_grad():
        wave.run(make(4, 3, 20), carries, layers, [None], None, Wave(SHAPE, 1, 4))
    wave.run(make(4, 3, 20), carries, layers, [None], None, Wave(SHAPE, 1, 4))
    assert seen == [False, True]


@pytest.mark.parametrize(
    ("x", "lanes", "message"), [((4, 3, 19), 3, "inputs are 19 wide"), ((4, 3, 20), 2, "expected .1, 3, 20. for both")]
)
def test_what_does_not_fit_together_is_refused(x: tuple[int, ...], lanes: int, message: str) -> None:
    layers = [LayerWeights(make(80, 20), make(80, 20))]
    with pytest.raises(ValueError, match=message):
        wave.run(make(*x), (Carry(make(1, lanes, 20), make(1, lanes, 20)),), layers, [None], None, Wave(SHAPE, 1, 4))


@given(st.sampled_from([H200, Chip(32, 28, 24, 16)]), st.integers(1, 12), st.integers(1, 1536), st.integers(1, 300), st.integers(1, 600))
def test_all_that_runs_at_once_fits_the_chip(chip: Chip, layers: int, hidden: int, lanes: int, steps: int) -> None:
    found = wave_for(chip, layers, hidden, lanes, steps)
    if found is None:
        return
    assert found.shape.fits(chip)
    assert found.streams * found.shape.blocks <= chip.multiprocessors
    assert 1 <= found.streams <= layers
    assert 1 <= found.chunk_steps <= steps
    assert found.shape.groups * found.shape.lanes * found.shape.passes >= lanes
    if found.streams == 1:
        assert found.chunk_steps == steps


def test_a_wave_serves_small_batches_of_many_layers() -> None:
    small, large = wave_for(H200, 8, 512, 16, 256), wave_for(H200, 8, 512, 128, 256)
    assert small is not None
    assert large is not None
    assert small.streams == 8
    assert large.streams == 1


def test_everything_comes_after_what_it_needs() -> None:
    for layers in range(1, 6):
        for chunks in range(1, 6):
            order = list(stack.diagonals(layers, chunks))
            place = {each: number for number, each in enumerate(order)}
            assert len(place) == layers * chunks
            for layer, chunk in order:
                assert all(place[before] < place[layer, chunk] for before in ((layer - 1, chunk), (layer, chunk - 1)) if min(before) >= 0)
