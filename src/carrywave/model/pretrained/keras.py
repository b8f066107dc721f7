"""Reads the LSTM or GRU layers of a Keras 3 model from its weights (.weights.h5) or from the whole model (.keras).

Keras' matrices are transposed. Of an LSTM, Keras and torch order the gates alike, but Keras has one bias where torch has two: the second
becomes zero. Of a GRU, Keras has the update gate first, and both biases, as rows of one; but only if its reset gate acts on the product, as
torch's does (`reset_after`, the default), and one that does not is refused. A .keras file also says how its layers compute, and those that
compute something else are refused; a .weights.h5 file does not say it.

In a file, layers have no order but that of their names: Keras numbers those of one kind in a list (lstm, lstm_1, …), whatever the user
calls them. Attributes of a model class have the user's names (encoder, decoder), and then only a list of layers in a .keras file tells the
order; without one, they are refused.

Shapes: I input, H hidden, G = gates · H.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carrywave.errors import DataError, UserError

SUFFIXES = (".h5", ".keras")
_WEIGHTS, _CONFIG = "model.weights.h5", "config.json"  # in a .keras archive
_USUAL = {"activation": "tanh", "recurrent_activation": "sigmoid"}
_ORDERS = {4: (0, 1, 2, 3), 3: (1, 0, 2)}  # of an LSTM and of a GRU: the number in Keras of each gate in torch


def read(path: Path) -> dict[str, Tensor]:
    """The layers of a file, in their order, under the names of one torch.nn.LSTM or nn.GRU."""
    h5py = _h5py()
    data, config = path.read_bytes(), None
    if path.suffix.lower() == ".keras":
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                data, config = archive.read(_WEIGHTS), json.loads(archive.read(_CONFIG))
        except (zipfile.BadZipFile, KeyError, ValueError) as error:
            raise DataError(f"{path} is not a model of Keras 3 ({error}); save it with model.save('NAME.keras')") from error
        _check(config, str(path))
    try:
        with h5py.File(io.BytesIO(data), "r") as file:
            cells = {name: [np.asarray(group[key]) for key in sorted(group, key=int)] for name, group in _cells(h5py, file, "")}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a weights file of Keras 3 ({error}); save it with model.save_weights('NAME.weights.h5')") from error
    return _stack({name: cells[name] for name in _in_order(list(cells), config, str(path))}, str(path), described=config is not None)


def _h5py() -> Any:
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        raise UserError("weights of Keras need the package h5py, which is not installed; pip install 'carrywave[keras]'") from error


def _cells(h5py: Any, group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The variables of every recurrent cell below a group, by the path of its layer."""
    for name in sorted(group):
        if not isinstance(group.get(name, getlink=True), h5py.HardLink) or not isinstance(group[name], h5py.Group):
            continue  # a link may lead out of the file
        inner = group[name]
        whole = f"{path}/{name}"
        if name == "vars" and len(inner) and (path.endswith("/cell") or "/cell/cells/" in path):
            yield path.removesuffix("/cell"), inner
        else:
            yield from _cells(h5py, inner, whole)


def _stack(cells: dict[str, list[Any]], where: str, *, described: bool) -> dict[str, Tensor]:
    """`described`: the file says how its layers compute, and they have been checked."""
    state: dict[str, Tensor] = {}
    layers: dict[str, int] = {}
    for path, values in cells.items():
        name = path.rpartition("/")[2] or path
        gates = _gates(values, f"{where}: layer {path.strip('/')}", described=described)
        rows = gates * values[1].shape[0]
        layer = layers.setdefault(path.rpartition("/")[0] if name in ("forward_layer", "backward_layer") else path, len(layers))
        suffix = f"_l{layer}" + ("_reverse" if name == "backward_layer" else "")
        biases = np.zeros((2, rows))
        biases[: 1 if gates == 4 else 2] = values[2] if len(values) == 3 else 0.0
        given = {"weight_ih": values[0].T, "weight_hh": values[1].T, "bias_ih": biases[0], "bias_hh": biases[1]}
        for part, value in given.items():
            blocks = np.split(value.astype(np.float32), gates)
            state[part + suffix] = torch.from_numpy(np.concatenate([blocks[gate] for gate in _ORDERS[gates]]))
    if not state:
        raise DataError(f"{where} holds no LSTM or GRU layers; save a Keras 3 model that has some")
    if len({tensor.shape[0] // tensor.shape[1] for name, tensor in state.items() if name.startswith("weight_hh")}) > 1:
        raise DataError(f"{where} mixes LSTM and GRU layers, and a carrywave model has one kind; use layers of one kind")
    return state


def _gates(values: list[Any], where: str, *, described: bool) -> int:
    """How many gates a layer has, by the shapes of its variables; those of other layers are refused."""
    shapes = [value.shape for value in values]
    hidden = shapes[1][0] if len(shapes) in (2, 3) and len(shapes[1]) == 2 else 0
    for gates in _ORDERS:
        rows = gates * hidden
        if hidden and len(shapes[0]) == 2 and (shapes[0][1], shapes[1][1]) == (rows, rows):
            if gates == 3 and shapes[2:] == [(rows,)]:
                raise DataError(f"{where} is a GRU with reset_after=False, which computes something else; train one with reset_after=True")
            if gates == 3 and len(shapes) == 2 and not described:
                raise DataError(f"{where} is a GRU without biases, which does not tell if it has reset_after; save the model as NAME.keras")
            if shapes[2:] in ([], [(rows,)] if gates == 4 else [(2, rows)]):
                return gates
    raise DataError(f"{where} has variables of shapes {shapes}, which are no LSTM's or GRU's; use such layers only")


def _in_order(paths: list[str], config: Any, where: str) -> list[str]:
    """The cells of a file as data passes through them."""
    layers = {path: re.sub("/(forward|backward)_layer$", "", path) for path in paths}
    if 0 < sum(path != layer for path, layer in layers.items()) < len(paths):
        raise DataError(f"{where} mixes layers of one direction and of both, and a carrywave model has one kind; use layers of one kind")
    listed = list(_listed(config, ""))
    numbers = {path: number for number, layer in enumerate(listed) for path in paths if f"{path}/".startswith(f"{layer}/")}
    kinds = {tuple(stem for stem, _ in _sort_key(layer)) for layer in layers.values()}
    if len(numbers) < len(paths) and len(kinds) > 1:
        names = " and ".join(sorted({layer.strip("/") for layer in layers.values()})[:3])
        raise DataError(
            f"{where}: the names {names} do not tell the order of these layers; save a keras.Sequential of them, in their order, as "
            "NAME.keras"
        )
    return sorted(paths, key=lambda path: (numbers[path] if len(numbers) == len(paths) else 0, _sort_key(path)))


def _listed(config: Any, path: str) -> Iterator[str]:
    """The paths of the layers that a configuration lists, in its order; those inside a layer that lists its own come in its place."""
    settings = config.get("config") if isinstance(config, dict) else None
    layers = settings.get("layers") if isinstance(settings, dict) else None
    if not isinstance(layers, list):
        yield from [path] if path else []
        return
    used: Counter[str] = Counter()
    for layer in layers:
        # As Keras names them: by their class, and a number from the second on.
        kind = re.sub("(?<=[a-z])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])", "_", str(layer.get("class_name"))).lower()
        yield from _listed(layer, f"{path}/layers/{kind}_{used[kind]}" if used[kind] else f"{path}/layers/{kind}")
        used[kind] += 1


def _sort_key(path: str) -> list[tuple[str, int]]:
    """Where a layer stands among those that are numbered alike: the name and the number of each part of its path."""
    parts = (re.fullmatch(r"(.*?)_?(\d+)?", part) for part in path.split("/"))
    return [(match[1], int(match[2] or 0)) for match in parts if match is not None]


def _check(config: Any, where: str) -> None:
    """Refuse layers that compute something else than ours, wherever they are in a model's configuration."""
    if isinstance(config, list):
        for each in config:
            _check(each, where)
    if not isinstance(config, dict):
        return
    kind, settings = config.get("class_name"), config.get("config")
    if kind in ("LSTM", "LSTMCell", "GRU", "GRUCell") and isinstance(settings, dict):
        if settings.get("reset_after") is False:
            raise DataError(f"{where}: layer {settings.get('name')} has reset_after=False, and carrywave's have it; use reset_after=True")
        for name, usual in _USUAL.items():
            if settings.get(name, usual) != usual:
                raise DataError(
                    f"{where}: layer {settings.get('name')} has {name}={settings[name]}, and carrywave's have {usual}; use that"
                )
        if settings.get("go_backwards"):
            raise DataError(f"{where}: layer {settings.get('name')} goes backwards; use Bidirectional, or turn the data round")
    if kind == "Bidirectional" and isinstance(settings, dict):
        if settings.get("merge_mode", "concat") != "concat":
            raise DataError(
                f"{where}: layer {settings.get('name')} has merge_mode={settings['merge_mode']}, and carrywave's are joined; use concat"
            )
        settings = {name: value for name, value in settings.items() if name != "backward_layer"}  # it goes backwards, as it should
        config = {**config, "config": settings}
    for each in config.values():
        _check(each, where)
