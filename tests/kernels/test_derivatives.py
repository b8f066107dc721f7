"""Gradients of gradients, and derivatives by other ways than backward: those of the definition, on every path of the CPU. float64.

Shapes: T time, B lane, I input, H hidden, V classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn import functional

from carrywave.cells.cell import Cell, by_name
from carrywave.kernels import cross_entropy, deferred_gradients, reference
from carrywave.kernels.carry import Carry
from carrywave.kernels.cuda import nvrtc
from carrywave.kernels.deferred_gradients import Deferred, deferring
from carrywave.kernels.dispatch import backends_of
from carrywave.kernels.gru import aten as gru_aten
from carrywave.kernels.gru import manual as gru_manual
from carrywave.kernels.lstm import aten, manual
from carrywave.kernels.weights import LayerWeights

DOUBLE = torch.float64
LSTM, GRU = by_name("lstm"), by_name("gru")
both_cells = pytest.mark.parametrize(("cell", "layer"), [(LSTM, manual.layer), (GRU, gru_manual.layer)], ids=["lstm", "gru"])
LENGTHS = torch.tensor([3, 0, 2])
# Both are the same sums of some dozen terms, in another order.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def made(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape)), dtype=DOUBLE, requires_grad=True)


def tensors(directions: int = 1, *, bias: bool = True, cell: Cell = LSTM) -> list[Tensor]:
    """x, the parts of the carry, and the weights of each direction, of 2 units for 2 numbers."""
    shapes: list[tuple[int, ...]] = [(3, 3, 2), *[(directions, 3, 2)] * len(cell.parts)]
    rows = 2 * cell.gates
    weights = [(rows, 2), (rows, 2), *([(rows,), (rows,)] if bias else [])]
    return [made(*shape, seed=n) for n, shape in enumerate(shapes + weights * directions)]


def run(
    layer: Callable[..., Any], lengths: Tensor | None, directions: int, given: tuple[Tensor, ...], cell: Cell = LSTM
) -> tuple[Tensor, ...]:
    x, parts, rest = given[0], given[1 : 1 + len(cell.parts)], given[1 + len(cell.parts) :]
    count = len(rest) // directions
    weights = tuple(LayerWeights(*rest[first : first + count]) for first in range(0, len(rest), count))
    y, end = layer(x, cell.carry(*parts), weights, lengths)
    return y, *end


def penalty(out: tuple[Tensor, ...], given: list[Tensor]) -> list[Tensor]:
    """The gradients of the squares of all gradients of a number that is linear in the outputs, as gradient penalties are."""
    first = torch.autograd.grad(sum(part.sum() for part in out), given, create_graph=True)  # type: ignore[arg-type]
    return list(torch.autograd.grad(sum(each.square().sum() for each in first), given))  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "lengths"])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize(
    ("cell", "layer"),
    [(LSTM, manual.layer), (LSTM, aten.layer), (GRU, gru_manual.layer), (GRU, gru_aten.layer)],
    ids=["lstm manual", "lstm aten", "gru manual", "gru aten"],
)
def test_a_gradient_penalty_is_that_of_the_definition(cell: Cell, layer: Any, directions: int, lengths: Tensor | None) -> None:
    given = tensors(directions, cell=cell)
    expected = penalty(run(partial(reference.layer, cell=cell), lengths, directions, tuple(given), cell), given)
    got = penalty(run(layer, lengths, directions, tuple(given), cell), given)
    assert all(bool((each != 0).any()) for each in expected)
    torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize("lengths", [None, torch.tensor([2, 0])], ids=["full", "lengths"])
@pytest.mark.parametrize("bias", [True, False])
@both_cells
def test_second_derivatives_agree_with_differences(cell: Cell, layer: Any, bias: bool, lengths: Tensor | None) -> None:
    x, *rest = tensors(bias=bias, cell=cell)
    parts, weights = rest[: len(cell.parts)], rest[len(cell.parts) :]
    given = tuple(each.detach().requires_grad_() for each in (x[:2, :2], *(part[:, :2] for part in parts), *weights))
    assert gradcheck(lambda *each: run(layer, lengths, 1, each, cell), given, fast_mode=True)
    assert gradgradcheck(lambda *each: run(layer, lengths, 1, each, cell), given, fast_mode=True)


@both_cells
def test_an_ordinary_backward_does_not_go_through_the_definition(cell: Cell, layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "layer", None)
    y, *_ = run(layer, LENGTHS, 1, tuple(tensors(cell=cell)), cell)
    y.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch.func.jvp itself
def test_what_is_looked_at_from_outside_runs_on_plain_operations() -> None:
    x, layer = made(3, 2, 2), (LayerWeights(made(8, 2), made(8, 2, seed=1)),)
    usual = backends_of(LSTM).choose("auto", x, layer)
    assert usual != "reference"
    chosen = []

    def seen(each: Tensor) -> Tensor:
        chosen.append(backends_of(LSTM).choose("auto", x, layer))
        return each.sum()

    torch.func.grad(seen)(torch.zeros(2))
    torch.func.vmap(seen)(torch.zeros(2, 2))
    torch.func.jvp(seen, (torch.zeros(2),), (torch.zeros(2),))
    with forward_ad.dual_level():
        seen(torch.zeros(2))
    assert chosen == ["reference"] * 4
    assert backends_of(LSTM).choose("auto", x[:, :0], layer) == "reference"
    assert backends_of(LSTM).choose("auto", x, layer) == usual


def test_a_put_off_gradient_is_no_hidden_part_of_one_that_a_loss_asks_for() -> None:
    weight, table, index = made(4, 3), made(5, 3, seed=2), torch.tensor([[0, 4], [4, 1]])
    cells = [made(8, 3, seed=3), made(8, 2, seed=4)]
    zero = Carry(torch.zeros(1, 2, 2, dtype=DOUBLE), torch.zeros(1, 2, 2, dtype=DOUBLE))

    def loss(again: bool, embedding: Any, linear: Any, layer: Any) -> Tensor:
        rows = embedding(index, table)
        y, _ = layer(rows, zero, (LayerWeights(*cells),), None)
        out = linear(rows, weight).square().sum() + y.sum()
        [slope] = torch.autograd.grad(out, rows, create_graph=again, retain_graph=True)
        [of_table] = torch.autograd.grad(out, table, create_graph=again, retain_graph=True)
        return out + slope.square().sum() + of_table.square().sum()

    for again in (False, True):
        leaves = [weight, table, *cells]
        expected = torch.autograd.grad(loss(again, functional.embedding, functional.linear, reference.layer), leaves)
        deferred = Deferred()
        with deferring(deferred):
            total = loss(again, deferred_gradients.embedding, deferred_gradients.linear, manual.layer)
            assert not any(deferred.pending(each) for each in leaves)
            deferred_gradients.backward([total], [None])
            assert all(deferred.pending(each) for each in leaves)
        deferred.flush()
        torch.testing.assert_close([each.grad for each in leaves], list(expected), **TOLERANCE)
        for each in leaves:
            each.grad = None


def test_cross_entropy_of_the_own_kernel_goes_through_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its forward stands in for the kernel; what is kept, and backward, are its own.
    def launched(name: str, like: Tensor) -> Any:
        def run(_grid: Any, _block: Any, logits: Tensor, target: Tensor, losses: Tensor, *_: Any) -> None:
            assert name == "score_forward"
            losses.copy_(functional.cross_entropy(logits, target, ignore_index=-100, reduction="none"))

        return run

    monkeypatch.setattr(cross_entropy, "_kernel", launched)
    monkeypatch.setattr(nvrtc, "available", lambda: "")
    monkeypatch.setattr(cross_entropy, "_serves", lambda *_: True)
    target = torch.tensor([1, -100, 4])
    for width in (5, 6):  # rows that it reads in place, and rows that it copies first
        logits = made(3, width)

        def second(total: Tensor, logits: Tensor) -> Tensor:
            [first] = torch.autograd.grad(total, logits, create_graph=True)
            [found] = torch.autograd.grad(first.square().sum(), logits)
            return found

        expected = second(functional.cross_entropy(logits, target, ignore_index=-100, reduction="sum"), logits)
        torch.testing.assert_close(second(cross_entropy.summed(logits, target, -100), logits), expected, rtol=1e-6, atol=1e-7)
