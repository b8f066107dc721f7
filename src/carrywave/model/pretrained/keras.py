"""Reads the LSTM layers of a Keras 3 model from its weights (.weights.h5) or from the whole model (.keras).

Keras and torch order the gates alike: input, forget, cell, output. Keras' matrices are transposed, and it has one bias where torch has two:
the second becomes zero. A .keras file also says how its layers compute, and those that compute something else are refused; a .weights.h5
file does not say it.

In a file, layers have no order but that of their names: Keras numbers those of one kind in a list (lstm, lstm_1, …), whatever the user
calls them. Attributes of a model class have the user's names (encoder, decoder), and then only a list of layers in a .keras file tells the
order; without one, they are refused.

Shapes: I input, H hidden, G = 4H.
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


def read(path: Path) -> dict[str, Tensor]:
    """The LSTM layers of a file, in their order, under the names of one torch.nn.LSTM."""
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
    return _stack({name: cells[name] for name in _in_order(list(cells), config, str(path))}, str(path))


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


def _stack(cells: dict[str, list[Any]], where: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    layers: dict[str, int] = {}
    for path, values in cells.items():
        name = path.rpartition("/")[2] or path
        hidden = values[1].shape[0] if len(values) > 1 else 0
        shapes = [value.shape for value in values]
        if (
            len(values) not in (2, 3)
            or shapes[1] != (hidden, 4 * hidden)
            or shapes[0][1:] != (4 * hidden,)
            or shapes[2:] not in ([], [(4 * hidden,)])
        ):
            raise DataError(
                f"{where}: layer {path.strip('/')} has variables of shapes {shapes}, which are not an LSTM's; use LSTM layers only"
            )
        layer = layers.setdefault(path.rpartition("/")[0] if name in ("forward_layer", "backward_layer") else path, len(layers))
        suffix = f"_l{layer}" + ("_reverse" if name == "backward_layer" else "")
        kernel_IG, recurrent_HG = (torch.from_numpy(value.astype(np.float32)) for value in values[:2])
        bias_G = torch.from_numpy(values[2].astype(np.float32)) if len(values) == 3 else torch.zeros(4 * hidden)
        state[f"weight_ih{suffix}"] = kernel_IG.T.contiguous()
        state[f"weight_hh{suffix}"] = recurrent_HG.T.contiguous()
        state[f"bias_ih{suffix}"], state[f"bias_hh{suffix}"] = bias_G, torch.zeros_like(bias_G)
    if not state:
        raise DataError(f"{where} holds no LSTM layers; save a Keras 3 model that has some")
    return state


def _in_order(paths: list[str], config: Any, where: str) -> list[str]:
    """The cells of a file as data passes through them."""
    layers = {path: re.sub("/(forward|backward)_layer$", "", path) for path in paths}
    if 0 < sum(path != layer for path, layer in layers.items()) < len(paths):
        raise DataError(f"{where} mixes layers of one direction and of both, and a carrywave model has one kind; use layers of one kind")
    listed = list(_listed(config, ""))
    numbers = {path: number for number, layer in enumerate(listed) for path in paths if f"{path}/".startswith(f"{layer}/")}
    kinds = {tuple(stem for stem, _ in _place(layer)) for layer in layers.values()}
    if len(numbers) < len(paths) and len(kinds) > 1:
        names = " and ".join(sorted({layer.strip("/") for layer in layers.values()})[:3])
        raise DataError(
            f"{where}: the names {names} do not tell the order of these layers; save a keras.Sequential of them, in their order, as "
            "NAME.keras"
        )
    return sorted(paths, key=lambda path: (numbers[path] if len(numbers) == len(paths) else 0, _place(path)))


def _listed(config: Any, path: str) -> Iterator[str]:
    """The paths of the layers that a configuration lists, in its order; those inside a layer that lists its own come in its place."""
    own = config.get("config") if isinstance(config, dict) else None
    layers = own.get("layers") if isinstance(own, dict) else None
    if not isinstance(layers, list):
        yield from [path] if path else []
        return
    used: Counter[str] = Counter()
    for layer in layers:
        # As Keras names them: by their class, and a number from the second on.
        kind = re.sub("(?<=[a-z])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])", "_", str(layer.get("class_name"))).lower()
        yield from _listed(layer, f"{path}/layers/{kind}_{used[kind]}" if used[kind] else f"{path}/layers/{kind}")
        used[kind] += 1


def _place(path: str) -> list[tuple[str, int]]:
    """Where a layer stands among those that are numbered alike: the name and the number of each part of its path."""
    parts = (re.fullmatch(r"(.*?)_?(\d+)?", part) for part in path.split("/"))
    return [(found[1], int(found[2] or 0)) for found in parts if found is not None]


def _check(config: Any, where: str) -> None:
    """Refuse layers that compute something else than ours, wherever they are in a model's configuration."""
    if isinstance(config, list):
        for each in config:
            _check(each, where)
    if not isinstance(config, dict):
        return
    kind, own = config.get("class_name"), config.get("config")
    if kind in ("LSTM", "LSTMCell") and isinstance(own, dict):
        for name, usual in _USUAL.items():
            if own.get(name, usual) != usual:
                raise DataError(f"{where}: layer {own.get('name')} has {name}={own[name]}, and carrywave's have {usual}; use that")
        if own.get("go_backwards"):
            raise DataError(f"{where}: layer {own.get('name')} goes backwards; use Bidirectional, or turn the data round")
    if kind == "Bidirectional" and isinstance(own, dict):
        if own.get("merge_mode", "concat") != "concat":
            raise DataError(f"{where}: layer {own.get('name')} has merge_mode={own['merge_mode']}, and carrywave's are joined; use concat")
        own = {name: value for name, value in own.items() if name != "backward_layer"}  # it goes backwards, as it should
        config = {**config, "config": own}
    for each in config.values():
        _check(each, where)
