"""A stack of recurrent layers that every implementation can run, for `kernels`.

Shapes: T time, B lane, I input, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends.cudnn.rnn import get_cudnn_mode
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.harness.shapes import StackShape
from carrywave.cells.cell import by_name
from carrywave.kernels import random
from carrywave.kernels.carry import AnyCarries, changed
from carrywave.kernels.dispatch import Backends, backends_of
from carrywave.kernels.layers import run_layers
from carrywave.kernels.step_marks import CellNoise, StepMarks
from carrywave.kernels.weights import Layer, LayerWeights

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Large enough that gradients which shrink through eight layers stay normal (not subnormal) in fp16, and small enough that sums stay finite.
GRADIENT_SCALE = 8.0


@dataclass(frozen=True)
class StackCase(StackShape):
    """A stack and its batch, in one precision."""

    dtype: str = "bf16"
    lengths: bool = False
    dropout: float = 0.0
    cell: str = "lstm"
    resets: float = 0.0  # share of the steps at which a lane starts again, drawn at random
    zoneout: float = 0.0  # chance that a unit keeps its h and its memory
    recurrent_dropout: float = 0.0
    heads: int = 1
    norm: bool = False  # layer norm inside the cell

    @property
    def marked(self) -> bool:
        """True if something happens at the steps besides what the cell computes."""
        return bool(self.resets or self.zoneout or self.recurrent_dropout)

    @property
    def marks(self) -> str:
        """What happens there, in words."""
        named = (("resets", self.resets), ("zoneout", self.zoneout), ("recurrent", self.recurrent_dropout))
        return " ".join(f"{name}{share:g}" for name, share in named if share)

    @property
    def words(self) -> frozenset[str]:
        """The words that select this case."""
        own = (*self.name.split(), self.dtype, "lengths" if self.lengths else "padded", f"dropout{self.dropout:g}", self.cell)
        return frozenset(own) | self.special

    @property
    def special(self) -> frozenset[str]:
        """What this case has that a plain LSTM has not: one of these words is needed to select it."""
        named = {self.cell: self.cell != "lstm", f"heads{self.heads}": self.heads > 1, "norm": self.norm}
        return frozenset((*self.marks.split(), *(name for name, there in named.items() if there)))

    @property
    def lane_steps(self) -> list[int]:
        """Real steps of each lane: all T, or spread evenly from T down to T/4, longest first, the order that suits packing best."""
        if not self.lengths:
            return [self.steps] * self.lanes
        return [max(1, round(self.steps * (1 - 0.75 * lane / max(1, self.lanes - 1)))) for lane in range(self.lanes)]


class Stack:
    """Weights, inputs and output gradient for one case. Each method returns the outputs and the gradients of inputs and weights.

    Ours keeps the weights in float32 and casts them in every call, as training does; torch's module holds them in the short dtype. The
    values are exactly representable in both, so any error comes from the arithmetic.
    """

    def __init__(self, case: StackCase, device: torch.device) -> None:
        self.case, self.dtype = case, DTYPES[case.dtype]
        draw = torch.Generator(device).manual_seed(1)
        shape = (case.steps, case.lanes, case.hidden)
        bound = case.hidden**-0.5

        def normal() -> Tensor:
            return torch.randn(shape, generator=draw, device=device).to(self.dtype)

        def weight(*size: int) -> Tensor:
            drawn = torch.empty(size, device=device).uniform_(-bound, bound, generator=draw)
            return drawn.to(self.dtype).to(torch.float32).requires_grad_()

        self.backends: Backends = backends_of(cell := by_name(case.cell))
        wide = cell.gates * case.hidden
        self.x_TBI = normal().requires_grad_()
        self.layers: list[Layer] = []
        for _ in range(case.layers):
            matrices = weight(wide, case.hidden), weight(wide, case.hidden // case.heads), weight(wide), weight(wide)
            further = cell.further(case.hidden, norm=True).items() if case.norm else ()
            extra = {name: torch.full(each.shape, each.value, device=device).requires_grad_() for name, each in further}
            self.layers.append((LayerWeights(*matrices, extra=extra or None),))
        start = torch.zeros(1, case.lanes, case.hidden, device=device)
        self.carries: AnyCarries = (cell.carry(*[start] * len(cell.parts)),) * case.layers
        self.lengths_B = torch.tensor(case.lane_steps, device=device) if case.lengths else None
        self.grad_TBH = normal() * GRADIENT_SCALE
        if self.lengths_B is not None:
            # No loss depends on outputs beyond a lane's length.
            beyond_TB = torch.arange(case.steps, device=device)[:, None] >= self.lengths_B
            self.grad_TBH.masked_fill_(beyond_TB[..., None], 0.0)
        self.key = random.key(1).to(device)
        self.resets_TB = torch.rand(shape[:2], generator=draw, device=device) < case.resets if case.resets else None
        sites = [f"layer {layer}" for layer in range(case.layers)]
        noise = [CellNoise(case.recurrent_dropout, (case.zoneout,) * len(cell.parts), (own,), key=self.key) for own in sites]
        noisy = case.zoneout or case.recurrent_dropout
        self.marks = [StepMarks(self.resets_TB, noise=each if noisy else None) for each in noise] if case.marked else None

    def ours(self, backend: str) -> list[Tensor]:
        """Our layers on a given backend."""
        device = self.x_TBI.device.type
        with torch.autocast(device, self.dtype, enabled=self.dtype != torch.float32):
            y_TBH, _ = self._run(self.x_TBI, self.carries, self.layers, backend)
        return _with_gradients(y_TBH, [self.x_TBI, *self._weights(self.layers)], self.grad_TBH)

    def exact(self) -> list[Tensor]:
        """The reference implementation in float64."""
        x_TBI = self.x_TBI.detach().double().requires_grad_()
        layers = [tuple(each.to(torch.float64) for each in layer) for layer in self.layers]
        carries = tuple(changed(carry, lambda part: part.double()) for carry in self.carries)
        y_TBH, _ = self._run(x_TBI, carries, layers, "reference")
        return _with_gradients(y_TBH, [x_TBI, *self._weights(layers)], self.grad_TBH.double())

    def compiled(self) -> list[Tensor]:
        """A loop over the steps of one layer with norms, each step compiled by torch."""
        [[own]] = self.layers
        with torch.autocast(self.x_TBI.device.type, self.dtype, enabled=self.dtype != torch.float32):
            gates_TBG = own.inputs(self.x_TBI).unbind()
        carry, outputs = tuple(part[0] for part in self.carries[0]), []
        for gates_BG in gates_TBG:
            with torch.autocast(self.x_TBI.device.type, self.dtype, enabled=self.dtype != torch.float32):
                carry = self._compiled_step(gates_BG, carry)
            outputs.append(carry[0])
        return _with_gradients(torch.stack(outputs), [self.x_TBI, *self._weights(self.layers)], self.grad_TBH)

    @cached_property
    def _compiled_step(self) -> Any:
        cell, [[own]] = by_name(self.case.cell), self.layers

        def step(gates_BG: Tensor, carry: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return cell.step(gates_BG, carry, own)

        return torch.compile(step)

    def torchs(self) -> list[Tensor]:
        """torch's module on the whole stack, which is cuDNN on a GPU. With lengths it packs and unpacks; sequences between resets are
        split and padded to the longest, as lanes of their own.
        """
        if self.lengths_B is not None:
            packed = pack_padded_sequence(self.x_TBI, self._lengths_on_host)
            y_TBH, _ = pad_packed_sequence(self._module(packed)[0], total_length=self.case.steps)
        elif self.resets_TB is not None:
            steps, lanes, width = self.x_TBI.shape
            (longest, count), rows = self._segments
            padded = self.x_TBI.new_zeros(longest * count, width).index_copy(0, rows, self.x_TBI.view(-1, width))
            y = self._module(padded.view(longest, count, width))[0]
            y_TBH = y.view(-1, width).index_select(0, rows).view(steps, lanes, width)
        else:
            y_TBH = self._module(self.x_TBI)[0]
        return _with_gradients(y_TBH, [self.x_TBI, *self._module.parameters()], self.grad_TBH)

    @cached_property
    def _segments(self) -> tuple[tuple[int, int], Tensor]:
        """The longest sequence between resets and the number of sequences; and the row of each step of x among all of their steps."""
        steps, lanes = self.x_TBI.shape[:2]
        assert self.resets_TB is not None
        begins = self.resets_TB.cpu().tolist()
        segments: list[list[int]] = []
        for lane in range(lanes):
            for step in range(steps):
                if step == 0 or begins[step][lane]:
                    segments.append([])
                segments[-1].append(step * lanes + lane)
        longest, rows = max(map(len, segments)), torch.zeros(steps * lanes, dtype=torch.int64)
        for number, own in enumerate(segments):
            rows[own] = torch.arange(len(own)) * len(segments) + number
        return (longest, len(segments)), rows.to(self.x_TBI.device)

    def _run(self, x_TBI: Tensor, carries: AnyCarries, layers: Sequence[Layer], backend: str) -> tuple[Tensor, AnyCarries]:
        sites = range(self.case.layers - 1)
        options: dict[str, Any] = {"dropout": self.case.dropout, "key": self.key, "sites": sites, "marks": self.marks}
        return run_layers(x_TBI, carries, layers, self.lengths_B, backends=self.backends, backend=backend, **options)

    @staticmethod
    def _weights(layers: Sequence[Layer]) -> list[Tensor]:
        return [tensor for layer in layers for each in layer for tensor in each.tensors()]

    @cached_property
    def _module(self) -> nn.RNNBase:
        case = self.case
        of_cell = getattr(nn, by_name(case.cell).torch_module or "")
        module: nn.RNNBase = of_cell(
            case.hidden, case.hidden, case.layers, dropout=case.dropout, device=self.x_TBI.device, dtype=self.dtype
        )
        with torch.no_grad():
            for parameter, tensor in zip(module.parameters(), self._weights(self.layers), strict=True):
                parameter.copy_(tensor)
            if self.x_TBI.is_cuda and self.dtype == torch.bfloat16:
                # torch's module flattens its weights itself, except in bf16, where cuDNN would copy them into one buffer on every call.
                _gather_weights(module)
        return module

    @cached_property
    def _lengths_on_host(self) -> Tensor:
        return torch.tensor(self.case.lane_steps)


def _gather_weights(module: nn.RNNBase) -> None:
    weights: list[Tensor] = list(module.parameters())
    mode: int = get_cudnn_mode(module.mode)  # type: ignore[no-untyped-call]
    torch._cudnn_rnn_flatten_weight(weights, 4, module.input_size, mode, module.hidden_size, 0, module.num_layers, False, False)


def _with_gradients(y_TBH: Tensor, inputs: Sequence[Tensor], grad_TBH: Tensor) -> list[Tensor]:
    return [y_TBH.detach(), *torch.autograd.grad([y_TBH], inputs, [grad_TBH])]


def relative_error(tensors: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest |tensor - exact| / |exact| over all tensors, in the Euclidean norm; NaN if any of them is NaN."""
    errors = [(ours.double() - true).norm() / true.norm().clamp(min=1e-300) for ours, true in zip(tensors, exact, strict=True)]
    return float(torch.stack(errors).max())
