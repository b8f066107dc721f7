"""The names that a model's weights have outside carrywave: an `nn.Embedding`, one `nn.LSTM` (or several in a row), and a head.

One nn.LSTM holds all layers if they are equally wide and nothing stands between them; otherwise each layer is an nn.LSTM of its own,
`lstm.0`, `lstm.1`, …, with its norm, `norms.0`, after it. Of another cell, it is torch's module of that cell, under the same names. Each
categorical column has an `nn.Embedding`, `categories.0`, `categories.1`, …, and so have the characters of words, `characters`; what reads
them is an `nn.Linear` over 3 of them side by side, `character_filters`. The convolutions of a front are `nn.Conv1d`s, `front.0`,
`front.1`, …, and the `nn.LayerNorm` after each is `front_norms.0`, `front_norms.1`, ….
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from carrywave.model.recurrent import Recurrent

_NORM = re.compile(r"lstm\.norm_l(?P<layer>\d+)\.(?P<part>weight|bias)")
_TABLE = re.compile(r"encoder\.tables\.(?P<table>\d+)")
_FRONT = re.compile(r"encoder\.(?P<kind>convolutions|norms)\.(?P<layer>\d+)\.(?P<part>weight|bias)")
_SPELLED = re.compile(r"encoder\.(step_encoder\.)?(?P<part>words\.weight|characters|reader\.\w+)")
_CARRY = re.compile(r"lstm\.carry_(?P<part>\w+)_l(?P<layer>\d+)")
_LAYER = re.compile(r"lstm\.(?P<part>\w+)_l(?P<layer>\d+)(?P<reverse>_reverse)?")
CLASS_WEIGHTS = "head.weights"  # of the loss, which is not exported
EXPORTED = "carrywave_export"  # in the metadata of a file of weights under these names


def in_one(layers: Recurrent) -> bool:
    """True if one module of torch can hold all layers."""
    return len(set(layers.widths)) == 1 and not layers.layer_norm


def beyond_cell(layers: Recurrent) -> str:
    """The option by which trained layers compute another thing than their cell alone, as torch's module or ONNX's operator does; empty if
    there is none.
    """
    options = {"num_heads": layers.num_heads > 1, "cell_norm": layers.cell_norm, "zoneout": any(layers.zoneout)}
    return next((name for name, used in options.items() if used), "")


def outside(names: Iterable[str], layers: Recurrent) -> dict[str, str]:
    """For each name of a model's weights, its name outside; class weights have none."""
    return {name: _outside(name, in_one(layers)) for name in names if name != CLASS_WEIGHTS}


def _outside(name: str, one: bool) -> str:
    if name in ("encoder.weight", "encoder.step_encoder.weight"):
        return "embedding.weight"
    if (match := _SPELLED.fullmatch(name)) is not None:
        kind, _, part = match["part"].partition(".")
        theirs = {"words": "embedding", "reader": "character_filters"}.get(kind, kind)
        return f"{theirs}.{part or 'weight'}"
    if (match := _FRONT.fullmatch(name)) is not None:
        return f"{'front' if match['kind'] == 'convolutions' else 'front_norms'}.{match['layer']}.{match['part']}"
    if (match := _TABLE.fullmatch(name)) is not None:
        return f"categories.{match['table']}.weight"
    if (match := _NORM.fullmatch(name)) is not None:
        return f"norms.{match['layer']}.{match['part']}"
    if (match := _CARRY.fullmatch(name)) is not None:
        return f"carry.{match['part']}.{match['layer']}"
    if (match := _LAYER.fullmatch(name)) is not None:
        return name if one else f"lstm.{match['layer']}.{match['part']}_l0{match['reverse'] or ''}"
    return name


def arguments(layers: Recurrent) -> list[dict[str, Any]]:
    """The arguments of the nn.LSTM, or of each of several, that the weights belong to; of another cell, those of its module in torch."""
    usual: dict[str, Any] = {"bias": layers.bias, "bidirectional": layers.bidirectional, **layers.cell.torch_arguments}
    usual |= {"proj_size": layers.proj_size} if layers.cell.projects else {}
    if in_one(layers):
        return [{"input_size": layers.input_size, "hidden_size": layers.widths[0], "num_layers": layers.num_layers, **usual}]
    inputs = [layers.input_size, *(layers.outputs(layer) for layer in range(layers.num_layers - 1))]
    return [
        {"input_size": width, "hidden_size": hidden, "num_layers": 1, **usual} for width, hidden in zip(inputs, layers.widths, strict=True)
    ]
