"""Rows cast and padded, and keyed dropout in one pass, on a GPU: the bits of torch's operations, eagerly and from a recording.

Shapes: T time, B lane, U unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from carrywave.kernels import dropout, random
from carrywave.kernels.cuda import aligned, casting
from carrywave.kernels.dropout import Coordinates, dropped, multiplier
from carrywave.model.dropout import Dropout
from carrywave.model.lstm import LSTM

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

HALVES = [torch.bfloat16, torch.float16]
SINGLE = torch.float32
SIZES = [(1, 1), (5, 7), (700, 650), (33_278, 650), (20, 33_278), (129, 1023), (3, 652)]


@pytest.fixture(autouse=True)
def _nothing_fell_back() -> Iterator[None]:
    yield
    assert not casting._cuda_kernel.failures
    assert not dropout._cuda_kernel.failures


def same_bits(own: Tensor, expected: Tensor) -> bool:
    word = torch.int32 if expected.dtype == SINGLE else torch.int16
    return own.dtype == expected.dtype and torch.equal(own.contiguous().view(word), expected.contiguous().view(word))


def numbers(*shape: int, dtype: torch.dtype = SINGLE) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, device="cuda").to(dtype)


def recorded(step: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A step as a graph that has not run yet, and where its results will be."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_rows_are_cast_as_torch_casts_them(rows: int, width: int, wide: bool, half: torch.dtype) -> None:
    source = numbers(rows, width + 3, dtype=SINGLE if wide else half)
    for x in (source[:, :width].contiguous(), source[:, :width], source[:, 3:]):
        padded = casting.padded_rows(x, half)
        assert padded.shape == (rows, -(-width // 8) * 8)
        assert same_bits(padded[:, :width], x.to(half))
        assert not padded[:, width:].any()
        wider = casting.padded_rows(x, half, width + 70)
        assert same_bits(wider, functional.pad(x.to(half), (0, 70)))
        back = casting.dense_rows(padded[:, :width], x.dtype)
        assert back.is_contiguous()
        assert same_bits(back, x.to(half).to(x.dtype))


@pytest.mark.parametrize("half", HALVES)
def test_extreme_numbers_are_cast_as_torch_casts_them(half: torch.dtype) -> None:
    words = torch.arange(-(2**31), 2**31 - 1, 999_983, device="cuda").to(torch.int32)
    x = words.view(SINGLE)
    x = x[x.isfinite()]
    x = torch.cat((x, x.new_tensor([torch.inf, -torch.inf, 0.0, -0.0])))
    x = x[: len(x) // 5 * 5].view(-1, 5)
    assert same_bits(casting.padded_rows(x, half)[:, :5], x.to(half))
    assert casting.padded_rows(torch.full((2, 3), torch.nan, device="cuda"), half)[:, :3].isnan().all()


def test_turned_and_empty_rows_are_left_to_torch() -> None:
    x = numbers(7, 5)
    assert same_bits(casting.padded_rows(x.t(), torch.bfloat16)[:, :7], x.t().bfloat16())
    assert casting.padded_rows(x[:0], torch.bfloat16).shape == (0, 8)


@pytest.mark.parametrize("half", HALVES)
def test_a_linear_layer_has_the_same_bits_with_and_without_the_kernel(half: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = numbers(35, 20, 650).requires_grad_(), numbers(1003, 650).requires_grad_()
    by = numbers(35, 20, 1003, dtype=half)

    def step() -> list[Tensor]:
        with torch.autocast("cuda", half):
            y = aligned.linear(x, weight, None)
        return [y.detach(), *torch.autograd.grad(y, [x, weight], by)]

    own = step()
    graph, replayed = recorded(step)
    graph.replay()
    torch.cuda.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(casting, "_serves", lambda x, to: False)
        expected = step()
    for one, other, again in zip(own, expected, replayed, strict=True):
        assert same_bits(one, other)
        assert same_bits(again, other)


@pytest.mark.parametrize("dtype", [SINGLE, *HALVES])
@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize(("steps", "lanes", "units"), [(1, 1, 1), (3, 5, 7), (35, 20, 650), (16, 64, 1024), (2, 3, 1500), (1, 2600, 650)])
def test_dropout_is_the_definition(steps: int, lanes: int, units: int, p: float, locked: bool, dtype: torch.dtype) -> None:
    key, lanes_B = random.key(3).cuda(), torch.randint(-(2**40), 2**40, (lanes,), device="cuda")
    for start, gap, numbered in ((0, 0, False), (-3, 6, True), (2**31 - 1, 1, True)):
        x = numbers(steps, lanes, units + gap, dtype=dtype)[..., :units].requires_grad_()
        place, given = Coordinates(random.site("here"), p, locked, start), lanes_B if numbered else None
        mask = dropout._defined(x, key, given, place)
        assert same_bits(multiplier(x, key, given, place), mask)
        by = numbers(steps, lanes, units, dtype=dtype)
        for grad in (by, by.transpose(0, 2).contiguous().transpose(0, 2), by[:1, :1, :1].expand_as(x)):
            results = [(y.detach(), *torch.autograd.grad(y, x, grad)) for y in (dropped(x, key, given, place), x * mask)]
            assert all(same_bits(own, expected) for own, expected in zip(*results, strict=True))
    # And those of the CPU.
    there = dropout._defined(x.detach().cpu(), key.cpu(), None if given is None else given.cpu(), place)
    assert same_bits(multiplier(x, key, given, place).cpu(), there)


@pytest.mark.parametrize("locked", [False, True])
def test_chunks_are_parts_of_the_whole(locked: bool) -> None:
    drop, x = Dropout(0.5, locked, name="here"), numbers(20, 6, 2, 325)
    lanes_B, key = torch.arange(6, device="cuda") * 3, random.key(1).cuda()
    with random.Scope(key, lanes_B, 5):
        whole = drop(x)
    for first, end in ((0, 7), (7, 20)):
        with random.Scope(key, lanes_B[1:4], 5 + first):
            assert torch.equal(drop(x[first:end, 1:4]), whole[first:end, 1:4])
    assert 0.4 < (whole == 0).float().mean() < 0.6


@pytest.mark.parametrize("dtype", [SINGLE, *HALVES])
@pytest.mark.parametrize("locked", [False, True])
def test_a_recording_follows_key_and_lanes(locked: bool, dtype: torch.dtype) -> None:
    x, by = numbers(9, 6, 650, dtype=dtype).requires_grad_(), numbers(9, 6, 650, dtype=dtype)
    key, lanes_B, place = random.key(1).cuda(), torch.arange(6, device="cuda"), Coordinates(77, 0.5, locked, start=4)

    def step() -> list[Tensor]:
        y = dropped(x, key, lanes_B, place)
        return [y.detach(), *torch.autograd.grad(y, x, by), multiplier(x, key, lanes_B, place)]

    step()  # it is checked at first use, which cannot be recorded
    graph, replayed = recorded(step)
    for seed in (2, 3):
        key.copy_(random.key(seed))
        lanes_B.copy_(torch.randperm(60)[:6])
        graph.replay()
        torch.cuda.synchronize()
        mask = dropout._defined(x, key, lanes_B, place)
        for own, expected in zip(replayed, (x.detach() * mask, by * mask, mask), strict=True):
            assert same_bits(own, expected)


def test_dropped_weights_and_layers_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    lstm = LSTM(6, 10, 2, dropout=0.5, weight_drop=0.5, kernel="reference")
    key = random.key(9)
    here = lstm.weights(1, key)[0].w_hh
    x = torch.randn(4, 3, 6)
    y, _ = lstm(x, None, None, key)
    lstm = lstm.cuda()
    there = lstm.weights(1, key.cuda())[0].w_hh
    assert torch.equal(there.cpu(), here)
    on_gpu, _ = lstm(x.cuda(), None, None, key.cuda())
    # float32, sums in another order.
    torch.testing.assert_close(on_gpu.cpu(), y, rtol=1e-4, atol=1e-5)


def test_while_a_graph_is_recorded_an_unchecked_kernel_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, key, place = numbers(4, 3, 16), random.key(1).cuda(), Coordinates(1, 0.5)
    expected = dropped(x, key, None, place)
    monkeypatch.setattr(dropout, "_checked", set())
    monkeypatch.setattr(dropout, "_launch", lambda *_: pytest.fail("it has not been checked"))
    dropout._defined(x, key, None, place)  # what the definition compiles, it compiles now
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dropped(x, key, None, place)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)
