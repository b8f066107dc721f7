"""Packed weights: the same products, packed once a pass, and the same layers whether in chunks or not.

Shapes: T time, B lane, I input, H hidden, N rows, G outputs.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from carrywave.cells import lstm
from carrywave.kernels import deferred_gradients, reference
from carrywave.kernels.carry import Carry
from carrywave.kernels.deferred_gradients import Deferred, deferring
from carrywave.kernels.lstm import manual, packed
from carrywave.kernels.pass_cache import pass_cache
from carrywave.kernels.step_marks import StepMarks
from carrywave.kernels.weights import LayerWeights

STEPS, LANES, INPUTS, HIDDEN = 12, 5, 7, 6
needs_mkl = pytest.mark.skipif(not packed.AVAILABLE, reason="torch was built without MKL")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs weights of any size."""
    for name in ("SMALLEST", "SMALLEST_TRANSPOSED", "FEWEST_ROWS", "FEWEST_USES"):
        monkeypatch.setattr(packed, name, 1)
    monkeypatch.setattr(manual, "FEWEST_USES", 1)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, small: None) -> list[tuple[int, ...]]:
    """Packs anywhere and in float64; lists what has been packed, as (outputs, inputs, rows)."""
    made = list[tuple[int, ...]]()

    def reorder(weight_GI: Tensor, rows: int) -> Tensor:
        made.append((*weight_GI.shape, rows))
        return weight_GI.detach().clone()

    def multiply(x_NI: Tensor, mine_GI: Tensor, own_GI: Tensor, bias_G: Tensor | None, rows: int) -> Tensor:
        assert x_NI.shape == (rows, own_GI.shape[1])
        return linear(x_NI, mine_GI, bias_G)

    monkeypatch.setattr(packed, "_MKL", SimpleNamespace(_mkl_reorder_linear_weight=reorder, _mkl_linear=multiply))
    monkeypatch.setattr(packed, "AVAILABLE", True)
    monkeypatch.setattr(packed, "DTYPE", torch.float64)
    return made


class Problem:
    """A layer and its inputs, and gradients of a random projection of its outputs and its last carry."""

    def __init__(self, dtype: torch.dtype, *, biased: bool = True, resets: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)

        def make(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        rows = 4 * HIDDEN
        shapes = ((rows, INPUTS), (rows, HIDDEN), *((rows,),) * (2 * biased))
        self.layer = LayerWeights(*(nn.Parameter(make(*shape)) for shape in shapes))
        self.x, self.h, self.c = make(STEPS, LANES, INPUTS), make(1, LANES, HIDDEN), make(1, LANES, HIDDEN)
        self.by, self.by_h, self.by_c = make(STEPS, LANES, HIDDEN), make(1, LANES, HIDDEN), make(1, LANES, HIDDEN)
        self.resets = torch.rand(STEPS, LANES, generator=generator) < 0.2 if resets else None

    def expected(self) -> list[Tensor]:
        """Outputs and gradients by definition, in one piece."""
        x, carry = self.x.clone().requires_grad_(), Carry(self.h.clone().requires_grad_(), self.c.clone().requires_grad_())
        y, end = reference.layer(x, carry, (self.layer,), None, lstm.CELL, marks=self._marks(0, STEPS))
        torch.autograd.backward([y, *end], [self.by, self.by_h, self.by_c])
        return [y.detach(), x.grad, *(part.grad for part in carry), *self._taken()]  # type: ignore[list-item]

    def in_chunks(self, steps: int) -> list[Tensor]:
        """The same on `manual`, as the executor runs a pass: chunk by chunk, with the weight gradients at the end."""
        deferred, chunks = Deferred(), list[tuple[Tensor, Carry, Tensor, Carry]]()
        carry = Carry(self.h, self.c)
        with pass_cache(), deferring(deferred):
            for first in range(0, STEPS, steps):
                x = self.x[first : first + steps].clone().requires_grad_()
                entered = Carry(*(part.detach().requires_grad_() for part in carry))
                y, carry = manual.layer(x, entered, (self.layer,), None, marks=self._marks(first, steps))  # type: ignore[assignment]
                chunks.append((x, entered, y, carry))
            gradients: list[Tensor | None] = [self.by_h, self.by_c]
            for number, (_, entered, y, left) in reversed(list(enumerate(chunks))):
                by = self.by[number * steps : (number + 1) * steps]
                deferred_gradients.backward([y, *left], [by, *gradients])
                gradients = [part.grad for part in entered]
            deferred.flush()
        of_x = torch.cat([x.grad for x, *_ in chunks if x.grad is not None])
        return [torch.cat([y.detach() for _, _, y, _ in chunks]), of_x, *gradients, *self._taken()]  # type: ignore[list-item]

    def _marks(self, first: int, steps: int) -> StepMarks | None:
        return None if self.resets is None else StepMarks(self.resets[first : first + steps])

    def _taken(self) -> list[Tensor]:
        """The gradients of the weights, which are gone then."""
        found = [tensor.grad for tensor in self.layer.tensors()]
        for tensor in self.layer.tensors():
            tensor.grad = None
        return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize("steps", [1, 4, 12])
def test_a_layer_is_its_definition(emulated: list[tuple[int, ...]], steps: int, resets: bool, biased: bool) -> None:
    problem = Problem(torch.float64, biased=biased, resets=resets)
    # float64, another order of summation
    torch.testing.assert_close(problem.in_chunks(steps), problem.expected(), rtol=1e-11, atol=1e-11)
    assert emulated


def test_every_weight_is_packed_once_a_pass(emulated: list[tuple[int, ...]]) -> None:
    problem, rows = Problem(torch.float64), 4 * HIDDEN
    problem.in_chunks(4)
    forward = [(rows, INPUTS, 4 * LANES), (rows, HIDDEN, LANES)]
    backward = [(INPUTS, rows, 4 * LANES), (HIDDEN, rows, LANES)]
    assert sorted(emulated) == sorted([*forward, *backward])
    emulated.clear()
    with torch.no_grad():
        problem.layer.w_hh.mul_(0.5)  # as an optimizer does
    torch.testing.assert_close(problem.in_chunks(4), problem.expected(), rtol=1e-11, atol=1e-11)  # not the weights of the pass before


@needs_mkl
@pytest.mark.parametrize("steps", [1, 4, 12])
def test_a_layer_on_mkl(small: None, steps: int) -> None:
    results, expected = Problem(torch.float32).in_chunks(steps), Problem(torch.float64).expected()
    # float32 has 24 bits; gradients are sums over 60 steps and lanes of terms up to about 10
    torch.testing.assert_close([each.double() for each in results], expected, rtol=1e-4, atol=1e-3)


def test_what_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(packed.SMALLEST // 512, 512)
    monkeypatch.setattr(packed, "_MKL", SimpleNamespace(_mkl_reorder_linear_weight=lambda weight, rows: weight))
    monkeypatch.setattr(packed, "AVAILABLE", True)
    assert packed.packed(weight, 4) is not None
    assert packed.packed(weight, 3) is None
    assert packed.packed(weight[1:], 4) is None
    assert packed.packed(weight, 4, transposed=True) is None
    assert packed.packed(weight.double(), 4) is None
    monkeypatch.setattr(packed, "AVAILABLE", False)
    assert packed.packed(weight, 4) is None
