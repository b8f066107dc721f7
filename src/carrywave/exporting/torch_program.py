"""A model as a torch.export program in a .pt2 archive, without a pickle in it.

torch.export.save stores the graph as JSON and the weights as plain bytes. Only example inputs and tensors of subclasses would be
pickled, and the program has neither.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from carrywave.errors import UserError
from carrywave.exporting.portable import BATCH, TIME, Portable, Runner
from carrywave.model.heads.crf import CRF

TRACED = (3, 8)  # lanes and steps of the inputs that the model is traced with; both stay free


def archive(portable: Portable) -> bytes:
    """The bytes of a .pt2 file, in which batch and time are free sizes; of a single step, batch."""
    if isinstance(portable.model.head, CRF):
        raise UserError("a CRF looks back from step to step, which a torch program would do for one length only; use --to onnx")
    sizes = {BATCH: Dim(BATCH), TIME: Dim(TIME)}
    shapes = tuple({axis: sizes[size] for axis, size in enumerate(port.shape) if isinstance(size, str)} for port in portable.inputs)
    with torch.no_grad(), _layers_with_free_time():
        program = torch.export.export(portable, tuple(portable.sample(*TRACED, seed=0)), dynamic_shapes={"given": shapes}, strict=False)
    program._example_inputs = None  # they alone would be pickled
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def runner(data: bytes) -> Runner:
    """The program in the bytes of a .pt2 file that `archive` made."""
    program: Any = torch.export.load(io.BytesIO(data)).module()

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "LSTM with projections")  # torch says which of its kernels it takes
            outputs: Sequence[Tensor] = program(*inputs)
        return outputs

    return run


@contextmanager
def _layers_with_free_time() -> Iterator[None]:
    """Tracing keeps torch's LSTM and GRU as one operation, but finds their shapes by running a definition that fixes the number of steps;
    torch has another, a loop, which does not.
    """
    from torch.export._patches import register_gru_while_loop_decomposition, register_lstm_while_loop_decomposition

    # torch remembers which definition an earlier tracing has used, and would go on to use it, here and afterwards.
    remembered = [each.input._dispatch_cache for each in (torch.ops.aten.lstm, torch.ops.aten.gru)]
    for each in remembered:
        each.clear()
    try:
        with warnings.catch_warnings(), register_lstm_while_loop_decomposition(), register_gru_while_loop_decomposition():
            warnings.simplefilter("ignore", FutureWarning)  # in torch's own loop
            yield
    finally:
        for each in remembered:
            each.clear()
