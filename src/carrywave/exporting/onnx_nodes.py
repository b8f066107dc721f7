"""Builds an ONNX graph node by node: names for tensors, constants stored once, and the few shapes that recur.

The graph is written directly and not traced, so that one LSTM layer is one `LSTM` node, which runtimes have fast kernels for, and so that
time stays a free size.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.errors import UserError
from carrywave.exporting.portable import Port

OPSET, IR_VERSION = 17, 8  # the first with LayerNormalization, and what runtimes of that time read
ENTIRE = np.iinfo(np.int64).max  # the end of a slice that takes all that is left


def needed(name: str) -> ModuleType:
    """A package of the extra `onnx`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"ONNX needs the package {name.partition('.')[0]}, which is not installed; pip install 'carrywave[onnx]'"
        ) from error


class Nodes:
    """The nodes of a graph, or of the body of a Scan within it (`outer`), whose constants the graph keeps."""

    def __init__(self, outer: Nodes | None = None) -> None:
        self.onnx: Any = needed("onnx") if outer is None else outer.onnx
        self.outer = outer
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {} if outer is None else outer.constants
        self._number = 0

    def name(self, stem: str) -> str:
        """A name for a tensor that no other has."""
        if self.outer is not None:
            return self.outer.name(stem)
        self._number += 1
        return f"{stem}_{self._number}"

    def add(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Add a node with one output, and return its name."""
        return self.add_many(kind, inputs, [self.name(kind.lower()) if name is None else name], **attributes)[0]

    def add_many(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> list[str]:
        """Add a node with these outputs; an input or output that is empty is left out."""
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), list(outputs), **attributes))
        return list(outputs)

    def weight(self, name: str, value: Tensor) -> str:
        """A constant with a name of its own, such as a parameter's; stored once, however often it is asked for."""
        if name not in self.constants:
            self.constants[name] = self.onnx.numpy_helper.from_array(np.ascontiguousarray(value.detach().cpu().numpy()), name)
        return name

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """A small constant."""
        array: NDArray[Any] = np.asarray(value, dtype=dtype)
        name = f"constant_{array.dtype}_{'x'.join(map(str, array.shape))}_{'_'.join(map(str, array.reshape(-1).tolist()))}"
        self.constants.setdefault(name, self.onnx.numpy_helper.from_array(array, name))
        return name

    def reshape(self, x: str, *sizes: int) -> str:
        """x in another shape; 0 keeps a size, -1 is what remains."""
        return self.add("Reshape", x, self.constant(list(sizes)))

    def slice(self, x: str, axis: int, low: int, high: int = ENTIRE) -> str:
        """Part of x along an axis."""
        return self.add("Slice", x, self.constant([low]), self.constant([high]), self.constant([axis]))

    def size(self, x: str, axis: int) -> str:
        """One size of x, as a tensor of one element."""
        return self.slice(self.add("Shape", x), 0, axis, axis + 1)

    def real_steps(self, lengths_B: str, x_TB: str) -> str:
        """[T, B, 1] bool: True at real steps."""
        steps = self.add("Squeeze", self.size(x_TB, 0), self.constant([0]))
        step_T = self.add("Range", self.constant(0), steps, self.constant(1))
        real_TB = self.add("Less", self.add("Unsqueeze", step_T, self.constant([1])), lengths_B)
        return self.add("Unsqueeze", real_TB, self.constant([2]))

    def linear(self, x: str, name: str, weight: Tensor, bias: tuple[str, Tensor] | None, *, shared: bool = False) -> str:
        """x · weightᵀ + bias. A shared matrix is turned when the graph is loaded; another is stored as the product reads it."""
        turned = self.add("Transpose", self.weight(name, weight), perm=[1, 0]) if shared else self.weight(f"{name}.T", weight.T)
        out = self.add("MatMul", x, turned)
        return out if bias is None else self.add("Add", out, self.weight(*bias))

    def model(self, name: str, inputs: Sequence[Port], outputs: Sequence[Port], about: str) -> Any:
        """The finished model, checked by ONNX's own checker."""
        helper = self.onnx.helper
        graph = helper.make_graph(
            self.nodes, name, [self.described(p) for p in inputs], [self.described(p) for p in outputs], list(self.constants.values())
        )
        opset = [helper.make_operatorsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION, producer_name="carrywave", doc_string=about)
        self.onnx.checker.check_model(model, full_check=True)
        return model

    def body(self, name: str, inputs: Sequence[Port], outputs: Sequence[Port]) -> Any:
        """The finished body of a Scan."""
        return self.onnx.helper.make_graph(self.nodes, name, [self.described(p) for p in inputs], [self.described(p) for p in outputs])

    def described(self, port: Port) -> Any:
        """A port as ONNX describes it."""
        return self.onnx.helper.make_tensor_value_info(port.name, self.kind(port.dtype), list(port.shape))

    def kind(self, dtype: torch.dtype) -> int:
        """ONNX's number for a dtype."""
        kinds = {torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int64: "INT64", torch.int32: "INT32", torch.bool: "BOOL"}
        return int(getattr(self.onnx.TensorProto, kinds[dtype]))
