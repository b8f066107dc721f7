"""`run_layers(x, carries, layers, lengths, …) -> y, carries` over one or more layers of a cell, on a backend chosen by name.

Each backend runs one layer in one or both directions (its cell's `backends` choose it); dropout between layers and norms are applied here,
the same for all.

Shapes: T time, B lane, I input, P output width of a layer, D directions, O = P·D.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from carrywave.cells import lstm
from carrywave.kernels.carry import AnyCarries, AnyCarry
from carrywave.kernels.dispatch import Backends, backends_of
from carrywave.kernels.dropout import Coordinates, dropped, multiplier
from carrywave.kernels.hopper.layout import Wave
from carrywave.kernels.lengths import real_steps
from carrywave.kernels.step_marks import StepMarks
from carrywave.kernels.torch_kernels import together
from carrywave.kernels.weights import Layer
from carrywave.kernels.window import WindowChunk

Norm = Callable[[Tensor], Tensor]


def run_layers(
    x_TBI: Tensor,
    carries: AnyCarries,
    layers: Sequence[Layer],
    lengths: Tensor | None = None,
    *,
    backends: Backends | None = None,
    full: bool = False,
    dropout: float = 0.0,
    locked: bool = False,
    norms: Sequence[Norm | None] | None = None,
    marks: Sequence[StepMarks | None] | None = None,
    key: Tensor | None = None,
    lanes: Tensor | None = None,
    start: int = 0,
    sites: Sequence[int] = (),
    backend: str = "auto",
    clean: bool = False,
    chunk: WindowChunk | None = None,
) -> tuple[Tensor, AnyCarries]:
    """Run the layers in order from these carries: outputs [T, B, O], 0 at padded steps, and the carries at each lane's last real step.

    `full`: the host knows that every step is real, whatever `lengths` holds. Dropout follows layer i if there is a site for it: a
    whole stack has one site fewer than layers. Its coordinates are (start + time, lane, unit), without time when `locked`; `lanes`
    are the global lane numbers. `norms` apply to each layer's output, not to its carry; `marks` are those of each layer. `clean`: padding
    of x already holds zeros. `chunk`: the steps are one chunk of this window, and the carries are those that the chunk before it returned.
    """
    real_TB1 = None if full or lengths is None else real_steps(lengths, x_TBI.shape[0])
    lengths = None if real_TB1 is None else lengths
    device, compute = x_TBI.device.type, layers[0][0].w_ih.dtype
    casts = is_cast(device)
    if casts and compute != torch.float64:  # autocast never narrows float64
        compute = torch.get_autocast_dtype(device)
    ends: list[AnyCarry] = []
    backends = backends or backends_of(lstm.CELL)

    places = [Coordinates(site, dropout, locked, start) for site in sites] if dropout else []

    def dropped_after(number: int, y_TBU: Tensor) -> Tensor:
        return y_TBU if key is None or number >= len(places) else dropped(y_TBU, key, lanes, places[number])

    def mask_after(number: int, like_TBU: Tensor) -> Tensor | None:
        return None if key is None or number >= len(places) else multiplier(like_TBU, key, lanes, places[number])

    # Backends compute in a single dtype, so the autocast that chose it must not cast inside them.
    with torch.autocast(device, enabled=False) if casts else contextlib.nullcontext():
        y_TBO = x_TBI.to(compute)
        plain = lengths is None and not (key is not None and places[: len(layers) - 1])
        wave = backends.wave_of(backend, y_TBO, layers, chunk, marks, plain=plain) if norms is None else None
        if wave is not None and not isinstance(wave, Wave):
            y_TBO, after = together(wave, y_TBO, carries, layers)
            return y_TBO if key is None else dropped_after(len(layers) - 1, y_TBO), after
        if wave is not None:
            like_TBO = y_TBO.new_empty(()).expand(*x_TBI.shape[:2], layers[0][0].w_hh.shape[1])
            masks = (mask_after(number, like_TBO) for number in range(len(layers) - 1))
            ran = backends.run_wave(y_TBO, carries, layers, [*masks, None], lengths, wave, marks=marks, clean=clean, chunk=chunk)
            if ran is not None:
                return dropped_after(len(layers) - 1, ran[0]), ran[1]
        for number, (carry, layer) in enumerate(zip(carries, layers, strict=True)):
            mark = None if marks is None else marks[number]
            y_TBO, end = backends.run(backend, y_TBO, carry, layer, lengths, marks=mark, clean=clean or number > 0, chunk=chunk)
            ends.append(end)
            norm = None if norms is None else norms[number]
            if norm is not None:
                y_TBO = norm(y_TBO.to(torch.promote_types(compute, torch.float32))).to(compute)
                y_TBO = y_TBO if real_TB1 is None else torch.where(real_TB1, y_TBO, 0.0)
            y_TBO = y_TBO if key is None else dropped_after(number, y_TBO)
    return y_TBO, tuple(ends)


def is_cast(device: str) -> bool:
    """True if autocast is enabled; torch's meta device has none."""
    return device != "meta" and torch.is_autocast_enabled(device)
