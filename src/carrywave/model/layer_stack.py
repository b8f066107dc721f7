"""`LayerStack`: the options and parameters of layers of a cell, under the names of torch's module, and the carry at a sequence's start.

`recurrent.py` runs them.

Shapes: B lane, I input, H hidden, G = gates · H, P output width (the projection, or H), D directions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from carrywave.cells.cell import Cell, Extra
from carrywave.errors import UserError, WrongType
from carrywave.kernels import random
from carrywave.kernels.carry import AnyCarries, changed
from carrywave.kernels.dispatch import Backends, backends_of
from carrywave.kernels.dropout import Coordinates, dropped
from carrywave.kernels.weights import Layer, LayerWeights

# Options that nn.LSTM does not have.
_MORE = ("locked", "weight_drop", "recurrent_dropout", "zoneout", "layer_norm", "cell_norm", "learned_carry", "num_heads", "kernel")
_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")  # in the order of `LayerWeights`


class LayerStack(nn.Module):
    """Layers of one cell, with all options of torch's modules, one width or a list of widths."""

    cell: ClassVar[Cell]
    backends: ClassVar[Backends]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hasattr(cls, "cell"):
            cls.backends = backends_of(cls.cell)

    def __init__(
        self,
        input_size: int,
        hidden_size: int | Sequence[int],
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        *,
        locked: bool = False,
        weight_drop: float = 0.0,
        recurrent_dropout: float = 0.0,
        zoneout: float | Sequence[float] = 0.0,
        layer_norm: bool = False,
        cell_norm: bool = False,
        learned_carry: bool = False,
        num_heads: int = 1,
        kernel: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_options(self, bias=bias, batch_first=batch_first, proj_size=proj_size)
        input_size, hidden_size, widths, proj_size, num_heads = _checked_sizes(input_size, hidden_size, num_layers, proj_size, num_heads)
        _check_shares(dropout=dropout, weight_drop=weight_drop, recurrent_dropout=recurrent_dropout)
        if recurrent_dropout or cell_norm:
            _check_step(self.cell, widths[0], proj_size, recurrent_dropout=recurrent_dropout, cell_norm=cell_norm)
        self.backends.check(kernel)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.widths = widths
        self.num_layers = len(widths)
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = dropout
        self.bidirectional = bidirectional
        self.proj_size = proj_size
        self.locked = locked
        self.weight_drop = weight_drop
        self.recurrent_dropout = recurrent_dropout
        self.zoneout = self.cell.zoneout(zoneout)
        self.layer_norm = layer_norm
        self.cell_norm = cell_norm
        self.learned_carry = learned_carry
        self.num_heads = num_heads
        self.kernel = kernel
        self.path = "lstm"  # prefix of the names of its random sites, whatever the cell; two stacks in one model need different ones
        self.weight_names: list[str] = []  # of the weights, in the order of torch's modules
        # Of each direction of each layer: the names of its weights as `LayerWeights` has them, where there are some, and of its extras.
        self._names: list[list[tuple[list[str | None], dict[str, str]]]] = []
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        for layer, hidden in enumerate(widths):
            inputs = self.input_size if layer == 0 else self.outputs(layer - 1)
            self._names.append([])
            for suffix in self._suffixes(layer):
                rows = self.cell.gates * hidden
                shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, inputs), "weight_hh": (rows, (proj_size or hidden) // num_heads)}
                if bias:
                    shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
                if proj_size:
                    shapes |= {"weight_hr": (proj_size, hidden)}
                further = self.further(layer)
                self._names[-1].append(
                    ([name + suffix if name in shapes else None for name in _NAMES], {name: name + suffix for name in further})
                )
                shapes |= {name: extra.shape for name, extra in further.items()}
                for name, shape in shapes.items():
                    self.weight_names.append(name + suffix)
                    self.register_parameter(name + suffix, nn.Parameter(torch.empty(shape, **make)))
            if layer_norm:
                self.add_module(f"norm_l{layer}", nn.LayerNorm(self.outputs(layer), **make))
            if learned_carry:
                for part in self.cell.free_parts:
                    shape = (self.directions, self.carry_widths(layer)[part])
                    self.register_parameter(f"carry_{part}_l{layer}", nn.Parameter(torch.zeros(shape, **make)))
        self.reset_parameters()

    @property
    def directions(self) -> int:
        """1, or 2 if bidirectional."""
        return 2 if self.bidirectional else 1

    @property
    def output_size(self) -> int:
        """Output width of the last layer."""
        return self.outputs(self.num_layers - 1)

    def outputs(self, layer: int) -> int:
        """Output width of a layer, both directions together."""
        return (self.proj_size or self.widths[layer]) * self.directions

    def carry_widths(self, layer: int) -> dict[str, int]:
        """The width of each part of a layer's carry, by name."""
        return dict(zip(self.cell.parts, self.cell.widths(self.widths[layer], self.proj_size), strict=True))

    @property
    def noisy(self) -> bool:
        """True if there is noise inside the cell."""
        return self.recurrent_dropout > 0 or any(self.zoneout)

    def further(self, layer: int) -> dict[str, Extra]:
        """The parameters of each direction of a layer besides its matrices and biases, by name."""
        return self.cell.further(self.widths[layer], self.cell_norm)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.any_parameter.dtype

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The weights of each layer and direction, as torch's modules list them."""
        return [list(weights.tensors()) for layer in range(self.num_layers) for weights in self._parameters_of(layer)]

    def flatten_parameters(self) -> None:
        """Do nothing: weights are laid out for a kernel when it runs. Exists for compatibility with torch's modules."""

    def reset_parameters(self) -> None:
        """Initialise weights as torch does, from its default generator. Trainers use `initialize`, which is keyed."""
        with torch.no_grad():
            for layer, hidden in enumerate(self.widths):
                bound = 1.0 / math.sqrt(hidden)
                for weights in self._parameters_of(layer):
                    for tensor in weights._replace(extra=None).tensors():
                        tensor.uniform_(-bound, bound)
                    for name, extra in self.further(layer).items():
                        weights.named(name).fill_(extra.value)

    def weights(self, layer: int, key: Tensor | None = None) -> Layer:
        """The weights of a layer; given a key, `weight_drop` drops recurrent ones by (row, column), the same for all chunks of a batch."""
        directions = self._parameters_of(layer)
        if key is None or not self.weight_drop:
            return directions
        kept = []
        for suffix, direction in zip(self._suffixes(layer), directions, strict=True):
            # Rows and columns take the place of lanes and units.
            coordinates = Coordinates(random.site(f"{self.path}.weight_hh{suffix}.drop"), self.weight_drop, locked=True)
            kept.append(direction._replace(w_hh=dropped(direction.w_hh[None], key, None, coordinates)[0]))
        return tuple(kept)

    def initial(
        self, lanes: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None, layers: range | None = None
    ) -> AnyCarries:
        """The carry at the start of a sequence: zero, or learned where its parts may have any values."""
        like = self.any_parameter
        carries = []
        for layer in range(self.num_layers) if layers is None else layers:
            parts = []
            for part, width in self.carry_widths(layer).items():
                shape = (self.directions, lanes, width)
                if self.learned_carry and part in self.cell.free_parts:
                    parts.append(getattr(self, f"carry_{part}_l{layer}")[:, None].expand(shape).to(dtype=dtype, device=device))
                else:
                    parts.append(torch.zeros(shape, dtype=dtype or like.dtype, device=device or like.device))
            carries.append(self.cell.carry(*parts))
        return tuple(carries)

    def reset(self, carries: AnyCarries, fresh_B: Tensor, layers: range | None = None) -> AnyCarries:
        """Replace the carries of fresh lanes with the initial ones."""
        first, fresh_B1 = carries[0][0], fresh_B[:, None]
        if not self.learned_carry:
            return tuple(self.cell.carry(*[part.masked_fill(fresh_B1, 0.0) for part in carry]) for carry in carries)
        starts = self.initial(first.shape[1], first.dtype, first.device, layers)

        def begun(old: Tensor, new: Tensor) -> Tensor:
            return torch.where(fresh_B1, new.to(old.dtype), old)

        return tuple(changed(carry, begun, start) for carry, start in zip(carries, starts, strict=True))

    def join(self, carries: AnyCarries) -> Any:
        """Torch's stacked form if all widths are equal (the tensor itself if the carry has one part), otherwise the carries unchanged."""
        if len(set(self.widths)) > 1:
            return carries
        stacked = self.cell.carry(*(torch.cat(parts) for parts in zip(*carries, strict=True)))
        return stacked if len(stacked) > 1 else stacked[0]

    def extra_repr(self) -> str:
        usual = {"num_layers": 1, "bias": True, "num_heads": 1, "kernel": "auto", "zoneout": (0.0,) * len(self.cell.parts)}
        parts = [f"{self.input_size}, {self.hidden_size}"]
        for name in ("proj_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", *_MORE):
            if getattr(self, name) != usual.get(name, False):
                parts.append(f"{name}={getattr(self, name)!r}")
        return ", ".join(parts)

    @property
    def any_parameter(self) -> Tensor:
        """A parameter to read dtype and device from. Not looked up by name: pruned or parametrized weights are no longer parameters."""
        parameter = next((each for each in self._parameters.values() if each is not None), None)
        return next(self.parameters()) if parameter is None else parameter

    def _suffixes(self, layer: int) -> tuple[str, ...]:
        return (f"_l{layer}", f"_l{layer}_reverse") if self.bidirectional else (f"_l{layer}",)

    def _parameters_of(self, layer: int) -> Layer:
        found = []
        for names, more in self._names[layer]:
            extra = {name: getattr(self, own) for name, own in more.items()} if more else None
            found.append(LayerWeights._make([*(None if own is None else getattr(self, own) for own in names), extra, None]))
        return tuple(found)


def _check_options(layers: nn.Module, *, bias: bool, batch_first: bool, proj_size: int) -> None:
    """Refuse flags that are none, and a projection that the cell does not have."""
    name = type(layers).__name__
    cell: Cell | None = getattr(layers, "cell", None)
    if cell is None:
        raise UserError(f"{name} names no cell; use cw.LSTM, or a subclass with cell = …")
    for option, flag in (("bias", bias), ("batch_first", batch_first)):
        if not isinstance(flag, bool):
            raise WrongType(f"{name} got {option}={flag!r}; pass True or False")
    if proj_size and not cell.projects:
        raise UserError(f"{name} has no projection; remove proj_size={proj_size}")


def _checked_sizes(
    input_size: int, hidden_size: int | Sequence[int], num_layers: int, proj_size: int, num_heads: int
) -> tuple[int, int | tuple[int, ...], tuple[int, ...], int, int]:
    """Input size, hidden size as given, the width of each layer, the projection and the heads: whole numbers that fit each other."""
    input_size, num_layers = _whole(input_size=input_size, num_layers=num_layers)
    proj_size, num_heads = _whole(proj_size=proj_size, num_heads=num_heads)
    if isinstance(hidden_size, Sequence):
        hidden_size = widths = tuple(width for each in hidden_size for width in _whole(hidden_size=each))
    else:
        [hidden_size] = _whole(hidden_size=hidden_size)
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


def _check_shares(**shares: float) -> None:
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


def _check_step(cell: Cell, hidden: int, projection: int, *, recurrent_dropout: float, cell_norm: bool) -> None:
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


def _whole(**sizes: int) -> tuple[int, ...]:
    """Convert sizes to Python ints, from any integer type (numpy scalars, one-element tensors)."""
    for name, size in sizes.items():
        try:
            operator.index(size)
        except TypeError:
            raise WrongType(f"{name}={size!r} must be a whole number") from None
    return tuple(operator.index(size) for size in sizes.values())
