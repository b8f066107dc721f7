"""Chooses the backend that runs a GRU layer, by device and precision.

Backends: `reference` (plain PyTorch, the definition), `aten` (torch's kernels: cuDNN, a native loop) and `manual` (handwritten backward,
for the CPU). `auto` takes the fastest that supports the layer. Cases that every backend but the definition gets wrong or rejects go to
`reference`: batches without lanes, torch.func and forward mode.

Shapes: T time, B lane, I input, O outputs of all directions.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from carrywave.cells import gru
from carrywave.kernels import reference
from carrywave.kernels.backends import Backend, Backends, in_dtype, known, with_library, without_choice
from carrywave.kernels.carry import AnyCarry
from carrywave.kernels.gru import aten, manual
from carrywave.kernels.weights import Layer
from carrywave.kernels.window import WindowChunk

BACKENDS: dict[str, Backend] = {
    "reference": partial(reference.layer, cell=gru.CELL),
    "aten": aten.layer,
    "manual": manual.layer,
}

# No kernel runs layers concurrently, or keeps anything between chunks.
_plain = Backends(gru.CELL)
wave_of, run_wave, begun = _plain.wave_of, _plain.run_wave, _plain.begun


def check(asked: str) -> str:
    """The requested backend, or the one named by the environment variable CARRYWAVE_KERNEL; raise if it is unknown."""
    return known(asked, BACKENDS)


def choose(asked: str, x_TBI: Tensor, layer: Layer) -> str:
    """The backend that runs this layer on x, which is already in the compute dtype."""
    name = check(asked)
    if only := without_choice(name, x_TBI):
        return only
    return "manual" if name in ("auto", "manual") and manual.serves(x_TBI, layer) else "aten"


def run(
    asked: str,
    x_TBI: Tensor,
    carry: AnyCarry,
    layer: Layer,
    lengths_B: Tensor | None,
    *,
    clean: bool = False,
    chunk: WindowChunk | None = None,
) -> tuple[Tensor, AnyCarry]:
    """Run the layer on the backend chosen for it: outputs in the dtype of x, the carry in its own dtype. `clean`: padding already holds
    zeros, as in the output of a layer. `chunk`: the steps are one chunk of this window.
    """
    name = choose(asked, x_TBI, layer)
    backend = partial(manual.layer, clean=clean) if name == "manual" else BACKENDS[name]
    return in_dtype(x_TBI.dtype, x_TBI, carry, layer, lengths_B, backend)


def in_use(asked: str, x_TBI: Tensor, layer: Layer) -> str:
    """The user-facing name of the backend that would run this layer: for torch's kernels, with the library behind them."""
    return with_library(choose(asked, x_TBI, layer), x_TBI)
