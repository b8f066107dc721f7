"""Runs an ONNX model in onnxruntime, and quantizes it to int8."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carrywave.errors import UserError
from carrywave.exporting.onnx_nodes import needed
from carrywave.exporting.portable import Ports, Runner


def runner(model: bytes, ports: Ports) -> Runner:
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


def quantized(model: Any) -> Any:
    """The model with int8 weights; activations are quantized as they come (onnxruntime's dynamic quantization)."""
    onnx, tools = needed("onnx"), needed("onnxruntime.quantization")
    with tempfile.TemporaryDirectory(prefix="carrywave-int8-") as folder:
        before, after = Path(folder, "before.onnx"), Path(folder, "after.onnx")
        onnx.save(model, before)
        logging.disable(logging.WARNING)  # it advises steps that are for other kinds of models
        try:
            tools.quantize_dynamic(before, after, op_types_to_quantize=["LSTM", "MatMul", "Gather"], weight_type=tools.QuantType.QInt8)
        except Exception as error:
            raise _failed("quantize", error) from error
        finally:
            logging.disable(logging.NOTSET)
        return onnx.load(after)


def _failed(what: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split())
    return UserError(f"onnxruntime could not {what} the model ({reason:.200}); nothing was written: use another version of onnxruntime")
