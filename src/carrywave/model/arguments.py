"""Checks what a user passes to a stack of layers: options, x, lengths, resets and carries. Messages name the user's class."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from carrywave.errors import UserError
from carrywave.kernels.carry import AnyCarries
from carrywave.kernels.cuda.casting import HALVES
from carrywave.kernels.layers import is_cast
from carrywave.kernels.lengths import one_a_lane, out_of_range

if TYPE_CHECKING:
    from carrywave.model.recurrent import Recurrent

# One tensor for each part of the carry, of all layers, or only the tensor if the cell has one part; or such a tuple for each layer.
GivenCarry = Tensor | Sequence[Tensor] | Sequence[Sequence[Tensor]]
_SHORT = (torch.float32, *HALVES)  # dtypes that autocast converts between


def checked_input(layers: Recurrent, x: Tensor | None) -> Tensor:
    """Return x after checking its type, shape and dtype."""
    if not isinstance(x, Tensor):
        raise UserError(f"{type(layers).__name__} got x as a {type(x).__name__}; pass a tensor [time, lane, {layers.input_size}]")
    if x.is_nested:
        raise UserError(f"{type(layers).__name__} got a nested tensor; pass the padded one, x.to_padded_tensor(0.0), and lengths")
    if x.dim() not in (2, 3) or x.shape[-1] != layers.input_size:
        form = f"[lane, time, {layers.input_size}]" if layers.batch_first else f"[time, lane, {layers.input_size}]"
        raise UserError(f"{type(layers).__name__} got x of shape {list(x.shape)}; pass {form} or [time, {layers.input_size}]")
    own = layers.dtype
    if x.dtype != own and not (x.dtype in _SHORT and own in _SHORT and is_cast(x.device.type)):
        name, tokens = type(layers).__name__, not x.is_floating_point()
        remedy = f"use x.to({own})" + ("; pass tokens through an embedding first" if tokens else f", or convert the {name}")
        raise UserError(f"{name} got x in {x.dtype}, but its weights are in {own}; {remedy}")
    return x


def checked_lengths(lengths: Tensor | Sequence[int], steps: int, count: int, device: torch.device) -> Tensor:
    """Lengths [B] on a device; those that are on the host are checked against the number of steps."""
    lengths_B = one_a_lane(lengths, "lengths", count, torch.int64)
    if (found := out_of_range(lengths_B, steps)) is not None:
        raise UserError(f"lengths range from {found[0]} to {found[1]}; they must be between 0 and the {steps} steps of x")
    return lengths_B.to(device=device, dtype=torch.int64)


def checked_resets(module: nn.Module, resets: Tensor, like: Sequence[int], device: torch.device) -> Tensor:
    """Resets on a device, of which there must be one for each step of each lane."""
    resets = torch.as_tensor(resets)
    if list(resets.shape) != list(like) or resets.dtype != torch.bool:
        raise UserError(
            f"{type(module).__name__} got resets of shape {list(resets.shape)} in {resets.dtype}; pass true or false for each step of each "
            f"lane, {list(like)} in torch.bool"
        )
    return resets.to(device)


def split_carry(layers: Recurrent, carry: GivenCarry, lanes: int, *, batched: bool = True) -> AnyCarries:
    """One carry per layer, checked, from torch's stacked form or from a sequence of per-layer carries."""
    names = layers.cell.parts
    each = f"({', '.join(names)}{',' * (len(names) == 1)})"
    carry = [carry] if isinstance(carry, Tensor) else carry
    given: list[tuple[Tensor, ...]]
    if len(carry) == len(names) and all(isinstance(part, Tensor) for part in carry):
        stacked = cast(Sequence[Tensor], carry)
        if len(set(layers.widths)) > 1:
            raise UserError(f"layers of widths {list(layers.widths)} need one {each} each; pass a tuple of {layers.num_layers} of them")
        rows = layers.num_layers * layers.directions
        if any(part.shape[:1] != (rows,) for part in stacked):
            shown = " and ".join(str(list(part.shape)) for part in stacked)
            raise UserError(f"carry has shapes {shown}; the first dimension must be {rows}, one for each layer and direction")
        given = list(zip(*(torch.split(part, layers.directions) for part in stacked), strict=True))
    else:
        given = [tuple(parts) for parts in carry]
    if len(given) != layers.num_layers:
        raise UserError(f"expected {layers.num_layers} carries, got {len(given)}; pass one {each} for each layer")
    if (wrong := next((parts for parts in given if len(parts) != len(names)), None)) is not None:
        raise UserError(f"a layer's carry has {len(wrong)} parts; pass {each} for each layer")
    for layer, parts in enumerate(given):
        for (name, width), part in zip(layers.carry_widths(layer).items(), parts, strict=True):
            got, want = list(part.shape), [layers.directions, *([lanes] if batched else []), width]
            if got != want:
                raise UserError(
                    f"carry {name} of layer {layer} has shape {got}, expected {want}; build a new one for these layers and lanes"
                )
    return tuple(layers.cell.carry(*(part if batched else part[:, None] for part in parts)) for parts in given)


def check_dtypes(layers: Recurrent, carries: AnyCarries, x: Tensor) -> None:
    """Check that a carry has the dtype of x; with half-precision x it may be float32, and under autocast they mix freely."""
    mixed = _SHORT if is_cast(x.device.type) else (torch.float32,) if x.dtype in HALVES else ()
    for part in (part for carry in carries for part in carry):
        if part.dtype != x.dtype and not (part.dtype in mixed and x.dtype in _SHORT):
            parts = f"{'both ' * (len(carries[0]) == 2)}{' and '.join(layers.cell.parts)}"
            raise UserError(
                f"{type(layers).__name__} got a carry in {part.dtype}, but x in {x.dtype}; convert {parts}, as in h.to({x.dtype})"
            )


def check_options(layers: Recurrent, *, bias: bool, proj_size: int, **fixed: Any) -> None:
    """Refuse what torch's module of this name may be told, but the cell does not do."""
    name = type(layers).__name__
    if not hasattr(type(layers), "cell"):
        raise UserError(f"{name} names no cell; use cw.LSTM, or a subclass with cell = …")
    if isinstance(bias, str):  # the place of an option that only torch's module has
        raise UserError(
            f"{name} got bias={bias!r}; pass True or False, and {' and '.join(layers.cell.torch_arguments) or 'others'} by name"
        )
    if proj_size and not layers.cell.projects:
        raise UserError(f"{name} has no projection; remove proj_size={proj_size}")
    for option, value in fixed.items():
        if option not in layers.cell.torch_arguments:
            raise TypeError(f"{name}.__init__() got an unexpected keyword argument {option!r}")
        if value != (own := layers.cell.torch_arguments[option]):
            raise UserError(f"{name} got {option}={value!r}, and has only {own!r}; use that")


def either(layers: Recurrent, name: str, given: Any, other_name: str, other: Any) -> Any:
    """Return an argument that has two names; giving both is an error."""
    if given is not None and other is not None:
        raise UserError(f"{type(layers).__name__} got both {name} and {other_name}, two names of one argument; pass one of them")
    return other if given is None else given


def whole(**sizes: int) -> tuple[int, ...]:
    """Convert sizes to Python ints, from any integer type (numpy scalars, one-element tensors)."""
    for name, size in sizes.items():
        try:
            operator.index(size)
        except TypeError:
            raise UserError(f"{name}={size!r} must be a whole number") from None
    return tuple(operator.index(size) for size in sizes.values())
