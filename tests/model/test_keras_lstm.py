"""Keras 3's LSTM and GRU layers, read from its files: against Keras' definition written out here and, where it is installed, Keras."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import carrywave as cw
from carrywave.errors import DataError, UserError
from carrywave.model.pretrained.layers import load_lstm, read_lstm

h5py = pytest.importorskip("h5py", reason="the extra keras is not installed")
Cell = tuple[Any, Any, Any]  # kernel [I, 4H], recurrent kernel [H, 4H], bias [4H]


def cell(draw: np.random.Generator, inputs: int, hidden: int) -> Cell:
    return tuple(draw.normal(size=shape).astype("float32") for shape in ((inputs, 4 * hidden), (hidden, 4 * hidden), (4 * hidden,)))  # type: ignore[return-value]


def gated(draw: np.random.Generator, inputs: int, hidden: int) -> Cell:
    """A GRU's: kernel [I, 3H], recurrent kernel [H, 3H], biases [2, 3H]."""
    return tuple(draw.normal(size=shape).astype("float32") for shape in ((inputs, 3 * hidden), (hidden, 3 * hidden), (2, 3 * hidden)))  # type: ignore[return-value]


def by_keras(x_BTI: Any, weights: Cell) -> Any:
    """Keras' LSTMCell, step by step in float64: z = x·kernel + h·recurrent_kernel + bias; gates i, f, c, o."""
    kernel, recurrent, bias = (part.astype("float64") for part in weights)
    h = c = np.zeros((x_BTI.shape[0], recurrent.shape[0]))
    sigmoid = lambda z: 1 / (1 + np.exp(-z))  # noqa: E731
    outputs = []
    for step in range(x_BTI.shape[1]):
        i, f, g, o = np.split(x_BTI[:, step] @ kernel + h @ recurrent + bias, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    return np.stack(outputs, axis=1)


def gated_by_keras(x_BTI: Any, weights: Cell) -> Any:
    """Keras' GRUCell with reset_after, step by step in float64; gates z, r, h."""
    kernel, recurrent, (bias, past_bias) = (part.astype("float64") for part in weights)
    h = np.zeros((x_BTI.shape[0], recurrent.shape[0]))
    sigmoid = lambda z: 1 / (1 + np.exp(-z))  # noqa: E731
    outputs = []
    for step in range(x_BTI.shape[1]):
        (x_z, x_r, x_h), (h_z, h_r, h_h) = (
            np.split(product, 3, axis=1) for product in (x_BTI[:, step] @ kernel + bias, h @ recurrent + past_bias)
        )
        z = sigmoid(x_z + h_z)
        h = z * h + (1 - z) * np.tanh(x_h + sigmoid(x_r + h_r) * h_h)
        outputs.append(h)
    return np.stack(outputs, axis=1)


def weights_file(cells: dict[str, tuple[Any, ...]]) -> bytes:
    """Bytes of a .weights.h5 file with these cells, as Keras 3 lays them out."""
    file = io.BytesIO()
    with h5py.File(file, "w") as root:
        root.create_group("layers/input_layer/vars")
        for path, parts in cells.items():
            group = root.create_group(f"layers/{path}/vars")
            for number, part in enumerate(parts):
                group[str(number)] = part
    return file.getvalue()


def keras_file(path: Path, weights: bytes, *layers: dict[str, Any]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", json.dumps({"class_name": "Sequential", "config": {"layers": layers}}))
        archive.writestr("model.weights.h5", weights)
    return path


def test_twelve_layers_compute_what_keras_defines(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    cells = [cell(draw, 4 if number == 0 else 3, 3) for number in range(12)]
    names = ["lstm", *(f"lstm_{number}" for number in range(1, 12))]  # a file lists lstm_10 before lstm_2
    (tmp_path / "model.weights.h5").write_bytes(weights_file({f"{n}/cell": c for n, c in zip(names, cells, strict=True)}))
    ours = cw.LSTM(4, 3, num_layers=12, dtype=torch.float64)
    load_lstm(ours, read_lstm(tmp_path / "model.weights.h5"))
    x = draw.normal(size=(2, 7, 4))
    expected = x
    for each in cells:
        expected = by_keras(expected, each)
    found = ours(torch.tensor(x).transpose(0, 1))[0].transpose(0, 1)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-12, atol=1e-12)  # float64


def test_both_directions_and_no_bias(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    forth, back = cell(draw, 4, 3), cell(draw, 4, 3)
    cells = {"bidirectional/forward_layer/cell": forth[:2], "bidirectional/backward_layer/cell": back[:2]}
    ours = cw.LSTM(4, 3, bidirectional=True, dtype=torch.float64)
    load_lstm(ours, read_lstm(keras_file(tmp_path / "m.keras", weights_file(cells), {"class_name": "Bidirectional", "config": {}})))
    x = draw.normal(size=(2, 7, 4))
    none = np.zeros(12, dtype="float32")
    expected = np.concatenate([by_keras(x, (*forth[:2], none)), by_keras(x[:, ::-1], (*back[:2], none))[:, ::-1]], axis=-1)
    found = ours(torch.tensor(x).transpose(0, 1))[0].transpose(0, 1)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-12, atol=1e-12)


def test_gru_layers_compute_what_keras_defines(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    cells = {"gru/cell": gated(draw, 4, 3), "gru_1/cell": gated(draw, 3, 5)}
    (tmp_path / "m.weights.h5").write_bytes(weights_file(cells))
    ours = cw.GRU(4, [3, 5], dtype=torch.float64)
    load_lstm(ours, read_lstm(tmp_path / "m.weights.h5"))
    x = expected = draw.normal(size=(2, 7, 4))
    for each in cells.values():
        expected = gated_by_keras(expected, each)
    found = ours(torch.tensor(x).transpose(0, 1))[0].transpose(0, 1)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-12, atol=1e-12)  # float64
    with pytest.raises(DataError, match="has layers of 3 gates, but the cell lstm has 4; use weights of that cell"):
        load_lstm(cw.LSTM(4, [3, 5]), read_lstm(tmp_path / "m.weights.h5"))


def test_a_gru_without_biases_in_a_file_that_tells_how_it_computes(tmp_path: Path) -> None:
    kernel, recurrent, _ = gated(np.random.default_rng(6), 4, 3)
    layer = {"class_name": "GRU", "config": {"name": "a", "reset_after": True}}
    state = read_lstm(keras_file(tmp_path / "m.keras", weights_file({"gru/cell": (kernel, recurrent)}), layer))
    np.testing.assert_array_equal(state["weight_hh_l0"][:3].numpy(), recurrent.T[3:6])
    assert not state["bias_ih_l0"].any()
    assert not state["bias_hh_l0"].any()


def weights_under(root: str, cells: dict[str, Cell]) -> bytes:
    """As `weights_file`, of a model class: a layer is under the name of the attribute that holds it."""
    file = io.BytesIO()
    with h5py.File(file, "w") as made:
        for name, parts in cells.items():
            for number, part in enumerate(parts):
                made[f"{root}{name}/cell/vars/{number}"] = part
    return file.getvalue()


def test_names_that_do_not_tell_the_order_of_layers_are_refused(tmp_path: Path) -> None:
    """A file lists `decoder` before `encoder`. Both have the same shapes, so nothing else would tell."""
    draw = np.random.default_rng(3)
    cells = {"encoder": cell(draw, 3, 3), "decoder": cell(draw, 3, 3)}
    (tmp_path / "m.weights.h5").write_bytes(weights_under("", cells))
    said = r"the names decoder and encoder do not tell the order of these layers; save a keras\.Sequential of them, in their order, as NAME"
    with pytest.raises(DataError, match=said):
        read_lstm(tmp_path / "m.weights.h5")
    with pytest.raises(DataError, match=said):
        read_lstm(keras_file(tmp_path / "m.keras", weights_under("", cells)))  # of a class: its configuration lists no layers
    for first, second in (("lstm1", "lstm2"), ("lstm_9", "lstm_10"), ("stack", "stack_1")):
        (tmp_path / "m.weights.h5").write_bytes(weights_under("", {first: cells["encoder"], second: cells["decoder"]}))
        found = read_lstm(tmp_path / "m.weights.h5")
        np.testing.assert_array_equal(found["weight_ih_l0"].numpy(), cells["encoder"][0].T)


def test_a_list_of_layers_tells_their_order(tmp_path: Path) -> None:
    """Of different kinds, which Keras numbers each by itself, and inside each other."""
    draw = np.random.default_rng(4)
    cells = {name: cell(draw, 3, 3) for name in ("rnn", "lstm", "sequential/layers/lstm", "lstm_1")}
    inside = {"class_name": "Sequential", "config": {"layers": [{"class_name": "InputLayer", "config": {}}, {"class_name": "LSTM"}]}}
    layers = [{"class_name": kind, "config": {}} for kind in ("InputLayer", "RNN", "LSTM")]
    file = keras_file(tmp_path / "m.keras", weights_under("layers/", cells), *layers, inside, {"class_name": "LSTM", "config": {}})
    found = read_lstm(file)
    for number, weights in enumerate(cells.values()):
        np.testing.assert_array_equal(found[f"weight_ih_l{number}"].numpy(), weights[0].T)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ({"class_name": "LSTM", "config": {"name": "a", "activation": "relu"}}, "layer a has activation=relu, and carrywave's have tanh"),
        (
            {"class_name": "LSTM", "config": {"name": "a", "recurrent_activation": "hard_sigmoid"}},
            "recurrent_activation=hard_sigmoid",
        ),
        ({"class_name": "LSTM", "config": {"name": "a", "go_backwards": True}}, "layer a goes backwards"),
        ({"class_name": "GRU", "config": {"name": "a", "reset_after": False}}, "layer a has reset_after=False.*; use reset_after=True"),
        ({"class_name": "GRUCell", "config": {"name": "a", "activation": "relu"}}, "layer a has activation=relu"),
        ({"class_name": "Bidirectional", "config": {"name": "a", "merge_mode": "sum"}}, "a has merge_mode=sum"),
    ],
)
def test_layers_that_compute_something_else_are_refused(layer: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = keras_file(tmp_path / "m.keras", weights_file({"lstm/cell": cell(np.random.default_rng(1), 4, 3)}), layer)
    with pytest.raises(DataError, match=said):
        read_lstm(file)


def test_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(1)
    gru, gru_3 = gated(draw, 4, 3), gated(draw, 3, 3)
    one, two = cell(draw, 4, 3), cell(draw, 3, 3)
    contents = {
        "which are no LSTM's or GRU's": weights_file({"other/cell": (one[0], one[1][:, :-1], one[2])}),
        "layers/gru is a GRU with reset_after=False": weights_file({"gru/cell": (gru[0], gru[1], gru[2][0])}),
        "layers/gru is a GRU without biases, which does not tell if it has reset_after": weights_file({"gru/cell": gru[:2]}),
        "mixes LSTM and GRU layers": weights_file({"layer/cell": one, "layer_1/cell": gru_3}),
        "holds no LSTM or GRU layers": weights_file({"dense": (np.zeros((2, 2)),)}),
        "mixes layers of one direction and of both": weights_file(
            {"lstm/cell": one, "bidirectional/forward_layer/cell": two, "bidirectional/backward_layer/cell": two}
        ),
        "is not a weights file of Keras 3": b"nothing",
    }
    for said, content in contents.items():
        (tmp_path / "m.weights.h5").write_bytes(content)
        with pytest.raises(DataError, match=said):
            read_lstm(tmp_path / "m.weights.h5")
    (tmp_path / "m.keras").write_bytes(b"nothing")
    with pytest.raises(DataError, match="is not a model of Keras 3"):
        read_lstm(tmp_path / "m.keras")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError, match=r"need the package h5py, which is not installed; pip install 'carrywave\[keras\]'"):
        read_lstm(tmp_path / "m.weights.h5")


IN_KERAS = """
import sys
import keras, numpy as np
from keras import layers as L

draw = np.random.default_rng(0)
x = draw.normal(size=(3, 9, 4)).astype("float32")
stack = [L.LSTM(3, return_sequences=True, name=f"mine{9 - number}") for number in range(2)]
both = [L.Bidirectional(L.LSTM(width, return_sequences=True, use_bias=width > 5)) for width in (5, 7)]
cells = [L.RNN([L.LSTMCell(5), L.LSTMCell(6)], return_sequences=True)]
gated = [L.GRU(3, return_sequences=True), L.GRU(5, return_sequences=True)]
for name, layers in (("stack", stack), ("both", both), ("cells", cells), ("gated", gated)):
    model = keras.Sequential([keras.Input((None, 4)), *layers])
    for weight in model.weights:
        weight.assign(draw.normal(size=weight.shape).astype("float32") * 0.4)
    model.save(f"{sys.argv[1]}/{name}.keras")
    model.save_weights(f"{sys.argv[1]}/{name}.weights.h5")
    np.save(f"{sys.argv[1]}/{name}.npy", keras.ops.convert_to_numpy(model(x)))
np.save(f"{sys.argv[1]}/x.npy", x)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed")
def test_files_of_keras_itself_compute_what_keras_computes(tmp_path: Path) -> None:
    environment = {"KERAS_BACKEND": "torch", "KERAS_HOME": str(tmp_path), "PATH": ""}
    subprocess.run([sys.executable, "-c", IN_KERAS, str(tmp_path)], env=environment, check=True, capture_output=True)
    x = torch.tensor(np.load(tmp_path / "x.npy")).transpose(0, 1)
    for name, widths, both in (("stack", [3, 3], False), ("both", [5, 7], True), ("cells", [5, 6], False), ("gated", [3, 5], False)):
        for suffix in (".keras", ".weights.h5"):
            ours = (cw.GRU if name == "gated" else cw.LSTM)(4, widths, bidirectional=both)
            load_lstm(ours, read_lstm(tmp_path / f"{name}{suffix}"))
            expected = torch.tensor(np.load(tmp_path / f"{name}.npy"))
            torch.testing.assert_close(ours(x)[0].transpose(0, 1).detach(), expected, rtol=1e-5, atol=1e-6)  # float32
