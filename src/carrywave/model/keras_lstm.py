"""Reads the LSTM layers of a Keras 3 model from its weights (.weights.h5) or from the whole model (.keras).

Keras and torch order the gates alike: input, forget, cell, output. Keras' matrices are transposed, and it has one bias where torch has two:
the second becomes zero. A .keras file also says how its layers compute, and those that compute something else are refused; a .weights.h5
file does not say it.

Shapes: I input, H hidden, G = 4H.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import zipfile
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
    data = path.read_bytes()
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
    return _stack(cells, str(path))


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
    for path in sorted(cells, key=_place):
        values = cells[path]
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
    reverse = sum(name.endswith("_reverse") for name in state)
    if reverse and reverse * 2 != len(state):
        raise DataError(f"{where} mixes layers of one direction and of both, and a carrywave model has one kind; use layers of one kind")
    return state


def _place(path: str) -> list[tuple[str, int]]:
    """Where a layer stands: Keras names those of a kind lstm, lstm_1, lstm_2, … in their order."""
    parts = (re.fullmatch(r"(.*?)(?:_(\d+))?", part) for part in path.split("/"))
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
