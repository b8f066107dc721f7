"""ONNX models of one step compute in onnxruntime what ours compute, without any operator that loops."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from _steps import LAYERS, SOME, over_many, stateful

pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from carrywave.exporting import onnx_file
from carrywave.exporting.comparison import largest_step_difference
from carrywave.exporting.single_step import onnx_step
from carrywave.exporting.single_step.network import network

FUNCTIONS = {"Abs", "Add", "Div", "Exp", "Log", "MatMul", "Max", "Min", "Mul", "Neg", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Tanh"}
PLAIN = FUNCTIONS | {"Concat", "Gather", "Identity", "ReduceMax", "ReduceMean", "Reshape", "Slice", "Transpose"}


@pytest.mark.parametrize("name", SOME)
def test_onnxruntime_computes_the_steps_of_the_model(name: str) -> None:
    portable = stateful(name)
    formula = network(portable)
    model = onnx_step.graph(formula)
    assert {node.op_type for node in model.graph.node} <= PLAIN
    run = onnx_file.runner(model.SerializeToString(), formula)
    # Far closer than an export has to be: these models are small, and float32 has 24 bits.
    assert largest_step_difference(portable, formula, run, what="it") < 4e-6


@pytest.mark.parametrize("name", ["classification, attention", "forecasting, linear", *LAYERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_thousand_steps_are_one_sequence(name: str, dtype: torch.dtype) -> None:
    if dtype == torch.float64 and "heads" in name:
        pytest.skip("onnxruntime has no Softplus in float64")
    portable = stateful(name, dtype)
    formula = network(portable)
    run = onnx_file.runner(onnx_step.graph(formula).SerializeToString(), formula)
    # Gates forget rounding errors about as fast as they arise: in float32, a thousand steps end a few dozen roundings away.
    assert over_many(portable, formula, run) < (1e-5 if dtype == torch.float32 else 1e-10)


def test_a_shared_matrix_is_stored_once() -> None:
    shapes = [tuple(each.dims) for each in onnx_step.graph(network(stateful("language, tied"))).graph.initializer]
    assert shapes.count((23, 8)) == 1
    assert (8, 23) not in shapes


def test_the_number_of_lanes_is_free() -> None:
    portable = stateful("language")
    formula = network(portable)
    ports = [*onnx_step.graph(formula).graph.input, *onnx_step.graph(formula).graph.output]
    assert {port.type.tensor_type.shape.dim[0].dim_param for port in ports} == {"batch"}
