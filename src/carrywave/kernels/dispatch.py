"""`Dispatch` chooses the backend that runs a layer, by device, precision and shape, and falls back if it cannot run it.

Backends: `reference` (plain PyTorch, the definition), `aten` (torch's kernels: cuDNN, oneDNN), `manual` (handwritten backward, for the
CPU) and `persistent` (our own kernels, for Hopper GPUs). `auto` takes the fastest that supports the layer. Whatever a backend cannot run
falls back to `aten`; if `persistent` was requested by name or is broken, the process warns once for each reason. Cases that every
backend but the definition gets wrong or rejects go to `reference`: batches without lanes, torch.func and forward mode, norms inside the
cell, noise unless `persistent` takes it, and resets that a tracer or a CUDA graph would have to read (see `torch_kernels`). Layers with
resets run on `manual` on the CPU whatever their length: torch's kernels are called anew at every reset.

Shapes: T time, B lane, I input, O outputs of all directions.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from carrywave.cells.cell import Cell
from carrywave.kernels import torch_kernels
from carrywave.kernels.backends import Backend, Backends, checked_name, in_dtype, with_library, without_choice
from carrywave.kernels.carry import AnyCarries, AnyCarry
from carrywave.kernels.cuda import normed, nvrtc
from carrywave.kernels.cuda.casting import HALVES
from carrywave.kernels.hopper import persistent, windowed
from carrywave.kernels.hopper.layout import Wave
from carrywave.kernels.step_marks import StepMarks
from carrywave.kernels.weights import Layer, LayerWeights, heads_of
from carrywave.kernels.window import WindowChunk

_warned: set[str] = set()  # reasons that this process has already warned about
_failures: list[str] = []  # after its first failure, the persistent kernel is not tried again


class TorchKernels(Protocol):
    """The module that runs layers of a cell on torch's kernels."""

    layer: Backend
    KERNEL: torch_kernels.Kernel

    def prefers_onednn(self, x_TBI: Tensor, weights: LayerWeights, /, *, trains: bool = True) -> bool:
        """True if oneDNN is the fastest for this layer."""


class Handwritten(Protocol):
    """The module with the handwritten backward of a cell."""

    layer: Backend

    def serves(self, x_TBI: Tensor, weights: Layer, /) -> bool:
        """True if this backend supports the layer."""


class Dispatch(Backends):
    """The backends of the layers of one cell."""

    def __init__(self, cell: Cell, aten: TorchKernels | None = None, manual: Handwritten | None = None) -> None:
        super().__init__(cell)
        self.of, self.cell, self.aten, self.manual = cell, cell.name, aten, manual
        self.backends: dict[str, Backend] = {"reference": self.backend}
        self.backends |= {} if aten is None else {"aten": aten.layer}
        self.backends |= {} if manual is None else {"manual": manual.layer}
        self.backends |= {"persistent": partial(persistent.layer, cell=cell.name)}
        self.normed = partial(normed.layer, cell=cell)

    def check(self, asked: str) -> str:
        """The requested backend, or the one named by the environment variable CARRYWAVE_KERNEL; raise if it is unknown."""
        return checked_name(asked, self.backends)

    def choose(self, asked: str, x_TBI: Tensor, layer: Layer, marks: StepMarks | None = None) -> str:
        """The backend that runs this layer on x, which is already in the compute dtype. Unsupported layers fall back to `aten`."""
        name = self.check(asked)
        forced = name != "auto"
        if layer[0].extra is not None:
            return "normed" if not forced and normed.serves(self.of, x_TBI, layer, marks) else "reference"
        whole = heads_of(layer, self.of.gates) == 1
        torchs = "aten" if whole and self.aten is not None and torch_kernels.serves(x_TBI, marks) else "reference"
        if only := without_choice(name, x_TBI):
            return torchs if only == "aten" else only
        name = name if forced else self._fastest(x_TBI, layer, marks)
        quiet = marks is None or marks.noise is None
        if name == "manual" and whole and quiet and self.manual is not None and self.manual.serves(x_TBI, layer):
            return "manual"
        if name != "persistent":
            return torchs
        why = _failures[0] if _failures else persistent.refusal(x_TBI, layer, marks, self.cell)
        # Warn about an unsupported shape only if this backend was requested by name, but always about a missing compiler.
        if why and why not in _warned and (forced or _is_broken(why)):
            _warn(why)
        # Only after the refusal: whether it pays depends on the chip, and only a GPU that is not refused can be asked for it.
        return "persistent" if not why and (forced or marks is not None or persistent.pays(x_TBI, layer)) else torchs

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
        begun = _begun(chunk, layer)
        name = "persistent" if begun else self.choose(asked, x_TBI, layer, marks)
        if name == "persistent":
            try:
                # It takes weights and carry in their own dtypes, and casts them itself.
                return persistent.layer(x_TBI, carry, layer, lengths_B, self.cell, marks=marks, clean=clean, chunk=chunk)
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
        """How to run layers concurrently on one GPU, by our kernels or, if they are `plain`, in one call of torch's; None to run them one
        after the other, each on the backend chosen for it.
        """
        if len(layers) < 2:
            return None
        held = windowed.held_by(chunk, [layer[0] for layer in layers])
        if held is not None:
            return held.how
        each = zip(layers, marks or [None] * len(layers), strict=True)
        chosen = {"begun" if _begun(chunk, layer) else self.choose(asked, x_TBI, layer, marked) for layer, marked in each}
        if chosen == {"persistent"}:
            return persistent.wave_of(x_TBI, layers, self.cell, plain=marks is None)
        in_one = plain and marks is None and chosen == {"aten"} and torch_kernels.stackable(x_TBI, layers)
        return self.aten.KERNEL if in_one and self.aten is not None else None

    def run_wave(
        self,
        x_TBI: Tensor,
        carries: AnyCarries,
        layers: Sequence[Layer],
        masks: Sequence[Tensor | None],
        lengths_B: Tensor | None,
        how: Wave | torch_kernels.Kernel,
        *,
        marks: Sequence[StepMarks | None] | None = None,
        clean: bool = False,
        chunk: WindowChunk | None = None,
    ) -> tuple[Tensor, AnyCarries] | None:
        """Run the layers concurrently, each one's outputs times its mask feeding the next; None if the kernel failed, after a warning.
        `how` is what `wave_of` returned.
        """
        if not isinstance(how, Wave):
            return torch_kernels.together(how, x_TBI, carries, layers)
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

    def in_use(self, asked: str, x_TBI: Tensor, layer: Layer, marks: StepMarks | None = None) -> str:
        """The user-facing name of the backend that would run this layer: for torch's kernels, with the library behind them."""
        return with_library(self.choose(asked, x_TBI, layer, marks), x_TBI, onednn=self._prefers_onednn(x_TBI, layer))

    def _fastest(self, x_TBI: Tensor, layer: Layer, marks: StepMarks | None) -> str:
        """The backend that is fastest on this device and precision; whether it can run the layer, and pays, is checked afterwards."""
        if x_TBI.is_cuda and x_TBI.dtype in HALVES:
            return "persistent"
        return "aten" if marks is None and self._prefers_onednn(x_TBI, layer) else "manual"

    def _prefers_onednn(self, x_TBI: Tensor, layer: Layer) -> bool:
        return self.aten is not None and self.aten.prefers_onednn(x_TBI, layer[0])

    def library(self, x_TBI: Tensor, weights: LayerWeights) -> str | None:
        trains = torch.is_grad_enabled()
        if self.aten is not None and self.aten.prefers_onednn(x_TBI, weights, trains=trains):
            return "oneDNN"
        native = not trains or x_TBI.shape[0] <= torch_kernels.FEW_STEPS or weights.w_hr is not None
        return "native" if native and self.aten is not None else None


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
