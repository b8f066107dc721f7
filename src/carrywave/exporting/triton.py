"""The configuration with which NVIDIA Triton serves a stateful ONNX model: requests of one sequence, each with the carry of the last.

Triton keeps the state of every sequence itself (`sequence_batching.state`), says which lanes start one (START → `fresh`) and which lanes of
a batch hold a request (READY → `ready`). The fields are those of `ModelConfig` in Triton's model_config.proto.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import torch

from carrywave.errors import UserError, option
from carrywave.exporting.portable import BATCH, NEXT, Port, Portable

MOST_LANES = 64
IDLE_MICROSECONDS = 60_000_000  # Triton forgets a sequence that has sent nothing for so long
CONTROLS = {"fresh": "CONTROL_SEQUENCE_START", "ready": "CONTROL_SEQUENCE_READY"}
TYPES = {torch.float32: "TYPE_FP32", torch.float64: "TYPE_FP64", torch.int64: "TYPE_INT64", torch.bool: "TYPE_BOOL"}
NAME = re.compile(r"[A-Za-z0-9_.-]+")


class Words(str):
    """A value that is written as it is: a number or the name of an enumeration's member, not a text in quotes."""


Message = dict[str, Any]  # texts, `Words`, lists of them, messages and lists of messages


def config(portable: Portable, name: str) -> str:
    """The text of config.pbtxt for a model in a folder of this name."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot be the name of a Triton model; name the folder with letters, digits, _, . and - ({option('output')})"
        )
    states = {port.name for port in portable.state}
    plain = [port for port in portable.inputs if port.name not in CONTROLS and port.name not in states]
    batching: Message = {
        "max_sequence_idle_microseconds": Words(IDLE_MICROSECONDS),
        "oldest": {"max_candidate_sequences": Words(MOST_LANES)},
        "control_input": [
            {"name": control, "control": [{"kind": Words(kind), "bool_false_true": [Words("false"), Words("true")]}]}
            for control, kind in CONTROLS.items()
        ],
        "state": [
            {"input_name": port.name, "output_name": port.name + NEXT, "data_type": _kind(port), "dims": _dims(port)}
            for port in portable.state
        ],
    }
    whole: Message = {
        "name": name,
        "backend": "onnxruntime",
        "max_batch_size": Words(MOST_LANES),
        "input": [_tensor(port) for port in plain],
        "output": [_tensor(portable.outputs[0])],
        "sequence_batching": batching,
    }
    return "\n".join(_lines(whole, "")) + "\n"


def _tensor(port: Port) -> Message:
    described: Message = {"name": port.name, "data_type": _kind(port), "dims": _dims(port)}
    if port.shape == (BATCH,):
        # Triton has no tensors without sizes: a request sends one number, and the model gets one for each lane.
        described |= {"dims": [Words(1)], "reshape": {"shape": list[Words]()}}
    return described


def _kind(port: Port) -> Words:
    return Words(TYPES[port.dtype])


def _dims(port: Port) -> list[Words]:
    """The sizes of one lane; -1 is free."""
    return [Words(-1 if isinstance(size, str) else size) for size in port.shape[1:]]


def _lines(message: Message, indent: str) -> Iterable[str]:
    """A message in protobuf's text format."""
    for name, value in message.items():
        if isinstance(value, dict):
            yield f"{indent}{name} {{"
            yield from _lines(value, indent + "  ")
            yield f"{indent}}}"
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{indent}{name} ["
            for number, each in enumerate(value, start=1):
                yield f"{indent}  {{"
                yield from _lines(each, indent + "    ")
                yield f"{indent}  }}" + ("," if number < len(value) else "")
            yield f"{indent}]"
        elif isinstance(value, list):
            yield f"{indent}{name}: [{', '.join(map(str, value))}]"
        else:
            yield f"{indent}{name}: {value if isinstance(value, Words) else json.dumps(value)}"
