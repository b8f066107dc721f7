"""ONNX models compute in onnxruntime what ours compute, at any size; a graph that does not is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from _export_models import FORMS, STEPWISE, made

pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from carrywave.errors import UserError
from carrywave.exporting import onnx_file, onnx_graph, onnx_layers
from carrywave.exporting.comparison import largest_difference, largest_step_difference
from carrywave.exporting.portable import Portable


def in_runtime(portable: Portable, model: Any) -> Any:
    return onnx_file.runner(model.SerializeToString(), portable)


@pytest.mark.parametrize(("name", "stateful"), FORMS)
def test_onnxruntime_computes_what_the_model_computes(name: str, stateful: bool) -> None:
    portable = Portable(made(name), stateful=stateful)
    # Far closer than an export has to be: these models are small, and float32 has 24 bits.
    assert largest_difference(portable, in_runtime(portable, onnx_graph.graph(portable)), what="it") < 2e-6


@pytest.mark.parametrize("name", STEPWISE)
def test_steps_compute_what_the_whole_computes(name: str) -> None:
    portable = Portable(made(name), step=True)
    graph = onnx_graph.graph(portable)
    assert not {node.op_type for node in graph.graph.node} & {"LSTM", "GRU", "RNN", "Scan", "Loop"}
    assert largest_step_difference(portable, in_runtime(portable, graph), what="it") < 2e-6
    if name == "classification, attention":  # and over many steps
        assert largest_step_difference(portable, in_runtime(portable, graph), what="it", sizes=[(1, 1000)]) < 1e-5


@pytest.mark.parametrize("name", ["language", "classification, both ways", "tagging, both ways, projection"])
def test_wrong_gates_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    portable = Portable(made(name))
    monkeypatch.setattr(onnx_layers, "_in_order", lambda weight, form: weight)
    if "projection" in name:  # a Scan has torch's order
        scan = onnx_layers._scan
        monkeypatch.setattr(onnx_layers, "_scan", lambda n, ls, s, x, c, w, lanes: scan(n, ls, s, x, c, w._replace(b_ih=w.b_ih * 0), lanes))
    with pytest.raises(UserError, match=r"the model differs from the model by .* in logits, more than 0.0001 .*; nothing was written"):
        largest_difference(portable, in_runtime(portable, onnx_graph.graph(portable)), what="the model")


def test_lengths_are_not_a_formality() -> None:
    portable = Portable(made("tagging, both ways"))
    run = in_runtime(portable, onnx_graph.graph(portable))
    x, lengths = portable.sample(4, 9, seed=1)
    [whole] = run([x, torch.full_like(lengths, 9)])
    [short] = run([x, lengths])
    assert not torch.allclose(whole[1, : lengths[1]], short[1, : lengths[1]])


def test_a_tied_matrix_is_stored_once() -> None:
    portable = Portable(made("language, tied"))
    shapes = [tuple(each.dims) for each in onnx_graph.graph(portable).graph.initializer]
    assert shapes.count((23, 8)) == 1
    assert (8, 23) not in shapes


def test_what_does_not_fit_in_one_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_graph, "MOST_BYTES", 1000)
    with pytest.raises(UserError, match="more than the 2 GB that an ONNX file holds; use --to torch or --to safetensors"):
        onnx_graph.graph(Portable(made("language")))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match=r"ONNX needs the package onnx, which is not installed; pip install 'carrywave\[onnx\]'"):
        onnx_graph.graph(Portable(made("language")))


def test_the_weights_come_back_bit_for_bit() -> None:
    from onnx import numpy_helper

    model = made("tagging, both ways")
    stored = {each.name: torch.tensor(numpy_helper.to_array(each)) for each in onnx_graph.graph(Portable(model)).graph.initializer}
    found = {"encoder.weight": stored["embedding.weight"], "head.weight": stored["head.weight.T"].T, "head.bias": stored["head.bias"]}
    for layer in range(2):
        for direction, reverse in enumerate(("", "_reverse")):
            w, r, b = (stored[f"lstm.l{layer}.{part}"][direction] for part in "WRB")
            parts = {"weight_ih": w, "weight_hh": r, "bias_ih": b[:32], "bias_hh": b[32:]}
            for name, part in parts.items():
                i, o, f, g = part.chunk(4)
                found[f"lstm.{name}_l{layer}{reverse}"] = torch.cat([i, f, g, o])
    own = dict(model.named_parameters())
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)
