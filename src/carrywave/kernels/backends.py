"""What runs the layers of a cell: the backends that it names, or its definition, which runs everywhere.

Shapes: T time, B lane, I input, O outputs of all directions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from carrywave.cells.cell import Cell, by_name, names
from carrywave.errors import PlanError
from carrywave.kernels import derivatives, reference
from carrywave.kernels.carry import AnyCarries, AnyCarry, changed
from carrywave.kernels.step_marks import StepMarks
from carrywave.kernels.weights import Layer, LayerWeights
from carrywave.kernels.window import WindowChunk

# One layer, in both directions if it has two: outputs [T, B, O] and the carry at each lane's last real step.
# A backend that runs layers with marks takes them by their name, `marks`.
Backend = Callable[..., tuple[Tensor, Any]]


def checked_name(asked: str, names: Iterable[str]) -> str:
    """The requested backend, or the one named by the environment variable CARRYWAVE_KERNEL; raise if it is none of these."""
    forced = os.environ.get("CARRYWAVE_KERNEL", "")
    name = forced or asked
    if name != "auto" and name not in names:
        where = "CARRYWAVE_KERNEL" if forced else "kernel"
        raise PlanError(f"{where}={name} is not a backend; use one of auto, {', '.join(names)}")
    return name


def without_choice(name: str, x_TBI: Tensor) -> str | None:
    """The backend that alone gives the right answer, whatever was requested; None if any that runs the layer does."""
    # torch.compile and tracers cannot look into a handwritten backward, and would unroll a loop over steps.
    if name != "reference" and derivatives.traced():
        return "aten"
    return "reference" if name == "reference" or x_TBI.shape[1] == 0 or derivatives.transformed() else None


def in_dtype(
    compute: torch.dtype,
    x_TBI: Tensor,
    carry: AnyCarry,
    layer: Layer,
    lengths_B: Tensor | None,
    backend: Backend,
    marks: StepMarks | None = None,
) -> tuple[Tensor, AnyCarry]:
    """Run a backend in a dtype; outputs have that of x. The carry keeps its own, so that it is the same in every chunk and window."""
    weights = tuple(direction.to(compute) for direction in layer)
    named = {} if marks is None else {"marks": marks}
    y_TBO, end = backend(x_TBI.to(compute), changed(carry, lambda part: part.to(compute)), weights, lengths_B, **named)
    return y_TBO.to(x_TBI.dtype), changed(end, lambda part, before: part.to(before.dtype), carry)


def with_library(name: str, x_TBI: Tensor, *, onednn: bool = False) -> str:
    """The user-facing name of a backend: for torch's kernels, with the library behind them."""
    library = {"cuda": "cuDNN", "cpu": "oneDNN" if onednn else "native"}.get(x_TBI.device.type)
    return name if name != "aten" or library is None else f"{name} ({library})"


class Backends:
    """What runs layers of a cell: its definition, which autograd differentiates, on every device. A module that a cell names, such as
    `kernels.lstm.dispatch`, has others as `BACKENDS`.
    """

    def __init__(self, cell: Cell) -> None:
        self.backend, self.wide = partial(reference.layer, cell=cell), cell.wide
        # Not of a cell that was made from one of ours with another step.
        self.torch_function = cell.torch_function if cell.name in names() and by_name(cell.name) is cell else None

    def check(self, asked: str) -> str:
        """The requested backend, or the one that the environment names; raise if there is none of this name."""
        return checked_name(asked, ("reference",))

    def choose(self, asked: str, x_TBI: Tensor, layer: Layer, marks: StepMarks | None = None) -> str:
        """The backend that runs a layer."""
        self.check(asked)
        return "reference"

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
        """Run a layer: outputs in the dtype of x, the carry in its own dtype. `clean` and `chunk` as in `run_layers`."""
        self.check(asked)
        compute = torch.promote_types(x_TBI.dtype, torch.float32) if self.wide else x_TBI.dtype
        return in_dtype(compute, x_TBI, carry, layer, lengths_B, self.backend, marks)

    def wave_of(
        self,
        asked: str,
        x_TBI: Tensor,
        layers: Sequence[Layer],
        chunk: WindowChunk | None = None,
        marks: Sequence[StepMarks | None] | None = None,
        *,
        plain: bool = False,
    ) -> Any:
        """How to run layers concurrently; None to run them one after the other. `plain`: no dropout between them, every step is real."""
        return None

    def run_wave(self, x_TBI: Tensor, carries: AnyCarries, *given: Any, **named: Any) -> tuple[Tensor, AnyCarries] | None:
        """Run layers in the way that `wave_of` returned; None if that failed."""
        return None

    def begun(self, chunk: WindowChunk | None, layers: Sequence[Layer]) -> bool:
        """True if an earlier chunk of the window left the carries and weights of these layers with their backend."""
        return False

    def library(self, x_TBI: Tensor, weights: LayerWeights) -> str | None:
        """The library, native or oneDNN, with which torch's own function is the fastest on the CPU for a stack whose last layer has these
        weights; None if kernels of ours are.
        """
        return "native"

    def in_use(self, asked: str, x_TBI: Tensor, layer: Layer, marks: StepMarks | None = None) -> str:
        """The user-facing name of the backend that would run this layer."""
        return "reference"


@cache
def backends_of(cell: Cell) -> Backends:
    """What runs the layers of a cell."""
    if cell.backends is None:
        return Backends(cell)
    backends: Backends = import_module(cell.backends).BACKENDS
    return backends
