"""ONNX's own node tests of LSTM, GRU and RNN: with their weights, our layers give their outputs. float32, as they are kept."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import carrywave as cw

onnx = pytest.importorskip("onnx")
nodes = pytest.importorskip("onnx.backend.test.case.node")
for each in ("lstm", "gru", "rnn"):  # importing them makes their cases; to collect all of ONNX's takes seconds
    importlib.import_module(f"onnx.backend.test.case.node.{each}")

# Their rows of gates, in the order of ours: LSTM iofc, GRU zrh.
GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
OTHERS = {
    "test_lstm_with_peepholes": "cw.LSTM has no peepholes",
    "test_gru_seq_length": "the reset gate before the product (linear_before_reset=0); as in torch, ours comes after it",
}
CASES = {case.name: case for case in nodes._NodeTestCases if [node.op_type for node in case.model.graph.node] in [[op] for op in GATES]}


def ours(rows: np.ndarray[Any, Any], op: str) -> Tensor:
    blocks = np.split(rows, len(GATES[op]))
    return torch.from_numpy(np.concatenate([blocks[gate] for gate in GATES[op]]))


@pytest.mark.parametrize("name", CASES)
def test_a_node_of_onnx(name: str) -> None:
    if name in OTHERS:
        pytest.skip(OTHERS[name])
    case = CASES[name]
    [node] = case.model.graph.node
    said = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    direction, batch_first, hidden = said.get("direction", b"forward"), bool(said.get("layout")), said["hidden_size"]
    [(inputs, wanted)] = case.data_sets
    x, *weights = (np.asarray(each) for each in inputs)
    layer = getattr(cw, node.op_type)(x.shape[2], hidden, bidirectional=direction == b"bidirectional", batch_first=batch_first)
    with torch.no_grad():
        for way, end in enumerate(("", "_reverse")[: len(weights[0])]):
            bias = weights[2][way] if len(weights) > 2 else np.zeros(2 * len(GATES[node.op_type]) * hidden, np.float32)
            parts = zip(
                ("weight_ih", "weight_hh", "bias_ih", "bias_hh"), (weights[0][way], weights[1][way], *np.split(bias, 2)), strict=True
            )
            for part, rows in parts:
                getattr(layer, f"{part}_l0{end}").copy_(ours(rows, node.op_type))
        time = 1 if batch_first else 0
        turned = [time] if direction == b"reverse" else []
        y, carry = layer(torch.from_numpy(x.copy()).flip(turned))
        y = y.flip(turned)
    h = carry[0] if node.op_type == "LSTM" else carry
    outputs = dict(zip([each for each in node.output if each], wanted, strict=True))
    if "Y_h" in outputs:
        torch.testing.assert_close(h, torch.from_numpy(outputs["Y_h"]).view(h.shape), rtol=1e-5, atol=1e-6)
    if "Y" in outputs:  # time, way, lane, unit; with layout 1 lane, time, way, unit
        found = y.unflatten(-1, (-1, hidden))
        found = found if batch_first else found.transpose(1, 2)
        torch.testing.assert_close(found, torch.from_numpy(outputs["Y"]), rtol=1e-5, atol=1e-6)
