"""Loads layers that were trained elsewhere: the weights of a torch.nn.LSTM or of another cell's module.

Only the layers are loaded. An embedding or a head from elsewhere would need the vocabulary or the labels that it was trained with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from carrywave.errors import DataError
from carrywave.model.recurrent import Recurrent

SUFFIX = ".safetensors"
_NAME = re.compile(r"(?P<prefix>(?:.*\.)?)(?P<part>(?:weight|bias)_(?:ih|hh|hr))_l(?P<layer>\d+)(?P<reverse>_reverse)?")
_MOST_LAYERS = 1000  # more cannot be a file of layers, and would only make the message long


def holds_layers(path: str | Path) -> bool:
    """True if a file's name says that it holds layers, and not a text of embeddings."""
    return str(path).lower().endswith(SUFFIX)


def read_lstm(path: str | Path) -> dict[str, Tensor]:
    """The layers in a file, under the names of one torch.nn.LSTM."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: file not found; pass a .safetensors file")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path} is not a valid safetensors file ({' '.join(str(error).split())}); pass another file") from error
    return one_stack(tensors, str(path))


def one_stack(given: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """The layers among these tensors as one stack: of one nn.LSTM, whatever its name, or of several that are numbered, as in lstm.0."""
    stacks: dict[str, dict[str, Tensor]] = {}
    for name, tensor in given.items():
        if (match := _NAME.fullmatch(name)) is not None:
            stacks.setdefault(match["prefix"], {})[name] = tensor
    if not stacks:
        raise DataError(f"{where} holds no recurrent layers: it has no weight_ih_l0; save the state_dict of a torch.nn.LSTM or nn.GRU")
    numbers = [re.fullmatch(r"(.*?)(\d+)\.", prefix) for prefix in stacks]
    if len(stacks) > 1 and (None in numbers or len({match[1] for match in numbers if match is not None}) > 1):
        raise DataError(f"{where} holds several stacks of layers ({', '.join(sorted(stacks))}); save one of them by itself")
    one: dict[str, Tensor] = {}
    depth = 0
    for prefix in sorted(stacks, key=lambda prefix: [int(number) for number in re.findall(r"\d+", prefix)]):
        parts = {name: match for name in stacks[prefix] if (match := _NAME.fullmatch(name)) is not None}
        for name, match in parts.items():
            one[f"{match['part']}_l{depth + int(match['layer'])}{match['reverse'] or ''}"] = stacks[prefix][name]
        depth += 1 + max(int(match["layer"]) for match in parts.values())
    return one


def load_lstm(lstm: Recurrent, given: Mapping[str, Tensor], where: str = "the state dict") -> None:
    """Copy the layers of a state dict, which may hold other tensors too, into an LSTM of the same shape; without biases, these are zero.

    The LSTM is unchanged if anything does not fit.
    """
    state = one_stack(given, where)
    if lstm.cell_norm:
        raise DataError(f"{where} has no norms inside the cell, but the model has (cell_norm); remove that")
    if (gates := _gates(state)) not in (None, lstm.cell.gates * lstm.num_heads):
        cell = lstm.cell
        raise DataError(f"{where} has layers of {gates} gates, but the cell {cell.name} has {cell.gates}; use weights of that cell")
    parameters = {name: parameter for name, parameter in lstm.named_parameters() if _NAME.fullmatch(name)}
    unbiased = not any(name.startswith("bias") for name in state)
    if unbiased:
        state |= {name: torch.zeros_like(parameter) for name, parameter in parameters.items() if name.startswith("bias")}
    for name in sorted(parameters.keys() | state.keys()):
        theirs, ours = (list(tensors[name].shape) if name in tensors else None for tensors in (state, parameters))
        if theirs != ours:
            raise DataError(f"{where} has {_text(name, theirs)}, but the model {_text(name, ours)}; {_remedy(state, lstm.cell.gates)}")
        if not bool(state[name].isfinite().all()):
            raise DataError(f"{where}: {name} has numbers that are not finite; use other weights")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def _gates(state: Mapping[str, Tensor]) -> int | None:
    """How many gates the first layer has; None if its shapes do not show it."""
    if (recurrent := state.get("weight_hh_l0")) is None or recurrent.dim() != 2:
        return None
    gates, rest = divmod(recurrent.shape[0], max(1, state.get("weight_hr_l0", recurrent).shape[-1]))
    return None if rest else gates


def _text(name: str, shape: list[int] | None) -> str:
    return f"no {name}" if shape is None else f"{name} of shape {shape}"


def _remedy(state: Mapping[str, Tensor], gates: int) -> str:
    """The settings of a spec that the layers fit."""
    first = [state[f"weight_ih_l{layer}"] for layer in range(_MOST_LAYERS) if f"weight_ih_l{layer}" in state]
    if not first:
        return "use weights of the model's shape"
    widths = [weight.shape[0] // gates for weight in first]
    hidden = str(widths[0]) if len(set(widths)) == 1 else "[" + ",".join(map(str, widths)) + "]"
    words = [f"model.layers={len(first)}", f"model.hidden={hidden}", f"{first[0].shape[1]} inputs (model.embedding for tokens)"]
    if "weight_hr_l0" in state:
        words.append(f"model.projection={state['weight_hr_l0'].shape[0]}")
    if "weight_ih_l0_reverse" in state:
        words.append("model.bidirectional=true")
    return f"it needs {', '.join(words)}"
