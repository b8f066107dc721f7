"""The LSTM contract: `lstm(x, carries, layers, lengths, …) -> y, carries` over one or several layers, on a backend by name.

Backends: `reference` (plain PyTorch, the definition), `aten` (torch's kernels) and `manual` (own backward, for the CPU).
`auto` takes the fastest that serves.
Each backend runs one layer in one direction or both; dropout between layers and norms are here, the same for all.

Shapes: T time, B lane, I input, P output width of a layer, D directions, O = P·D.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from carrywave.errors import PlanError
from carrywave.kernels import aten, manual, random, reference
from carrywave.kernels.carry import Carries, Carry
from carrywave.kernels.lengths import real_steps
from carrywave.kernels.weights import Layer

Norm = Callable[[Tensor], Tensor]


class Backend(Protocol):
    """One layer, both directions if it has two: outputs [T, B, O] and the carry at each lane's real end."""

    def __call__(self, x_TBI: Tensor, carry: Carry, weights: Layer, lengths_B: Tensor | None, /) -> tuple[Tensor, Carry]: ...


BACKENDS: dict[str, Backend] = {"reference": reference.layer, "aten": aten.layer, "manual": manual.layer}


def check(asked: str) -> str:
    """The backend's name as asked for, unless the environment variable CARRYWAVE_KERNEL names another."""
    forced = os.environ.get("CARRYWAVE_KERNEL", "")
    name = forced or asked
    if name != "auto" and name not in BACKENDS:
        where = "CARRYWAVE_KERNEL" if forced else "kernel"
        raise PlanError(f"{where}={name} is not a backend; use one of auto, {', '.join(BACKENDS)}")
    return name


def choose(asked: str, x_TBI: Tensor, layer: Layer) -> str:
    """The backend that runs this layer on x. `manual` leaves what it does not serve to `aten`."""
    name = check(asked)
    if name == "auto":
        name = "aten" if aten.prefers_onednn(x_TBI, layer) else "manual"
    # torch.compile cannot look into a backward that is written by hand.
    left_to_aten = torch.compiler.is_compiling() or not manual.serves(x_TBI, layer)
    return "aten" if name == "manual" and left_to_aten else name


def lstm(
    x_TBI: Tensor,
    carries: Carries,
    layers: Sequence[Layer],
    lengths: Tensor | None = None,
    *,
    full: bool = False,
    dropout: float = 0.0,
    locked: bool = False,
    norms: Sequence[Norm | None] | None = None,
    key: Tensor | None = None,
    lanes: Tensor | None = None,
    start: int = 0,
    sites: Sequence[int] = (),
    backend: str = "auto",
) -> tuple[Tensor, Carries]:
    """The layers in order, from these carries: outputs [T, B, O], 0 at padded steps, and the carries at each lane's real end.

    `full` says that the host knows every step to be real, whatever `lengths` holds. Dropout follows layer i where there is a
    site for it: a whole stack has one site fewer than layers. Its coordinates are (start + time, lane, unit), without time
    when `locked`; `lanes` are the global numbers of the lanes. `norms` apply to each layer's output, not to its carry.
    """
    real_TB1 = None if full or lengths is None else real_steps(lengths, x_TBI.shape[0])
    lengths = None if real_TB1 is None else lengths
    compute = _dtype(x_TBI.device.type, layers)
    ends: list[Carry] = []
    # Backends see one dtype throughout, so the autocast that chose it must not cast within.
    with torch.autocast(x_TBI.device.type, enabled=False):
        y_TBO = x_TBI.to(compute)
        for number, (carry, layer) in enumerate(zip(carries, layers, strict=True)):
            weights = tuple(direction.to(compute) for direction in layer)
            run = BACKENDS[choose(backend, y_TBO, weights)]
            y_TBO, end = run(y_TBO, Carry(carry.h.to(compute), carry.c.to(compute)), weights, lengths)
            # The carry keeps the dtype it came with, so that every chunk and window finds the same.
            ends.append(Carry(end.h.to(carry.h.dtype), end.c.to(carry.c.dtype)))
            norm = None if norms is None else norms[number]
            if norm is not None:
                y_TBO = norm(y_TBO.to(torch.promote_types(compute, torch.float32))).to(compute)
                y_TBO = y_TBO if real_TB1 is None else torch.where(real_TB1, y_TBO, 0.0)
            if dropout and key is not None and number < len(sites):
                y_TBO = y_TBO * dropout_mask(y_TBO, random.fold(key, sites[number]), dropout, locked=locked, lanes=lanes, start=start)
    return y_TBO, tuple(ends)


def dropout_mask(x_TBU: Tensor, key: Tensor, p: float, *, locked: bool, lanes: Tensor | None, start: int) -> Tensor:
    """The multiplier for x ([T, B, U], or [1, B, U] when locked), at x's place among all lanes and steps of the batch."""
    steps, count, units = x_TBU.shape
    device = x_TBU.device
    lane_B1 = (torch.arange(count, device=device) if lanes is None else lanes)[:, None]
    unit_U = torch.arange(units, device=device)
    if locked:
        return random.keep(key, p, lane_B1, unit_U, dtype=x_TBU.dtype)[None]
    time_T11 = torch.arange(start, start + steps, device=device)[:, None, None]
    return random.keep(key, p, time_T11, lane_B1, unit_U, dtype=x_TBU.dtype)


def _dtype(device: str, layers: Sequence[Layer]) -> torch.dtype:
    """What the layers compute in: autocast's dtype where it is on, else the weights'."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else layers[0][0].w_ih.dtype
