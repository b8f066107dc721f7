"""A `Formula` as an ONNX graph: products, sums and functions of elements, and no operator that loops.

Gather, MatMul, Add, Sub, Mul, Div, Neg, Abs, Exp, Log, Sqrt, Max, Min, Relu, Sigmoid, Tanh, Softplus, ReduceMean, ReduceMax, Slice, Concat,
Reshape and Transpose are all that it takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from carrywave.exporting.onnx_graph import check_size
from carrywave.exporting.onnx_nodes import Nodes
from carrywave.exporting.single_step.formula import Formula, Operation, Value

OPERATORS = {"maximum": "Max", "minimum": "Min"}  # where the name is not that of the operation


def graph(formula: Formula, about: str = "") -> Any:
    """The step as an ONNX ModelProto; the number of lanes is free."""
    check_size(formula.weights.values())
    return _Graph(formula).build(about)


class _Graph:
    def __init__(self, formula: Formula) -> None:
        self.formula, self.nodes = formula, Nodes()
        self.dtype = np.dtype(str(formula.dtype).removeprefix("torch."))
        self.rows = {port.name: port.name for port in formula.inputs}
        # A matrix that embedding and head share is turned when the graph is loaded; any other is stored as the product reads it.
        self.tables = {each.name for of in formula.needed if of.kind == "row" and isinstance(each := of.inputs[0], Value)}

    def build(self, about: str) -> Any:
        nodes, formula = self.nodes, self.formula
        assert formula.result is not None
        for port in formula.step_inputs:
            if len(port.shape) > 2:
                self.rows[port.name] = nodes.reshape(port.name, 0, -1)
        for operation in formula.needed:
            self.rows[operation.out.name] = self.added(operation)
        port, value = formula.result
        sizes = [int(size) for size in port.shape[1:]]
        nodes.add("Reshape", self.rows[value.name], nodes.constant([0, *sizes]), name=port.name)
        for name, out in zip(formula.states, formula.outputs[1:], strict=True):
            nodes.add("Identity", self.rows[formula.after[name].name], name=out.name)
        return nodes.model("carrywave_step", formula.inputs, formula.outputs, about)

    def added(self, operation: Operation) -> str:
        """The node of an operation, or the nodes."""
        nodes, kind, width, sizes = self.nodes, operation.kind, operation.out.width, operation.sizes
        match kind:
            case "linear":
                return self.product(operation, **sizes)
            case "row":
                table, codes = (self.operand(each) for each in operation.inputs)
                code = nodes.add("Gather", codes, nodes.constant(sizes["place"]), axis=1) if self.several(operation.inputs[1]) else codes
                return nodes.add("Gather", table, code)
            case "part":
                return nodes.slice(self.operand(operation.inputs[0]), 1, sizes["low"], sizes["low"] + width)
            case "joined":
                return nodes.add("Concat", *map(self.operand, operation.inputs), axis=1)
            case "turned":
                matrix = nodes.reshape(self.operand(operation.inputs[0]), 0, sizes["rows"], width // sizes["rows"])
                return nodes.reshape(nodes.add("Transpose", matrix, perm=[0, 2, 1]), 0, width)
            case "mean":
                [whole] = map(self.operand, operation.inputs)
                if width == 1:
                    return nodes.add("ReduceMean", whole, axes=[1], keepdims=1)
                return nodes.add("ReduceMean", nodes.reshape(whole, 0, width, -1), axes=[2], keepdims=0)
            case "log1p":
                return nodes.add("Log", nodes.add("Add", self.operand(operation.inputs[0]), self.operand(1.0)))
            case "expm1":
                return nodes.add("Sub", nodes.add("Exp", self.operand(operation.inputs[0])), self.operand(1.0))
            case "highest":
                return nodes.add("ReduceMax", self.operand(operation.inputs[0]), axes=[1], keepdims=1)
        return nodes.add(OPERATORS.get(kind, kind.capitalize()), *map(self.operand, operation.inputs))

    def several(self, codes: Value | float) -> bool:
        """True if an input has several codes for each lane, and not one token."""
        return any(port.name == codes.name and len(port.shape) > 1 for port in self.formula.step_inputs if isinstance(codes, Value))

    def operand(self, each: Value | float) -> str:
        """The name of what an operation reads."""
        if not isinstance(each, Value):
            return self.nodes.constant(each, self.dtype)
        if each.name in self.formula.weights:
            return self.nodes.weight(each.name, self.formula.weights[each.name])
        return self.rows[each.name]

    def product(self, operation: Operation, *, columns: int, blocks: int, period: int) -> str:
        nodes, width, (x, matrix) = self.nodes, operation.out.width, operation.inputs
        assert isinstance(matrix, Value)
        weight = self.formula.weights[matrix.name]
        if blocks == 1:
            return nodes.linear(self.operand(x), matrix.name, weight, None, shared=matrix.name in self.tables)
        of_blocks = weight.view(-1, blocks, period // blocks, columns).permute(1, 3, 0, 2).flatten(2)
        apart = nodes.reshape(self.operand(x), 0, blocks, 1, columns)
        blocks_out = nodes.add("MatMul", apart, nodes.weight(f"{matrix.name}.blocks", of_blocks))
        blocks_out = nodes.reshape(blocks_out, 0, blocks, width // period, period // blocks)
        return nodes.reshape(nodes.add("Transpose", blocks_out, perm=[0, 2, 1, 3]), 0, width)
