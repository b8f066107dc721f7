"""Which backend runs a layer. The first row that fits, of those below; a backend asked for by name skips the rows of the others.

    backend      what it is                                runs a layer
    normed       our kernels around torch's products       with norms inside the cell, on a GPU, in half precision (`cuda/normed.py`)
    reference    the definition, in plain PyTorch          with such norms elsewhere; without lanes; in torch.func and forward mode
    persistent   our kernels for Hopper GPUs               on such a GPU in half precision, where it fits and pays (`hopper/`)
    aten         torch's kernels: cuDNN, oneDNN, native    on a CPU where oneDNN is faster (`lstm/aten.py`), unless lanes start again
    manual       a handwritten backward                    of an LSTM or GRU on the CPU, in one head, without noise, untraced
    aten                                                   of a cell of torch, in one head, without noise; lanes start again only where
                                                           the host can read it: not in a tracer or a CUDA graph
    reference                                              whatever is left

A cell without kernels of its own, such as a user's, runs by its definition. If the persistent kernel fails, or was asked for and cannot
run, the process warns once for each reason, and the rows below it decide.

Shapes: T time, B lane, I input, O outputs of all directions.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from carrywave.cells.cell import Cell, by_name, names
from carrywave.errors import PlanError
from carrywave.kernels import derivatives, reference, torch_kernels
from carrywave.kernels.carry import AnyCarries, AnyCarry
from carrywave.kernels.cuda import normed, nvrtc
from carrywave.kernels.cuda.casting import HALVES
from carrywave.kernels.gru import aten as gru_aten
from carrywave.kernels.gru import manual as gru_manual
from carrywave.kernels.hopper import persistent, windowed
from carrywave.kernels.hopper.layout import Wave
from carrywave.kernels.lstm import aten as lstm_aten
from carrywave.kernels.lstm import manual as lstm_manual
from carrywave.kernels.step_marks import StepMarks
from carrywave.kernels.weights import Backend, Layer, LayerWeights, heads_of, in_dtype
from carrywave.kernels.window import WindowChunk

# For each cell that has kernels, the modules of `aten` and `manual`, if it has them; the persistent kernel runs all of these cells.
KERNELS: dict[str, tuple[Any, Any]] = {"lstm": (lstm_aten, lstm_manual), "gru": (gru_aten, gru_manual), "slstm": (None, None)}
ENVIRONMENT = "CARRYWAVE_KERNEL"  # the backend that it names takes precedence over what a layer asks for

_warned: set[str] = set()  # reasons that this process has already warned about
_failures: list[str] = []  # after its first failure, the persistent kernel is not tried again


class Backends:
    """The backends of the layers of one cell."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.wide = cell, cell.wide
        ours = cell.name in names() and by_name(cell.name) is cell  # and not made from one of ours with another step
        self.torch_function = cell.torch_function if ours else None
        self.has_kernels = ours and cell.name in KERNELS
        modules: tuple[Any, Any] = KERNELS[cell.name] if self.has_kernels else (None, None)
        self.aten, self.manual = modules
        self.backends: dict[str, Backend] = {"reference": partial(reference.layer, cell=cell)}
        self.backends |= {name: module.layer for name, module in zip(("aten", "manual"), modules, strict=True) if module is not None}
        self.backends |= {"persistent": partial(persistent.layer, cell=cell.name)} if self.has_kernels else {}
        self.normed = partial(normed.layer, cell=cell)

    def check(self, asked: str) -> str:
        """The requested backend, or the one named by the environment; raise if it is unknown."""
        forced = os.environ.get(ENVIRONMENT, "")
        name = forced or asked
        if name != "auto" and name not in self.backends:
            raise PlanError(f"{ENVIRONMENT if forced else 'kernel'}={name} is not a backend; use one of auto, {', '.join(self.backends)}")
        return name

    def choose(self, asked: str, x_TBI: Tensor, layer: Layer, marks: StepMarks | None = None) -> str:
        """The backend that runs this layer on x, which is already in the compute dtype."""
        name = self.check(asked)
        if not self.has_kernels or name == "reference":
            return "reference"
        if layer[0].extra is not None:
            return "normed" if name == "auto" and normed.serves(self.cell, x_TBI, layer, marks) else "reference"
        whole = heads_of(layer, self.cell.gates) == 1
        served = marks is None or torch_kernels.serves(x_TBI, marks)
        torchs = "aten" if whole and self.aten is not None and served else "reference"
        if derivatives.traced():  # a tracer cannot look into a handwritten backward, and would unroll a loop over steps
            return torchs
        if x_TBI.shape[1] == 0 or derivatives.transformed():
            return "reference"
        if name == "persistent" or (name == "auto" and _halves_on_gpu(x_TBI)):
            return "persistent" if self._persists(x_TBI, layer, marks, forced=name != "auto") else torchs
        if name == "auto" and marks is None and self.aten is not None and self.aten.prefers_onednn(x_TBI, layer[0]):
            return torchs
        quiet = whole and (marks is None or marks.noise is None)
        if name != "aten" and quiet and self.manual is not None and self.manual.serves(x_TBI, layer):
            return "manual"
        return torchs

    def run(
        self,
        asked: str,
        x_TBI: Tensor,
        carry: AnyCarry,
        layer: Layer,
        lengths_B: Tensor | None,
        *,
        marks: StepMarks | None = None,
        clean: bool = False,
        chunk: WindowChunk | None = None,
    ) -> tuple[Tensor, AnyCarry]:
        """Run the layer on the backend chosen for it: outputs in the dtype of x, the carry in its own dtype.

        `clean`: padding already holds zeros, as in the output of a layer. `chunk`: the steps are one chunk of this window; what a backend
        has begun, it finishes.
        """
        begun = chunk is not None and _begun(chunk, layer)
        name = "persistent" if begun else self.choose(asked, x_TBI, layer, marks)
        if name == "persistent":
            try:
                # It takes weights and carry in their own dtypes, and casts them itself.
                return persistent.layer(x_TBI, carry, layer, lengths_B, self.cell.name, marks=marks, clean=clean, chunk=chunk)
            except nvrtc.KernelError as error:
                if begun:
                    raise
                _give_up(error)
                name = self.choose(asked, x_TBI, layer, marks)
        backend = self.normed if name == "normed" else self.backends[name]
        backend = partial(backend, clean=clean) if name == "manual" else backend
        compute = torch.promote_types(x_TBI.dtype, torch.float32) if self.wide else x_TBI.dtype
        return in_dtype(compute, x_TBI, carry, layer, lengths_B, backend, marks)

    def wave_of(
        self,
        asked: str,
        x_TBI: Tensor,
        layers: Sequence[Layer],
        chunk: WindowChunk | None = None,
        marks: Sequence[StepMarks | None] | None = None,
        *,
        plain: bool = False,
    ) -> Wave | torch_kernels.Kernel | None:
        """How to run layers concurrently on one GPU, by our kernels or, if they are `plain` (no dropout between them, every step is real),
        in one call of torch's; None to run them one after the other, each on the backend chosen for it.
        """
        if len(layers) < 2 or not self.has_kernels:
            return None
        if x_TBI.device.type == "cpu" and chunk is None and self.check(asked) == "auto":
            return self.aten.KERNEL if plain and marks is None and self._in_one_call(x_TBI, layers) else None
        held = windowed.held_by(chunk, [layer[0] for layer in layers])
        if held is not None:
            return held.how
        each = zip(layers, marks or [None] * len(layers), strict=True)
        chosen = {"begun" if _begun(chunk, layer) else self.choose(asked, x_TBI, layer, marked) for layer, marked in each}
        if chosen == {"persistent"}:
            return persistent.wave_of(x_TBI, layers, self.cell.name, plain=marks is None)
        in_one = plain and marks is None and chosen == {"aten"} and torch_kernels.stackable(x_TBI, layers)
        kernel: torch_kernels.Kernel | None = self.aten.KERNEL if in_one else None
        return kernel

    def run_wave(
        self,
        x_TBI: Tensor,
        carries: AnyCarries,
        layers: Sequence[Layer],
        masks: Sequence[Tensor | None],
        lengths_B: Tensor | None,
        how: Wave,
        *,
        marks: Sequence[StepMarks | None] | None = None,
        clean: bool = False,
        chunk: WindowChunk | None = None,
    ) -> tuple[Tensor, AnyCarries] | None:
        """Run the layers concurrently, each one's outputs times its mask feeding the next; None if the kernel failed, after a warning.
        `how` is what `wave_of` returned.
        """
        first = [layer[0] for layer in layers]
        try:
            return windowed.run(x_TBI, carries, first, masks, lengths_B, how, chunk, marks=marks, clean=clean)
        except nvrtc.KernelError as error:
            if windowed.held_by(chunk, first) is not None:
                raise
            _give_up(error)
            return None

    def begun(self, chunk: WindowChunk | None, layers: Sequence[Layer]) -> bool:
        """True if an earlier chunk of the window left the carries and weights of these layers with their backend."""
        return windowed.held_by(chunk, [layer[0] for layer in layers]) is not None or all(_begun(chunk, layer) for layer in layers)

    def library(self, x_TBI: Tensor, weights: LayerWeights) -> str | None:
        """The library, native or oneDNN, with which torch's own function is the fastest on the CPU for a stack whose last layer has these
        weights; None if kernels of ours are.
        """
        trains = torch.is_grad_enabled()
        if self.aten is not None and self.aten.prefers_onednn(x_TBI, weights, trains=trains):
            return "oneDNN"
        native = not trains or x_TBI.shape[0] <= torch_kernels.FEW_STEPS or weights.w_hr is not None or self.manual is None
        return "native" if native else None

    def in_use(self, asked: str, x_TBI: Tensor, layer: Layer, marks: StepMarks | None = None) -> str:
        """The user-facing name of the backend that would run this layer: for torch's kernels, with the library behind them."""
        name = self.choose(asked, x_TBI, layer, marks)
        if name != "aten":
            return name
        libraries = {"cuda": "cuDNN", "cpu": "oneDNN" if self.aten.prefers_onednn(x_TBI, layer[0]) else "native"}
        library = libraries.get(x_TBI.device.type)
        return name if library is None else f"{name} ({library})"

    def _in_one_call(self, x_TBI: Tensor, layers: Sequence[Layer]) -> bool:
        """True if torch's kernel is the fastest for each of these layers on the CPU, and takes them all at once."""
        if self.aten is None or x_TBI.shape[1] == 0 or not torch_kernels.stackable(x_TBI, layers):
            return False
        return all(self.aten.prefers_onednn(x_TBI, layer[0]) for layer in layers) and not derivatives.transformed()

    def _persists(self, x_TBI: Tensor, layer: Layer, marks: StepMarks | None, *, forced: bool) -> bool:
        """True if the persistent kernel can run the layer and, unless it was asked for by name, is faster than torch's."""
        why = _failures[0] if _failures else persistent.refusal(x_TBI, layer, marks, self.cell.name)
        # Warn about an unsupported shape only if this backend was requested by name, but always about a missing compiler.
        if why and (forced or _is_broken(why)):
            _warn(why)
        # Only after the refusal: whether it pays depends on the chip, and only a GPU that is not refused can be asked for it.
        return not why and (forced or marks is not None or persistent.pays(x_TBI, layer))


@cache
def backends_of(cell: Cell) -> Backends:
    """What runs the layers of a cell."""
    return Backends(cell)


def _halves_on_gpu(x_TBI: Tensor) -> bool:
    return x_TBI.is_cuda and x_TBI.dtype in HALVES


def _begun(chunk: WindowChunk | None, layer: Sequence[LayerWeights]) -> bool:
    """True if an earlier chunk of the window left the layer's carry with the persistent kernel."""
    return windowed.held_by(chunk, layer) is not None


def _is_broken(why: str) -> bool:
    """True if a refusal is the environment's fault: the kernel failed, or cannot be compiled."""
    missing = nvrtc.available()
    return why.startswith(persistent.FAILED) or (bool(missing) and missing in why)


def _give_up(error: nvrtc.KernelError) -> None:
    _failures.append(persistent.failure(error))
    _warn(_failures[0])


def _warn(why: str) -> None:
    if why not in _warned:
        _warned.add(why)
        warnings.warn(f"the persistent recurrent kernel is not used, torch's runs instead: {why}", stacklevel=2)
