"""`Cell`: a recurrent cell as a value. It says everything that the rest of the package needs to know about it.

Each file beside this one defines a cell as `CELL`, under its own name: a new cell is a new file, and nothing else changes. No file here
imports torch, so that a spec can name a cell and a laptop can plan with it: `step` only calls methods of the tensors it is given, and
kernels are named by their module, which is imported when a layer first runs.

A layer multiplies its inputs with `weight_ih` for all steps at once; a step adds the product with `weight_hh` and computes the next carry:

    gates = x @ weight_ih.T + bias_ih                     # [T, B, G], by the layer
    carry = cell.step(gates[t], carry, weights)           # its first part is the output; weights.recurrent(h) is h @ weight_hh.T + bias_hh

Norms and noise are options of the layers, whatever their cell. `weights.recurrent` normalises the product (`cell_norm`), and zoneout is
applied to what the step returns. A step that is to have recurrent dropout passes what it would add to its carry through
`weights.candidate`.

Shapes: T time, B lane, H hidden, G = gates · H, P output width (the projection, or H).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from carrywave import cells
from carrywave.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor


class StepWeights(Protocol):
    """What a step reads of the weights of one direction of a layer."""

    def recurrent(self, h_BP: Tensor, /) -> Tensor:
        """[B, G]: the output of the step before, times `weight_hh`, with its bias; of a layer with heads, by heads. May be called again on
        something else, such as a gated output; the planner counts one product.
        """

    def candidate(self, new_BH: Tensor, /) -> Tensor:
        """[B, H]: what the step would add to the carry, after recurrent dropout if the layer has any."""

    def normed(self, c_BH: Tensor, /) -> Tensor:
        """[B, H]: a memory as the output sees it, normalised if the layer has norms inside its cell. For a cell with `memory`."""

    def projected(self, h_BH: Tensor, /) -> Tensor:
        """[B, P]: an output, projected if the layer has a projection."""

    def named(self, name: str, /) -> Tensor:
        """One of the cell's extra parameters."""


class Extra(NamedTuple):
    """A parameter of each direction of a layer besides its matrices and biases."""

    shape: tuple[int, ...]
    value: float = 0.0  # of all its elements, in the beginning


class OnnxForm(NamedTuple):
    """The ONNX operator that computes a layer without projection."""

    operator: str
    order: tuple[int, ...]  # of the gates: the first in ONNX is this one here, and so on
    attributes: Mapping[str, Any] = {}  # besides hidden_size and direction; a tuple is of one direction


HALF_PRECISIONS = ("bf16", "fp16")
Carry = tuple[Any, ...]  # the carry of one direction of a layer in a step: a tensor [B, P] or [B, H] for each part


def _none(hidden: int) -> dict[str, Extra]:
    return {}


@dataclass(frozen=True, eq=False)
class Cell:
    """Rows of `weight_ih`, `weight_hh` and the biases are those of all gates, one gate after the other.

    >>> import carrywave as cw
    >>> cw.LSTM.cell.gates, cw.LSTM.cell.parts
    (4, ('h', 'c'))
    """

    name: str  # that of its file
    gates: int
    carry: type[Any]  # a NamedTuple whose fields name the parts of the carry; the first is the output
    step: Callable[[Tensor, Carry, StepWeights], Carry]  # the definition, in plain operations on tensors
    extra: Callable[[int], Mapping[str, Extra]] = _none  # from the hidden units to further parameters by name, such as gains of a norm
    projects: bool = False  # its output may be projected to fewer units (`projected`); other parts of the carry keep their width
    memory: bool = False  # its step passes a memory through `normed`, so norms inside the cell have a gain and bias for it
    free: tuple[str, ...] | None = None  # parts of the carry whose units may have any value (learned_carry, zoneout); None: all
    forget_gate: int | None = None  # the gate that keeps the carry when it is open, which `model.forget_bias` is for
    kernels: bool = False  # `kernels/dispatch.py` has some for it; otherwise the definition runs, differentiated by autograd
    torch_module: str | None = None  # the class in torch.nn that has the same weights and answers
    torch_arguments: Mapping[str, Any] = field(default_factory=dict)  # what that class must be told besides
    torch_function: str | None = None  # the function of torch that runs layers of it
    onnx: OnnxForm | None = None
    kept: int = 4  # elements per hidden unit, lane and step that forward keeps for backward, besides the input; about
    wide: bool = False  # its steps compute in float32 at least, whatever the precision

    def __post_init__(self) -> None:
        """Refuse what would fail later, in other words."""
        if not self.name.isidentifier() or self.name != self.name.lower():
            raise SpecError(f"the cell {self.name!r} needs a name in lower case, that of its file")
        if self.gates < 1 or not 0 <= (self.forget_gate or 0) < self.gates:
            raise SpecError(f"the cell {self.name} has gates={self.gates} and forget_gate={self.forget_gate}; gates are numbered from 0")

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts of the carry."""
        names: tuple[str, ...] = self.carry._fields
        return names

    @property
    def free_parts(self) -> tuple[str, ...]:
        """The parts of the carry whose values do not depend on each other."""
        return self.parts if self.free is None else self.free

    def has_kernels(self, precision: str) -> bool:
        """True if kernels run its layers in a precision, on some device at least: torch's in any, our own in half precision."""
        return self.kernels and (self.torch_module is not None or precision in HALF_PRECISIONS)

    def widths(self, hidden: int, projection: int = 0) -> tuple[int, ...]:
        """The width of each part of the carry."""
        return (projection or hidden, *[hidden] * (len(self.parts) - 1))

    def further(self, hidden: int, norm: bool = False) -> dict[str, Extra]:
        """The parameters of each direction of a layer besides its matrices and biases: the cell's own, and those of norms inside it. The
        norms of both products have the biases of the layer as theirs.
        """
        found, rows = dict(self.extra(hidden)), self.gates * hidden
        if norm:
            found |= {"norm_ih": Extra((rows,), 1.0), "norm_hh": Extra((rows,), 1.0)}
        if norm and self.memory:
            found |= {"norm_c": Extra((hidden,), 1.0), "norm_c_bias": Extra((hidden,))}
        return found

    def zoneout(self, given: float | Sequence[float]) -> tuple[float, ...]:
        """For each part of the carry, the chance that a unit keeps its value: from one for all, or one for each part that may."""
        may = self.free_parts
        chances = [float(given)] * len(may) if isinstance(given, (int, float)) else [float(chance) for chance in given]
        if len(chances) != len(may) or not all(0.0 <= chance < 1.0 for chance in chances):
            several = "" if len(may) == 1 else f", or one for each of {', '.join(may)}"
            raise SpecError(f"zoneout={given} for the cell {self.name}; use a chance of at least 0 and below 1{several}")
        of_parts = dict(zip(may, chances, strict=True))
        return tuple(of_parts.get(name, 0.0) for name in self.parts)

    def multiply_adds(self, inputs: int, hidden: int, projection: int = 0, heads: int = 1) -> int:
        """Of one step of one lane, in the matrix products."""
        return self.gates * hidden * (inputs + (projection or hidden) // heads) + projection * hidden


@cache
def names() -> tuple[str, ...]:
    """The names of all cells."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(cells.__path__) if found.name != "cell" and found.name[0] != "_"))


@cache
def by_name(name: str) -> Cell:
    """The cell of this name."""
    if name not in names():
        raise SpecError(f"model.cell={name} is not a cell; use one of {', '.join(names())}")
    cell: Cell = import_module(f"{cells.__name__}.{name}").CELL
    if cell.name != name:
        raise SpecError(f"the cell in {name}.py is called {cell.name}; give it the name of its file")
    return cell
