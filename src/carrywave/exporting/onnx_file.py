"""Runs an ONNX model in onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from carrywave.errors import UserError
from carrywave.exporting.onnx_nodes import needed
from carrywave.exporting.portable import Portable, Runner


def runner(model: bytes, ports: Portable) -> Runner:
    """A model, in the bytes of its file, in onnxruntime on the CPU."""
    runtime = needed("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # what it says about unused constants is of no use to anyone here
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _failed("load", error) from error
    names = [port.name for port in ports.inputs]

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        try:
            arrays = session.run(
                [port.name for port in ports.outputs], {n: t.contiguous().numpy() for n, t in zip(names, inputs, strict=True)}
            )
        except Exception as error:
            raise _failed("run", error) from error
        return [torch.from_numpy(array) for array in arrays]

    return run


def _failed(what: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split())
    return UserError(f"onnxruntime could not {what} the model ({reason:.200}); nothing was written: use another version of onnxruntime")
