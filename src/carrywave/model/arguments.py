"""Checks what a user passes to a stack of layers: x, lengths, resets and carries. Messages name the user's class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from carrywave.errors import UserError, WrongTensor, WrongType
from carrywave.kernels.carry import AnyCarries
from carrywave.kernels.cuda.casting import HALVES
from carrywave.kernels.layers import is_cast
from carrywave.kernels.lengths import for_each_lane, out_of_range
from carrywave.model.layer_stack import LayerStack

# One tensor for each part of the carry, of all layers, or only the tensor if the cell has one part; or such a tuple for each layer.
GivenCarry = Tensor | Sequence[Tensor] | Sequence[Sequence[Tensor]]
_SHORT = (torch.float32, *HALVES)  # dtypes that autocast converts between


def checked_input(layers: LayerStack, x: Tensor | None) -> Tensor:
    """Return x after checking its type, shape and dtype."""
    if not isinstance(x, Tensor):
        raise WrongType(f"{type(layers).__name__} got x as a {type(x).__name__}; pass a tensor [time, lane, {layers.input_size}]")
    if x.is_nested:
        raise WrongTensor(f"{type(layers).__name__} got a nested tensor; pass the padded one, x.to_padded_tensor(0.0), and lengths")
    if x.dim() not in (2, 3) or x.shape[-1] != layers.input_size:
        form = f"[lane, time, {layers.input_size}]" if layers.batch_first else f"[time, lane, {layers.input_size}]"
        raise WrongTensor(f"{type(layers).__name__} got x of shape {list(x.shape)}; pass {form} or [time, {layers.input_size}]")
    weight_dtype = layers.dtype
    if x.dtype != weight_dtype and not (x.dtype in _SHORT and weight_dtype in _SHORT and is_cast(x.device.type)):
        name, tokens = type(layers).__name__, not x.is_floating_point()
        remedy = f"use x.to({weight_dtype})" + ("; pass tokens through an embedding first" if tokens else f", or convert the {name}")
        raise UserError(f"{name} got x in {x.dtype}, but its weights are in {weight_dtype}; {remedy}")
    return x


def checked_lengths(lengths: Tensor | Sequence[int], steps: int, count: int, device: torch.device) -> Tensor:
    """Lengths [B] on a device; those that are on the host are checked against the number of steps."""
    lengths_B = for_each_lane(lengths, "lengths", count, torch.int64)
    if (extremes := out_of_range(lengths_B, steps)) is not None:
        raise UserError(f"lengths range from {extremes[0]} to {extremes[1]}; they must be between 0 and the {steps} steps of x")
    return lengths_B.to(device=device, dtype=torch.int64)


def checked_resets(module: nn.Module, resets: Tensor, like: Sequence[int], device: torch.device, *, lanes_first: bool = False) -> Tensor:
    """Resets [T, B] on a device, of which one must be given for each step of each lane, or of the only one."""
    resets = torch.as_tensor(resets)
    if list(resets.shape) != list(like) or resets.dtype != torch.bool:
        raise UserError(
            f"{type(module).__name__} got resets of shape {list(resets.shape)} in {resets.dtype}; pass true or false for each step of each "
            f"lane, {list(like)} in torch.bool"
        )
    resets = resets.to(device)
    return resets[:, None] if resets.dim() == 1 else resets.transpose(0, 1) if lanes_first else resets


def split_carry(layers: LayerStack, carry: GivenCarry, lanes: int, *, batched: bool = True) -> AnyCarries:
    """One carry per layer, checked, from torch's stacked form or from a sequence of per-layer carries."""
    names = layers.cell.parts
    each = f"({', '.join(names)}{',' * (len(names) == 1)})"
    carry = [carry] if isinstance(carry, Tensor) else carry
    given: list[tuple[Tensor, ...]]
    if len(carry) == len(names) and all(isinstance(part, Tensor) for part in carry):
        stacked = cast(Sequence[Tensor], carry)
        if len(set(layers.widths)) > 1:
            raise WrongTensor(f"layers of widths {list(layers.widths)} need one {each} each; pass a tuple of {layers.num_layers} of them")
        rows = layers.num_layers * layers.directions
        if any(part.shape[:1] != (rows,) for part in stacked):
            shown = " and ".join(str(list(part.shape)) for part in stacked)
            raise WrongTensor(f"carry has shapes {shown}; the first dimension must be {rows}, one for each layer and direction")
        given = list(zip(*(torch.split(part, layers.directions) for part in stacked), strict=True))
    else:
        given = [tuple(parts) for parts in carry]
    check_shapes(layers, given, lanes, range(layers.num_layers), batched=batched)
    return tuple(layers.cell.carry(*(part if batched else part[:, None] for part in parts)) for parts in given)


def check_shapes(layers: LayerStack, carries: Sequence[Sequence[Tensor]], lanes: int, numbers: range, *, batched: bool = True) -> None:
    """Check that there is a carry for each of these layers, and that its parts have the shapes for so many lanes."""
    names = layers.cell.parts
    each = f"({', '.join(names)}{',' * (len(names) == 1)})"
    if len(carries) != len(numbers):
        raise WrongTensor(f"expected {len(numbers)} carries, got {len(carries)}; pass one {each} for each layer")
    if (wrong := next((parts for parts in carries if len(parts) != len(names)), None)) is not None:
        raise WrongTensor(f"a layer's carry has {len(wrong)} parts; pass {each} for each layer")
    for layer, parts in zip(numbers, carries, strict=True):
        for (name, width), part in zip(layers.carry_widths(layer).items(), parts, strict=True):
            got, want = list(part.shape), [layers.directions, *([lanes] if batched else []), width]
            if got != want:
                raise WrongTensor(
                    f"carry {name} of layer {layer} has shape {got}, expected {want}; build a new one for these layers and lanes"
                )


def check_dtypes(layers: LayerStack, carries: AnyCarries, x: Tensor) -> None:
    """Check that a carry has the dtype of x; with half-precision x it may be float32, and under autocast they mix freely."""
    mixed = _SHORT if is_cast(x.device.type) else (torch.float32,) if x.dtype in HALVES else ()
    for part in (part for carry in carries for part in carry):
        if part.dtype != x.dtype and not (part.dtype in mixed and x.dtype in _SHORT):
            parts = f"{'both ' * (len(carries[0]) == 2)}{' and '.join(layers.cell.parts)}"
            raise WrongTensor(
                f"{type(layers).__name__} got a carry in {part.dtype}, but x in {x.dtype}; convert {parts}, as in h.to({x.dtype})"
            )


def either(layers: LayerStack, name: str, given: Any, other_name: str, other: Any) -> Any:
    """Return an argument that has two names; giving both is an error."""
    if given is not None and other is not None:
        raise UserError(f"{type(layers).__name__} got both {name} and {other_name}, two names of one argument; pass one of them")
    return other if given is None else given
