"""One step of any cell as ONNX nodes: the cell's own definition is run on rows that add a node for each operation.

Shapes: B lane, H hidden, K heads, G = gates · H.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from carrywave.errors import UserError
from carrywave.exporting.onnx_nodes import Nodes
from carrywave.kernels.weights import LayerWeights
from carrywave.model.recurrent import Recurrent

NORM_EPSILON = 1e-5  # torch's, of norms inside a cell
OPERATORS = {name: name.capitalize() for name in ("abs", "exp", "log", "neg", "relu", "sigmoid", "softplus", "sqrt", "tanh")}
OPERATORS |= {"maximum": "Max", "minimum": "Min", "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}


class SymbolicRow:
    """A row of numbers for each lane, with the methods of a tensor that a cell's step calls."""

    def __init__(self, nodes: Nodes, name: str, dtype: str) -> None:
        self.nodes, self.name, self.dtype = nodes, name, dtype

    def add_node(self, kind: str, *inputs: SymbolicRow | float, **attributes: Any) -> SymbolicRow:
        """The result of an operator; numbers are constants."""
        names = [each.name if isinstance(each, SymbolicRow) else self.nodes.constant(each, self.dtype) for each in inputs]
        return SymbolicRow(self.nodes, self.nodes.add(kind, *names, **attributes), self.dtype)

    def __getattr__(self, name: str) -> Callable[..., SymbolicRow]:
        if name not in OPERATORS:
            raise AttributeError(name)
        return lambda *others: self.add_node(OPERATORS[name], self, *others)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, operands: Sequence[Any], named: Any = None) -> Any:
        """What a cell computes by `torch.tanh(x)` is computed by `x.tanh()`."""
        return getattr(operands[0], function.__name__)(*operands[1:], **(named or {}))

    def __add__(self, other: SymbolicRow | float) -> SymbolicRow:
        return self.add_node("Add", self, other)

    def __sub__(self, other: SymbolicRow | float) -> SymbolicRow:
        return self.add_node("Sub", self, other)

    def __rsub__(self, other: float) -> SymbolicRow:
        return self.add_node("Sub", other, self)

    def __mul__(self, other: SymbolicRow | float) -> SymbolicRow:
        return self.add_node("Mul", self, other)

    def __truediv__(self, other: SymbolicRow | float) -> SymbolicRow:
        return self.add_node("Div", self, other)

    def __rtruediv__(self, other: float) -> SymbolicRow:
        return self.add_node("Div", other, self)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> SymbolicRow:
        return self.add_node("Neg", self)

    def square(self) -> SymbolicRow:
        return self * self

    def clamp_min(self, least: float) -> SymbolicRow:
        return self.add_node("Max", self, least)

    def logaddexp(self, other: SymbolicRow | float) -> SymbolicRow:
        return (self - other).softplus() + other

    def new_zeros(self, shape: Any) -> float:
        return 0.0

    def chunk(self, chunks: int, dim: int = -1) -> tuple[SymbolicRow, ...]:
        names = self.nodes.add_many("Split", [self.name], [self.nodes.name("part") for _ in range(chunks)], axis=-1)
        return tuple(SymbolicRow(self.nodes, name, self.dtype) for name in names)


class SymbolicWeights:
    """What a step reads of the weights of one direction of a layer (`cells.cell.StepWeights`), in a graph or in the body of a Scan."""

    def __init__(self, nodes: Nodes, name: str, weights: LayerWeights, width: int) -> None:
        self.nodes, self.name, self.weights, self.heads = nodes, name, weights, width // weights.w_hh.shape[1]
        self.width, self.dtype = width, str(weights.w_ih.dtype).removeprefix("torch.")
        self.extra: dict[str, Tensor] = weights.extra or {}

    def row(self, name: str) -> SymbolicRow:
        """A tensor of the graph as a row."""
        return SymbolicRow(self.nodes, name, self.dtype)

    def inputs(self, x: SymbolicRow) -> SymbolicRow:
        """The product with the matrix of inputs."""
        return self._biased(x.nodes.linear(x.name, f"{self.name}.w_ih", self.weights.w_ih, None), "ih", self.weights.b_ih)

    def recurrent(self, h: SymbolicRow) -> SymbolicRow:
        """The product with the recurrent matrix, by heads if there are several."""
        nodes, units = self.nodes, self.width // self.heads
        if self.heads == 1:
            product = nodes.linear(h.name, f"{self.name}.w_hh", self.weights.w_hh, None)
        else:
            blocks = nodes.weight(f"{self.name}.w_hh.blocks", self.weights.by_heads(self.width).w_hh)
            apart_BK1G = nodes.add("MatMul", nodes.reshape(h.name, 0, self.heads, 1, units), blocks)
            apart_BKGU = nodes.reshape(apart_BK1G, 0, self.heads, -1, units)
            product = nodes.reshape(nodes.add("Transpose", apart_BKGU, perm=[0, 2, 1, 3]), 0, -1)
        return self._biased(product, "hh", self.weights.b_hh)

    def candidate(self, new: SymbolicRow) -> SymbolicRow:
        """There is no recurrent dropout in evaluation."""
        return new

    def normed(self, c: SymbolicRow) -> SymbolicRow:
        """A memory, normalised if the cell has norms."""
        return c if "norm_c" not in self.extra else self._norm(c.name, "norm_c", self.extra["norm_c_bias"])

    def projected(self, h: SymbolicRow) -> SymbolicRow:
        """An output, projected if there is a projection."""
        w_hr = self.weights.w_hr
        return h if w_hr is None else self.row(self.nodes.linear(h.name, f"{self.name}.w_hr", w_hr, None))

    def named(self, name: str) -> SymbolicRow:
        """One of the cell's other parameters."""
        return self.row(self.nodes.weight(f"{self.name}.{name}", self.extra[name]))

    def _biased(self, product: str, of: str, bias: Tensor | None) -> SymbolicRow:
        if f"norm_{of}" in self.extra:
            return self._norm(product, f"norm_{of}", bias)
        return self.row(product if bias is None else self.nodes.add("Add", product, self.nodes.weight(f"{self.name}.b_{of}", bias)))

    def _norm(self, x: str, gain: str, bias: Tensor | None) -> SymbolicRow:
        given = [self.nodes.weight(f"{self.name}.{gain}", self.extra[gain])]
        given += [] if bias is None else [self.nodes.weight(f"{self.name}.{gain}.bias", bias)]
        return self.row(self.nodes.add("LayerNormalization", x, *given, axis=-1, epsilon=NORM_EPSILON))


def after_step(layers: Recurrent, gates: SymbolicRow, carry: Sequence[SymbolicRow], weights: SymbolicWeights) -> list[str]:
    """The parts of the carry after one step of a layer; the first is its output."""
    cell: Any = layers.cell
    try:
        after = cell.step(gates, cell.carry(*carry), weights)
    except (TypeError, AttributeError) as error:
        raise UserError(f"the step of the cell {cell.name} has no ONNX form ({error}); use --to torch or --to safetensors") from error
    zoned = zip(layers.zoneout, carry, after, strict=True)
    return [(share * old + (1.0 - share) * new if share else new).name for share, old, new in zoned]
