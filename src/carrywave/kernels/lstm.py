"""The LSTM contract: `lstm(x, carries, layers, lengths, …) -> y, carries` over one or several layers, on a backend by name.

Each backend runs one layer in one direction or both (`choice` says which); dropout between layers and norms are here, the
same for all.

Shapes: T time, B lane, I input, P output width of a layer, D directions, O = P·D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from carrywave.kernels import choice, random
from carrywave.kernels.carry import Carries, Carry
from carrywave.kernels.lengths import real_steps
from carrywave.kernels.weights import Layer

Norm = Callable[[Tensor], Tensor]


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

    def mask_after(number: int, like_TBU: Tensor) -> Tensor | None:
        if not dropout or key is None or number >= len(sites):
            return None
        return dropout_mask(like_TBU, random.fold(key, sites[number]), dropout, locked=locked, lanes=lanes, start=start)

    # Backends see one dtype throughout, so the autocast that chose it must not cast within.
    with torch.autocast(x_TBI.device.type, enabled=False):
        y_TBO = x_TBI.to(compute)
        wave = choice.wave_of(backend, y_TBO, layers) if norms is None else None
        if wave is not None:
            like_TBO = y_TBO.new_empty(()).expand(*x_TBI.shape[:2], layers[0][0].w_hh.shape[1])
            *masks, last = (mask_after(number, like_TBO) for number in range(len(layers)))
            ran = choice.run_wave(y_TBO, carries, layers, [*masks, None], lengths, wave)
            if ran is not None:
                return ran[0] if last is None else ran[0] * last, ran[1]
        for number, (carry, layer) in enumerate(zip(carries, layers, strict=True)):
            y_TBO, end = choice.run(backend, y_TBO, carry, layer, lengths)
            ends.append(end)
            norm = None if norms is None else norms[number]
            if norm is not None:
                y_TBO = norm(y_TBO.to(torch.promote_types(compute, torch.float32))).to(compute)
                y_TBO = y_TBO if real_TB1 is None else torch.where(real_TB1, y_TBO, 0.0)
            mask = mask_after(number, y_TBO)
            y_TBO = y_TBO if mask is None else y_TBO * mask
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
