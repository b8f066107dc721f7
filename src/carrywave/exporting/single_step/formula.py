"""`Formula`: one step of a model as a list of plain operations on rows of numbers, from which ONNX, torch and C are written.

It is recorded, not traced: a `Value` has the methods of a tensor that a cell's step calls, and each call adds an operation. Every value is
one row of numbers for each lane, so no operation has to know more than widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from carrywave.errors import UserError
from carrywave.exporting.portable import NEXT, Port

Number = float | int

# What is computed element by element; a row of width 1 goes with any other.
UNARY = ("neg", "abs", "exp", "expm1", "log", "log1p", "relu", "sigmoid", "softplus", "sqrt", "tanh")
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum")


class Value:
    """A row of numbers for each lane: an input, a state, a weight that all lanes share, or what an operation returns."""

    def __init__(self, formula: Formula, name: str, width: int) -> None:
        self.formula, self.name, self.width = formula, name, width

    def __add__(self, other: Value | Number) -> Value:
        return self.formula.both("add", self, other)

    def __sub__(self, other: Value | Number) -> Value:
        return self.formula.both("sub", self, other)

    def __rsub__(self, other: Number) -> Value:
        return self.formula.both("sub", other, self)

    def __mul__(self, other: Value | Number) -> Value:
        return self.formula.both("mul", self, other)

    def __truediv__(self, other: Value | Number) -> Value:
        return self.formula.both("div", self, other)

    def __rtruediv__(self, other: Number) -> Value:
        return self.formula.both("div", other, self)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Value:
        return self.neg()

    def __getattr__(self, name: str) -> Callable[..., Value]:
        """The operations on elements, by their names in torch."""
        if name in UNARY:
            return lambda: self.formula.add(name, (self,), self.width)
        if name in BINARY:
            return lambda other: self.formula.both(name, self, other)
        if name.startswith("__"):
            raise AttributeError(name)
        raise UserError(f"a step has no plain form of {name}; export without --step")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, operands: Sequence[Any], named: Any = None) -> Any:
        """What a cell computes by `torch.tanh(x)` is computed by `x.tanh()`."""
        first, *rest = operands
        if not isinstance(first, Value):
            raise UserError(f"a step has no plain form of {function.__name__} here; export without --step")
        return getattr(first, function.__name__)(*rest, **(named or {}))

    def clamp_min(self, least: Number) -> Value:
        return self.maximum(least)

    def clamp(self, min: Number | None = None, max: Number | None = None) -> Value:
        low = self if min is None else self.maximum(min)
        return low if max is None else low.minimum(max)

    def square(self) -> Value:
        return self * self

    def new_zeros(self, shape: Any) -> float:
        return 0.0

    def logaddexp(self, other: Value | Number) -> Value:
        return (self - other).softplus() + other

    def chunk(self, chunks: int, dim: int = -1) -> tuple[Value, ...]:
        part = self.width // chunks
        return tuple(self.part(place * part, (place + 1) * part) for place in range(chunks))

    def part(self, low: int, high: int) -> Value:
        """Elements from `low` until `high`."""
        return self if (low, high) == (0, self.width) else self.formula.add("part", (self,), high - low, low=low)

    def turned(self, rows: int) -> Value:
        """The row, read as a matrix of this many rows, row by row, is written column by column."""
        if rows in (1, self.width):
            return self
        return self.formula.add("turned", (self,), self.width, rows=rows)

    def repeated(self, times: int) -> Value:
        """The row, repeated this many times."""
        return self.formula.joined([self] * times)

    def mean(self, groups: int = 1) -> Value:
        """The mean of each of this many equal parts."""
        return self.formula.add("mean", (self,), groups)

    def highest(self) -> Value:
        return self.formula.add("highest", (self,), 1)

    def linear(self, name: str, weight: Tensor, bias: Tensor | None = None, *, blocks: int = 1, period: int = 0) -> Value:
        """The product with a matrix [rows, columns]. Of several `blocks`, each reads its own part of the value; in every period of rows,
        the blocks take their turns.
        """
        rows = len(weight)
        matrix = self.formula.weight(name, weight)
        product = self.formula.add("linear", (self, matrix), rows, columns=weight.shape[1], blocks=blocks, period=period or rows)
        return product if bias is None else product + self.formula.weight(f"{name}.bias", bias)

    def normed(self, name: str, gain: Tensor, bias: Tensor | None, epsilon: float) -> Value:
        """Layer norm."""
        centred = self - self.mean()
        scaled = centred / (centred.square().mean() + epsilon).sqrt() * self.formula.weight(f"{name}.gain", gain)
        return scaled if bias is None else scaled + self.formula.weight(f"{name}.bias", bias)

    def log_softmax(self) -> Value:
        below = self - self.highest()
        return below - (below.exp().mean() * self.width).log()

    def softmax(self) -> Value:
        raised = (self - self.highest()).exp()
        return raised / (raised.mean() * self.width)


class Operation(NamedTuple):
    """One operation: what it reads (a number is the same for all elements), what it makes, and its sizes."""

    kind: str
    inputs: tuple[Value | float, ...]
    out: Value
    sizes: dict[str, int]


class State(NamedTuple):
    """What goes from step to step: its value before a step, and that of the first one [width]."""

    value: Value
    initial: Tensor

    @property
    def uniform(self) -> float | None:
        """The number that all of the first value are; None: they differ."""
        return float(self.initial[0]) if bool((self.initial == self.initial[0]).all()) else None


@dataclass
class Formula:
    """One step: rows of numbers go in and come out, and so does each state."""

    dtype: torch.dtype
    step_inputs: list[Port] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    after: dict[str, Value] = field(default_factory=dict)  # each state after the step
    result: tuple[Port, Value] | None = None
    values: dict[str, Value] = field(default_factory=dict)  # of inputs and weights
    _names: dict[int, str] = field(default_factory=dict)  # of weights, by where their numbers are

    @property
    def state(self) -> tuple[Port, ...]:
        """The states as they go in."""
        return tuple(Port(name, self.dtype, ("batch", each.value.width)) for name, each in self.states.items())

    @property
    def inputs(self) -> tuple[Port, ...]:
        """What goes in: the inputs of the step, then the states."""
        return (*self.step_inputs, *self.state)

    @property
    def outputs(self) -> tuple[Port, ...]:
        """What comes out: the result, then the states after the step."""
        assert self.result is not None
        return (self.result[0], *(Port(port.name + NEXT, port.dtype, port.shape) for port in self.state))

    @property
    def numbers(self) -> int:
        """How many numbers all weights have together."""
        return sum(weight.numel() for weight in self.weights.values())

    def input(self, port: Port) -> Value:
        """An input; of a token, its number."""
        width = 1
        for size in port.shape[1:]:
            width *= int(size)
        self.step_inputs.append(port)
        self.values[port.name] = Value(self, port.name, width)
        return self.values[port.name]

    def begin(self, name: str, initial: Tensor) -> Value:
        """A state, which is `initial` [width] before the first step."""
        self.states[name] = State(Value(self, name, len(initial)), initial.detach().to(self.dtype))
        return self.states[name].value

    def end(self, name: str, value: Value) -> None:
        """What a state is after the step."""
        self.after[name] = value

    def weight(self, name: str, tensor: Tensor) -> Value:
        """A weight; one that was given before, under whatever name, is stored once."""
        stored = self._names.setdefault(tensor.data_ptr(), name)
        if stored in self.weights and self.weights[stored].shape == tensor.shape:
            return self.values[stored]
        self.weights[name] = tensor.detach()
        self.values[name] = Value(self, name, tensor.shape[-1])
        return self.values[name]

    def add(self, kind: str, inputs: tuple[Value | float, ...], width: int, **sizes: int) -> Value:
        """Record an operation."""
        out = Value(self, f"{kind}_{len(self.operations)}", width)
        self.operations.append(Operation(kind, inputs, out, sizes))
        return out

    def both(self, kind: str, left: Value | Number, right: Value | Number) -> Value:
        """Record an operation on the elements of two rows; a number stands for a row of it."""
        operands = tuple(each if isinstance(each, Value) else float(each) for each in (left, right))
        widths = {each.width for each in operands if isinstance(each, Value)} - {1}
        if len(widths) > 1:
            raise UserError(f"a step combines rows of {' and '.join(map(str, sorted(widths)))} units; export without --step")
        return self.add(kind, operands, max(widths, default=1))

    def row(self, name: str, table: Tensor, code: Value, place: int = 0) -> Value:
        """The row of a table whose number is an element of an input."""
        return self.add("row", (self.weight(name, table), code), table.shape[1], place=place)

    def joined(self, values: Sequence[Value]) -> Value:
        """Rows one after the other."""
        return values[0] if len(values) == 1 else self.add("joined", tuple(values), sum(each.width for each in values))

    @property
    def needed(self) -> list[Operation]:
        """The operations that the result or a state depends on, in order."""
        assert self.result is not None
        wanted = {self.result[1].name, *(value.name for value in self.after.values())}
        backwards = []
        for operation in reversed(self.operations):
            if operation.out.name in wanted:
                backwards.append(operation)
                wanted |= {each.name for each in operation.inputs if isinstance(each, Value)}
        return backwards[::-1]

    def codes(self) -> dict[tuple[str, int], int]:
        """For each input that is the number of a row, and each place in it: how many rows there are."""
        num_rows = {}
        for operation in self.needed:
            table, *code = (each.name for each in operation.inputs if isinstance(each, Value))
            if operation.kind == "row":
                num_rows[code[0], operation.sizes["place"]] = len(self.weights[table])
        return num_rows

    def initial(self, lanes: int) -> list[Tensor]:
        """Each state before the first step."""
        return [each.initial.expand(lanes, -1) for each in self.states.values()]
