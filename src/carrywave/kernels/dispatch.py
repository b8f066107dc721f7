"""Which backend runs a layer, by device, precision and shape; and what happens where one cannot.

Backends: `reference` (plain PyTorch, the definition), `aten` (torch's kernels: cuDNN, oneDNN), `manual` (own backward, for the
CPU) and `persistent` (own kernels, for Hopper GPUs). `auto` takes the fastest that serves. What a backend cannot run goes to
`aten`; where that is not what was asked for, or means that something is broken, one warning in a process says why. What every backend
but the definition gets wrong or refuses goes there: no lanes at all, torch.func and forward mode.

Shapes: T time, B lane, I input, O outputs of all directions.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from carrywave.errors import PlanError
from carrywave.kernels import aten, derivatives, manual, reference
from carrywave.kernels.carry import Carries, Carry
from carrywave.kernels.cuda import nvrtc
from carrywave.kernels.cuda.casting import HALVES
from carrywave.kernels.hopper import persistent, wave
from carrywave.kernels.hopper.layout import Wave
from carrywave.kernels.weights import Layer


class Backend(Protocol):
    """One layer, both directions if it has two: outputs [T, B, O] and the carry at each lane's real end."""

    def __call__(self, x_TBI: Tensor, carry: Carry, weights: Layer, lengths_B: Tensor | None, /) -> tuple[Tensor, Carry]: ...


BACKENDS: dict[str, Backend] = {
    "reference": reference.layer,
    "aten": aten.layer,
    "manual": manual.layer,
    "persistent": persistent.layer,
}

_told: set[str] = set()  # reasons that this process has given already
_failures: list[str] = []  # once the persistent kernel has failed, it is not tried again


def check(asked: str) -> str:
    """The backend's name as asked for, unless the environment variable CARRYWAVE_KERNEL names another."""
    forced = os.environ.get("CARRYWAVE_KERNEL", "")
    name = forced or asked
    if name != "auto" and name not in BACKENDS:
        where = "CARRYWAVE_KERNEL" if forced else "kernel"
        raise PlanError(f"{where}={name} is not a backend; use one of auto, {', '.join(BACKENDS)}")
    return name


def choose(asked: str, x_TBI: Tensor, layer: Layer) -> str:
    """The backend that runs this layer on x, which has the dtype to compute in. What it does not serve is left to `aten`."""
    name = check(asked)
    forced = name != "auto"
    # torch.compile and tracers cannot look into a backward that is written by hand; nor would they keep a loop over steps short.
    if name != "reference" and derivatives.traced():
        return "aten"
    if name == "reference" or x_TBI.shape[1] == 0 or derivatives.transformed():
        return "reference"
    name = name if forced else _fastest(x_TBI, layer)
    if name == "aten":
        return name
    if name == "manual":
        return "manual" if manual.serves(x_TBI, layer) else "aten"
    why = _failures[0] if _failures else persistent.refusal(x_TBI, layer)
    # A shape that does not fit is no news where nothing was asked for; a compiler that is missing is.
    if why and why not in _told and (forced or _is_broken(why)):
        _tell(why)
    return "aten" if why else "persistent"


def run(asked: str, x_TBI: Tensor, carry: Carry, layer: Layer, lengths_B: Tensor | None, *, clean: bool = False) -> tuple[Tensor, Carry]:
    """The layer on the backend that is chosen for it: outputs in the dtype of x, the carry in the dtype that it came with.

    `clean` says that padding holds zeros already, as a layer leaves it.
    """
    name = choose(asked, x_TBI, layer)
    if name == "persistent":
        try:
            # It takes weights and carry as they are, and casts them on its way.
            return persistent.layer(x_TBI, carry, layer, lengths_B)
        except nvrtc.KernelError as error:
            _give_up(error)
            name = "aten"
    compute = x_TBI.dtype
    given = Carry(carry.h.to(compute), carry.c.to(compute))
    weights = tuple(direction.to(compute) for direction in layer)
    if name == "manual":
        y_TBO, end = manual.layer(x_TBI, given, weights, lengths_B, clean=clean)
    else:
        y_TBO, end = BACKENDS[name](x_TBI, given, weights, lengths_B)
    # The carry keeps its dtype, so that every chunk and window finds the same.
    return y_TBO, Carry(end.h.to(carry.h.dtype), end.c.to(carry.c.dtype))


def wave_of(asked: str, x_TBI: Tensor, layers: Sequence[Layer]) -> Wave | None:
    """How layers run at the same time on one GPU; None where they run one after the other, each on the backend chosen for it."""
    if len(layers) < 2 or any(choose(asked, x_TBI, layer) != "persistent" for layer in layers):
        return None
    return persistent.wave_of(x_TBI, layers)


def run_wave(
    x_TBI: Tensor, carries: Carries, layers: Sequence[Layer], masks: Sequence[Tensor | None], lengths_B: Tensor | None, how: Wave
) -> tuple[Tensor, Carries] | None:
    """The layers at the same time, each's outputs times its mask the inputs of the next; None where it failed, which was said."""
    try:
        return wave.run(x_TBI, carries, [layer[0] for layer in layers], masks, lengths_B, how)
    except nvrtc.KernelError as error:
        _give_up(error)
        return None


def in_use(asked: str, x_TBI: Tensor, layer: Layer) -> str:
    """The backend that would run this layer, as people know it: where it is torch's, with the library behind it."""
    name = choose(asked, x_TBI, layer)
    if name != "aten":
        return name
    library = {"cuda": "cuDNN", "cpu": "oneDNN" if aten.prefers_onednn(x_TBI, layer) else "native"}.get(x_TBI.device.type)
    return name if library is None else f"{name} ({library})"


def _fastest(x_TBI: Tensor, layer: Layer) -> str:
    """The only place that judges by speed; whether the backend can run the layer is asked afterwards."""
    if x_TBI.is_cuda and x_TBI.dtype in HALVES:
        return "persistent" if persistent.pays(x_TBI, layer) else "aten"
    return "aten" if aten.prefers_onednn(x_TBI, layer) else "manual"


def _is_broken(why: str) -> bool:
    """Whether a refusal is the machine's fault: the kernel failed, or cannot be compiled."""
    missing = nvrtc.available()
    return why in _failures or (bool(missing) and missing in why)


def _give_up(error: nvrtc.KernelError) -> None:
    _failures.append(f"it failed: {' '.join(str(error).split())[:400]}")
    _tell(_failures[0])


def _tell(why: str) -> None:
    if why not in _told:
        _told.add(why)
        warnings.warn(f"the persistent LSTM kernel is not used, and torch's own run instead: {why}", stacklevel=2)
