"""A `Program` as an ONNX graph: products, sums and functions of elements, and no operator that loops.

Gather, MatMul, Add, Sub, Mul, Div, Neg, Abs, Exp, Log, Sqrt, Max, Min, Relu, Sigmoid, Tanh, Softplus, ReduceMean, ReduceMax, Slice, Concat,
Reshape and Transpose are all that it takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from carrywave.exporting.onnx_graph import check_size
from carrywave.exporting.onnx_nodes import Nodes
from carrywave.exporting.single_step.program import Operation, Program, Value

OPERATORS = {"maximum": "Max", "minimum": "Min"}  # where the name is not that of the operation


def graph(program: Program, about: str = "") -> Any:
    """The step as an ONNX ModelProto; the number of lanes is free."""
    check_size(program.weights.values())
    return _Graph(program).build(about)


class _Graph:
    def __init__(self, program: Program) -> None:
        self.program, self.nodes = program, Nodes()
        self.dtype = np.dtype(str(program.dtype).removeprefix("torch."))
        self.rows = {port.name: port.name for port in program.inputs}
        # A matrix that embedding and head share is turned when the graph is loaded; any other is stored as the product reads it.
        self.tables = {each.name for of in program.needed if of.kind == "row" and isinstance(each := of.inputs[0], Value)}

    def build(self, about: str) -> Any:
        nodes, program = self.nodes, self.program
        assert program.result is not None
        for port in program.given:
            if len(port.shape) > 2:
                self.rows[port.name] = nodes.reshape(port.name, 0, -1)
        for operation in program.needed:
            self.rows[operation.out.name] = self.added(operation)
        port, value = program.result
        sizes = [int(size) for size in port.shape[1:]]
        nodes.add("Reshape", self.rows[value.name], nodes.constant([0, *sizes]), name=port.name)
        for name, out in zip(program.states, program.outputs[1:], strict=True):
            nodes.add("Identity", self.rows[program.after[name].name], name=out.name)
        return nodes.model("carrywave_step", program.inputs, program.outputs, about)

    def added(self, operation: Operation) -> str:
        """The node of an operation, or the nodes."""
        nodes, kind, width, sizes = self.nodes, operation.kind, operation.out.width, operation.sizes
        match kind:
            case "linear":
                return self.product(operation, **sizes)
            case "row":
                table, codes = (self.given(each) for each in operation.inputs)
                code = nodes.add("Gather", codes, nodes.constant(sizes["place"]), axis=1) if self.several(operation.inputs[1]) else codes
                return nodes.add("Gather", table, code)
            case "part":
                return nodes.slice(self.given(operation.inputs[0]), 1, sizes["low"], sizes["low"] + width)
            case "joined":
                return nodes.add("Concat", *map(self.given, operation.inputs), axis=1)
            case "turned":
                matrix = nodes.reshape(self.given(operation.inputs[0]), 0, sizes["rows"], width // sizes["rows"])
                return nodes.reshape(nodes.add("Transpose", matrix, perm=[0, 2, 1]), 0, width)
            case "mean":
                [whole] = map(self.given, operation.inputs)
                if width == 1:
                    return nodes.add("ReduceMean", whole, axes=[1], keepdims=1)
                return nodes.add("ReduceMean", nodes.reshape(whole, 0, width, -1), axes=[2], keepdims=0)
            case "highest":
                return nodes.add("ReduceMax", self.given(operation.inputs[0]), axes=[1], keepdims=1)
        return nodes.add(OPERATORS.get(kind, kind.capitalize()), *map(self.given, operation.inputs))

    def several(self, codes: Value | float) -> bool:
        """True if an input has several codes for each lane, and not one token."""
        return any(port.name == codes.name and len(port.shape) > 1 for port in self.program.given if isinstance(codes, Value))

    def given(self, each: Value | float) -> str:
        """The name of what an operation reads."""
        if not isinstance(each, Value):
            return self.nodes.constant(each, self.dtype)
        if each.name in self.program.weights:
            return self.nodes.weight(each.name, self.program.weights[each.name])
        return self.rows[each.name]

    def product(self, operation: Operation, *, columns: int, blocks: int, period: int) -> str:
        nodes, width, (x, matrix) = self.nodes, operation.out.width, operation.inputs
        assert isinstance(matrix, Value)
        weight = self.program.weights[matrix.name]
        if blocks == 1:
            return nodes.linear(self.given(x), matrix.name, weight, None, shared=matrix.name in self.tables)
        of_blocks = weight.view(-1, blocks, period // blocks, columns).permute(1, 3, 0, 2).flatten(2)
        apart = nodes.reshape(self.given(x), 0, blocks, 1, columns)
        found = nodes.add("MatMul", apart, nodes.weight(f"{matrix.name}.blocks", of_blocks))
        found = nodes.reshape(found, 0, blocks, width // period, period // blocks)
        return nodes.reshape(nodes.add("Transpose", found, perm=[0, 2, 1, 3]), 0, width)
