"""Checks what a user passes to a stack of layers: options, x, lengths, resets and carries. Messages name the user's class."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from carrywave.cells.cell import Cell
from carrywave.errors import UserError, WrongTensor, WrongType
from carrywave.kernels.carry import AnyCarries
from carrywave.kernels.cuda.casting import HALVES
from carrywave.kernels.layers import is_cast
from carrywave.kernels.lengths import for_each_lane, out_of_range

if TYPE_CHECKING:
    from carrywave.model.recurrent import Recurrent

# One tensor for each part of the carry, of all layers, or only the tensor if the cell has one part; or such a tuple for each layer.
GivenCarry = Tensor | Sequence[Tensor] | Sequence[Sequence[Tensor]]
_SHORT = (torch.float32, *HALVES)  # dtypes that autocast converts between


def checked_input(layers: Recurrent, x: Tensor | None) -> Tensor:
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


def split_carry(layers: Recurrent, carry: GivenCarry, lanes: int, *, batched: bool = True) -> AnyCarries:
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


def check_shapes(layers: Recurrent, carries: Sequence[Sequence[Tensor]], lanes: int, numbers: range, *, batched: bool = True) -> None:
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


def check_dtypes(layers: Recurrent, carries: AnyCarries, x: Tensor) -> None:
    """Check that a carry has the dtype of x; with half-precision x it may be float32, and under autocast they mix freely."""
    mixed = _SHORT if is_cast(x.device.type) else (torch.float32,) if x.dtype in HALVES else ()
    for part in (part for carry in carries for part in carry):
        if part.dtype != x.dtype and not (part.dtype in mixed and x.dtype in _SHORT):
            parts = f"{'both ' * (len(carries[0]) == 2)}{' and '.join(layers.cell.parts)}"
            raise WrongTensor(
                f"{type(layers).__name__} got a carry in {part.dtype}, but x in {x.dtype}; convert {parts}, as in h.to({x.dtype})"
            )


def check_options(layers: Recurrent, *, bias: bool, batch_first: bool, proj_size: int) -> None:
    """Refuse flags that are none, and a projection that the cell does not have."""
    name = type(layers).__name__
    if not hasattr(type(layers), "cell"):
        raise UserError(f"{name} names no cell; use cw.LSTM, or a subclass with cell = …")
    for option, flag in (("bias", bias), ("batch_first", batch_first)):
        if not isinstance(flag, bool):
            raise WrongType(f"{name} got {option}={flag!r}; pass True or False")
    if proj_size and not layers.cell.projects:
        raise UserError(f"{name} has no projection; remove proj_size={proj_size}")


def checked_sizes(
    input_size: int, hidden_size: int | Sequence[int], num_layers: int, proj_size: int, num_heads: int
) -> tuple[int, int | tuple[int, ...], tuple[int, ...], int, int]:
    """Input size, hidden size as given, the width of each layer, the projection and the heads: whole numbers that fit each other."""
    input_size, num_layers = whole(input_size=input_size, num_layers=num_layers)
    proj_size, num_heads = whole(proj_size=proj_size, num_heads=num_heads)
    if isinstance(hidden_size, Sequence):
        hidden_size = widths = tuple(width for each in hidden_size for width in whole(hidden_size=each))
    else:
        [hidden_size] = whole(hidden_size=hidden_size)
        widths = (hidden_size,) * num_layers
    if isinstance(hidden_size, tuple) and num_layers not in (1, len(widths)):
        raise UserError(f"hidden_size lists {len(widths)} widths for num_layers={num_layers}; pass one width for each layer")
    if input_size < 1 or not widths or min(widths) < 1:
        raise UserError(f"input_size={input_size}, hidden_size={hidden_size}, num_layers={num_layers} must all be at least 1")
    if proj_size < 0 or (proj_size and proj_size >= min(widths)):
        raise UserError(f"proj_size={proj_size} must be smaller than hidden_size={min(widths)}; 0 means no projection")
    if num_heads < 1 or any(width % num_heads for width in widths):
        raise UserError(f"num_heads={num_heads} must divide hidden_size={hidden_size}; each head has an equal share of the units")
    if num_heads > 1 and proj_size:
        raise UserError(f"proj_size={proj_size} would mix what num_heads={num_heads} keep apart; remove one of them")
    return input_size, hidden_size, widths, proj_size, num_heads


def check_shares(**shares: float) -> None:
    """Refuse a kind of dropout that would drop everything, or less than nothing."""
    for name, share in shares.items():
        if not 0.0 <= share < 1.0:
            raise UserError(f"{name}={share} must be at least 0 and below 1; 0 switches it off")


class _Asked:
    """Takes the place of the weights of a layer, and notes which of its methods a step calls."""

    def __init__(self, cell: Cell, hidden: int, projection: int) -> None:
        self.cell, self.hidden, self.projection = cell, hidden, projection
        self.calls: set[str] = set()

    def recurrent(self, h_BP: Tensor) -> Tensor:
        return h_BP.new_zeros(len(h_BP), self.cell.gates * self.hidden)

    def candidate(self, new_BH: Tensor) -> Tensor:
        self.calls.add("candidate")
        return new_BH

    def normed(self, c_BH: Tensor) -> Tensor:
        self.calls.add("normed")
        return c_BH

    def projected(self, h_BH: Tensor) -> Tensor:
        return h_BH[:, : self.projection] if self.projection else h_BH

    def named(self, name: str) -> Tensor:
        extra = self.cell.extra(self.hidden)[name]
        return torch.full(extra.shape, extra.value, device="cpu")


def check_step(cell: Cell, hidden: int, projection: int, *, recurrent_dropout: float, cell_norm: bool) -> None:
    """Refuse noise and norms that the cell's step has no place for: run it once, on zeros."""
    asked = _Asked(cell, hidden, projection)
    carry = cell.carry(*(torch.zeros(1, width, device="cpu") for width in cell.widths(hidden, projection)))
    with torch.no_grad():
        cell.step(torch.zeros(1, cell.gates * hidden, device="cpu"), carry, asked)
    if recurrent_dropout and "candidate" not in asked.calls:
        raise UserError(
            f"recurrent_dropout={recurrent_dropout}, but the step of the cell {cell.name} drops nothing; let it pass what it would add to "
            "its carry through weights.candidate"
        )
    if cell_norm and cell.memory != ("normed" in asked.calls):
        calls = "calls weights.normed, but has memory=False" if "normed" in asked.calls else "has memory=True, but calls no weights.normed"
        raise UserError(f"cell_norm=True, but the cell {cell.name} {calls}; change one of them")


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
            raise WrongType(f"{name}={size!r} must be a whole number") from None
    return tuple(operator.index(size) for size in sizes.values())
