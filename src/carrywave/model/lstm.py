"""`LSTM`: a stacked LSTM with torch.nn.LSTM's parameters and state_dict, lengths instead of packing, and an explicit carry.

`forward` is the public entry point, with nn.LSTM's shapes; `run`, `initial` and `reset` are for trainers, with one `Carry` per layer
so that widths may differ.

Shapes: T time, B lane, I input, H hidden, G = 4H, P output width (the projection, or H), L layers, D directions, O = P·D.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.rnn import PackedSequence
from torch.nn.utils.weight_norm import WeightNorm

from carrywave.errors import UserError
from carrywave.kernels import random
from carrywave.kernels.carry import Carries, Carry
from carrywave.kernels.cuda.casting import HALVES
from carrywave.kernels.dispatch import begun, check
from carrywave.kernels.dropout import Coordinates, dropped
from carrywave.kernels.lengths import one_a_lane, out_of_range, packed_like, padded
from carrywave.kernels.lstm import is_cast, lstm
from carrywave.kernels.weights import Layer, LayerWeights
from carrywave.kernels.window import WindowChunk

AnyCarry = tuple[Tensor, Tensor] | Carry | Sequence[Carry] | Sequence[tuple[Tensor, Tensor]]
_SHORT = (torch.float32, *HALVES)  # dtypes that autocast converts between
_MORE = ("locked", "weight_drop", "layer_norm", "learned_carry", "kernel")  # options that nn.LSTM does not have
_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")  # in the order of `LayerWeights`


class LSTM(nn.Module):
    """Stacked LSTM with all of nn.LSTM's options, one width or a list of widths, and several kinds of keyed dropout.

    >>> import torch
    >>> import carrywave as cw
    >>> lstm = cw.LSTM(input_size=3, hidden_size=8, num_layers=2)
    >>> y, carry = lstm(torch.zeros(5, 4, 3), lengths=[5, 5, 3, 2])  # instead of packing
    >>> y, carry = lstm(torch.zeros(5, 4, 3), carry)  # and on from there
    >>> torch.nn.LSTM(3, 8, num_layers=2).load_state_dict(lstm.state_dict())
    <All keys matched successfully>
    """

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
        layer_norm: bool = False,
        learned_carry: bool = False,
        kernel: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        input_size, num_layers, proj_size = _whole(input_size=input_size, num_layers=num_layers, proj_size=proj_size)
        if isinstance(hidden_size, Sequence):
            hidden_size = widths = tuple(width for each in hidden_size for width in _whole(hidden_size=each))
        else:
            [hidden_size] = _whole(hidden_size=hidden_size)
            widths = (hidden_size,) * num_layers
        if isinstance(hidden_size, tuple) and num_layers not in (1, len(widths)):
            raise UserError(f"hidden_size lists {len(widths)} widths for num_layers={num_layers}; pass one width for each layer")
        if input_size < 1 or not widths or min(widths) < 1:
            raise UserError(f"input_size={input_size}, hidden_size={hidden_size}, num_layers={num_layers} must all be at least 1")
        for name, share in (("dropout", dropout), ("weight_drop", weight_drop)):
            if not 0.0 <= share < 1.0:
                raise UserError(f"{name}={share} must be at least 0 and below 1; 0 switches it off")
        if proj_size < 0 or (proj_size and proj_size >= min(widths)):
            raise UserError(f"proj_size={proj_size} must be smaller than hidden_size={min(widths)}; 0 means no projection")
        check(kernel)
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
        self.layer_norm = layer_norm
        self.learned_carry = learned_carry
        self.kernel = kernel
        self.path = "lstm"  # prefix of the names of its random sites; two LSTMs in one model need different ones
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        for layer, hidden in enumerate(widths):
            inputs = self.input_size if layer == 0 else self.outputs(layer - 1)
            for suffix in self._suffixes(layer):
                shapes: dict[str, tuple[int, ...]] = {"weight_ih": (4 * hidden, inputs), "weight_hh": (4 * hidden, proj_size or hidden)}
                if bias:
                    shapes |= {"bias_ih": (4 * hidden,), "bias_hh": (4 * hidden,)}
                if proj_size:
                    shapes |= {"weight_hr": (proj_size, hidden)}
                for name, shape in shapes.items():
                    self.register_parameter(name + suffix, nn.Parameter(torch.empty(shape, **make)))
            if layer_norm:
                self.add_module(f"norm_l{layer}", nn.LayerNorm(self.outputs(layer), **make))
            if learned_carry:
                self.register_parameter(f"carry_h_l{layer}", nn.Parameter(torch.zeros(self.directions, proj_size or hidden, **make)))
                self.register_parameter(f"carry_c_l{layer}", nn.Parameter(torch.zeros(self.directions, hidden, **make)))
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

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self._any_parameter.dtype

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The weights of each layer and direction, as nn.LSTM lists them."""
        each = (weights for layer in range(self.num_layers) for weights in self._parameters_of(layer))
        return [[tensor for tensor in weights if tensor is not None] for weights in each]

    def flatten_parameters(self) -> None:
        """Do nothing: weights are laid out for a kernel when it runs. Exists for compatibility with nn.LSTM."""

    def reset_parameters(self) -> None:
        """Initialise weights as nn.LSTM does, from torch's default generator. Trainers use `initialize`, which is keyed."""
        with torch.no_grad():
            for layer, hidden in enumerate(self.widths):
                bound = 1.0 / math.sqrt(hidden)
                for weights in self._parameters_of(layer):
                    for tensor in weights:
                        if tensor is not None:
                            tensor.uniform_(-bound, bound)

    def forward(
        self,
        x: Tensor | PackedSequence | None = None,
        carry: AnyCarry | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        key: Tensor | None = None,
        *,
        lanes: Tensor | Sequence[int] | None = None,
        start: int = 0,
        full: bool = False,
        fresh: Tensor | Sequence[bool] | None = None,
        input: Tensor | PackedSequence | None = None,
        hx: AnyCarry | None = None,
    ) -> tuple[Tensor, Carry | Carries]:
        """Outputs and the carry at each lane's last real step, in nn.LSTM's shapes; if widths differ, one carry per layer.

        x is [T, B, I], [B, T, I] with batch_first, or [T, I] unbatched. `fresh` [B]: lanes that start from the initial carry instead of
        the given one. Without a key, dropout in training uses the scope's, or one drawn from torch's default generator.
        `input` and `hx` are nn.LSTM's names for x and carry. Outputs of a PackedSequence are packed like it.
        """
        given_x, carry = _either("x", x, "input", input), _either("carry", carry, "hx", hx)
        packed = given_x if isinstance(given_x, PackedSequence) else None
        if packed is not None:
            given_x, lengths = padded(packed, lengths)
        x, lanes_first = self._checked(given_x), self.batch_first and packed is None
        batched = x.dim() == 3
        x_TBI = x[:, None] if not batched else x.transpose(0, 1) if lanes_first else x
        steps, count = x_TBI.shape[:2]
        if steps == 0:
            raise UserError(f"LSTM got x of shape {list(x.shape)}; x must have at least one step")
        lengths_B = None if lengths is None else self.checked_lengths(lengths, steps, count, x.device)
        fresh_B = None if fresh is None else one_a_lane(fresh, "fresh", count, torch.bool).to(x.device)
        lanes_B = None if lanes is None else one_a_lane(lanes, "lanes", count, torch.int64).to(x.device)
        given = self.initial(count, x.dtype, x.device) if carry is None else self.split(carry, count, batched=batched)
        if carry is not None:
            _check_dtypes(given, x)
        y_TBO, ends = self.run(x_TBI, given, lengths=lengths_B, fresh=fresh_B, lanes=lanes_B, start=start, key=key, full=full)
        if packed is not None:
            return cast(Tensor, packed_like(y_TBO, torch.as_tensor(lengths), packed)), self.join(ends)
        y = y_TBO[:, 0] if not batched else y_TBO.transpose(0, 1) if lanes_first else y_TBO
        ends = ends if batched else tuple(Carry(end.h[:, 0], end.c[:, 0]) for end in ends)
        return y, self.join(ends)

    def run(
        self,
        x_TBI: Tensor,
        carries: Carries,
        *,
        lengths: Tensor | None = None,
        fresh: Tensor | None = None,
        lanes: Tensor | None = None,
        start: int = 0,
        key: Tensor | None = None,
        full: bool = False,
        layers: range | None = None,
        clean: bool = False,
        chunk: WindowChunk | None = None,
    ) -> tuple[Tensor, Carries]:
        """Run some layers (all by default), time first, from one carry per layer. See `kernels.lstm.lstm`."""
        layers = range(self.num_layers) if layers is None else layers
        # Trainers bypass the module's hooks, through which torch recomputes pruned and weight-normalised parameters.
        for hook in self._forward_pre_hooks.values():
            if isinstance(hook, (BasePruningMethod, WeightNorm)):
                hook(self, ())
        if fresh is not None:
            carries = self.reset(carries, fresh, layers)
        sites = [random.site(f"{self.path}.l{layer}.dropout") for layer in layers if layer < self.num_layers - 1]
        if self.training and (self.weight_drop or (self.dropout and sites)):
            scope = random.current_scope()
            if key is None and scope is not None:
                key, lanes, start = scope.key_of(self.path), scope.lanes if lanes is None else lanes, scope.start
            key = random.draw().to(x_TBI.device) if key is None else key
        else:
            key = None
        norms = [getattr(self, f"norm_l{layer}") for layer in layers] if self.layer_norm else None
        return lstm(
            x_TBI,
            carries,
            self._weights_of(layers, key, chunk),
            lengths,
            full=full,
            dropout=self.dropout,
            locked=self.locked,
            norms=norms,
            key=key,
            lanes=lanes,
            start=start,
            sites=sites,
            backend=self.kernel,
            clean=clean,
            chunk=chunk,
        )

    def _weights_of(self, layers: range, key: Tensor | None, chunk: WindowChunk | None) -> list[Layer]:
        """The weights of some layers, for a chunk. A backend that has begun with the window's first chunk keeps those it was given then."""
        plain = [self._parameters_of(layer) for layer in layers]
        if key is None or not self.weight_drop or (chunk is not None and chunk.index > 0 and begun(chunk, plain)):
            return plain
        found = [self.weights(layer, key) for layer in layers]
        if chunk is not None and chunk.index == 0:
            of_both = zip((each for layer in plain for each in layer), (each for layer in found for each in layer), strict=True)
            chunk.window.same += [own.w_hh for given, own in of_both if isinstance(given.w_hh, nn.Parameter)]
        return found

    def weights(self, layer: int, key: Tensor | None = None) -> Layer:
        """The weights of a layer; given a key, `weight_drop` drops recurrent ones by (row, column), the same for all chunks of a batch."""
        directions = self._parameters_of(layer)
        if key is None or not self.weight_drop:
            return directions
        kept = []
        for suffix, direction in zip(self._suffixes(layer), directions, strict=True):
            # Rows and columns take the place of lanes and units.
            place = Coordinates(random.site(f"{self.path}.weight_hh{suffix}.drop"), self.weight_drop, locked=True)
            kept.append(direction._replace(w_hh=dropped(direction.w_hh[None], key, None, place)[0]))
        return tuple(kept)

    def initial(
        self, lanes: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None, layers: range | None = None
    ) -> Carries:
        """The carry at the start of a sequence: zero, or learned."""
        like = self._any_parameter
        carries = []
        for layer in range(self.num_layers) if layers is None else layers:
            shapes = (self.directions, lanes, self.proj_size or self.widths[layer]), (self.directions, lanes, self.widths[layer])
            if self.learned_carry:
                learned = (getattr(self, f"carry_{part}_l{layer}") for part in "hc")
                h, c = (each[:, None].expand(shape).to(dtype=dtype, device=device) for each, shape in zip(learned, shapes, strict=True))
            else:
                h, c = (torch.zeros(shape, dtype=dtype or like.dtype, device=device or like.device) for shape in shapes)
            carries.append(Carry(h, c))
        return tuple(carries)

    def reset(self, carries: Carries, fresh_B: Tensor, layers: range | None = None) -> Carries:
        """Replace the carries of fresh lanes with the initial ones."""
        first = carries[0].h
        fresh_B1 = fresh_B[:, None]
        starts = self.initial(first.shape[1], first.dtype, first.device, layers)
        return tuple(
            Carry(torch.where(fresh_B1, begin.h, carry.h), torch.where(fresh_B1, begin.c.to(carry.c.dtype), carry.c))
            for begin, carry in zip(starts, carries, strict=True)
        )

    def split(self, carry: AnyCarry, lanes: int, *, batched: bool = True) -> Carries:
        """One carry per layer, checked, from nn.LSTM's stacked pair or from a sequence of per-layer carries."""
        if len(carry) == 2 and all(isinstance(part, Tensor) for part in carry):
            stacked = cast("tuple[Tensor, Tensor]", carry)
            if len(set(self.widths)) > 1:
                raise UserError(f"layers of widths {list(self.widths)} need one (h, c) each; pass a tuple of {self.num_layers} pairs")
            rows = self.num_layers * self.directions
            if any(part.shape[:1] != (rows,) for part in stacked):
                shown = " and ".join(str(list(part.shape)) for part in stacked)
                raise UserError(f"carry has shapes {shown}; the first dimension of both must be {rows}, one for each layer and direction")
            pairs = list(zip(*(torch.split(part, self.directions) for part in stacked), strict=True))
        else:
            pairs = [(h, c) for h, c in cast("Sequence[tuple[Tensor, Tensor]]", carry)]
        if len(pairs) != self.num_layers:
            raise UserError(f"expected {self.num_layers} carries, got {len(pairs)}; pass one (h, c) for each layer")
        carries = tuple(Carry(h, c) if batched else Carry(h[:, None], c[:, None]) for h, c in pairs)
        for layer, (each, width) in enumerate(zip(carries, self.widths, strict=True)):
            for name, part, last in (("h", each.h, self.proj_size or width), ("c", each.c, width)):
                if part.shape != (self.directions, lanes, last):
                    got, want = list(part.shape), [self.directions, lanes, last]
                    raise UserError(
                        f"carry {name} of layer {layer} has shape {got}, expected {want}; build a new one for these layers and lanes"
                    )
        return carries

    def join(self, carries: Carries) -> Carry | Carries:
        """nn.LSTM's stacked pair if all widths are equal, otherwise the carries unchanged."""
        if len(set(self.widths)) > 1:
            return carries
        return Carry(torch.cat([carry.h for carry in carries]), torch.cat([carry.c for carry in carries]))

    def extra_repr(self) -> str:
        usual = {"num_layers": 1, "bias": True, "kernel": "auto"}
        parts = [f"{self.input_size}, {self.hidden_size}"]
        for name in ("proj_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", *_MORE):
            if getattr(self, name) != usual.get(name, False):
                parts.append(f"{name}={getattr(self, name)!r}")
        return ", ".join(parts)

    @property
    def _any_parameter(self) -> Tensor:
        """A parameter to read dtype and device from. Not looked up by name: pruned or parametrized weights are no longer parameters."""
        own = next((each for each in self._parameters.values() if each is not None), None)
        return next(self.parameters()) if own is None else own

    def _suffixes(self, layer: int) -> tuple[str, ...]:
        return (f"_l{layer}", f"_l{layer}_reverse")[: self.directions]

    def _parameters_of(self, layer: int) -> Layer:
        return tuple(LayerWeights(*[getattr(self, name + suffix, None) for name in _NAMES]) for suffix in self._suffixes(layer))  # type: ignore[arg-type]

    def _checked(self, x: Tensor | None) -> Tensor:
        """Return x after checking its type, shape and dtype."""
        if not isinstance(x, Tensor):
            raise UserError(f"LSTM got x as a {type(x).__name__}; pass a tensor [time, lane, {self.input_size}]")
        if x.is_nested:
            raise UserError("LSTM got a nested tensor; pass the padded one, x.to_padded_tensor(0.0), and lengths")
        if x.dim() not in (2, 3) or x.shape[-1] != self.input_size:
            form = f"[lane, time, {self.input_size}]" if self.batch_first else f"[time, lane, {self.input_size}]"
            raise UserError(f"LSTM got x of shape {list(x.shape)}; pass {form} or [time, {self.input_size}]")
        own = self.dtype
        if x.dtype != own and not (x.dtype in _SHORT and own in _SHORT and is_cast(x.device.type)):
            remedy = f"use x.to({own})" + (", or convert the LSTM" if x.is_floating_point() else "; pass tokens through an embedding first")
            raise UserError(f"LSTM got x in {x.dtype}, but its weights are in {own}; {remedy}")
        return x

    def checked_lengths(self, lengths: Tensor | Sequence[int], steps: int, count: int, device: torch.device) -> Tensor:
        """Lengths [B] on a device; those that are on the host are checked against the number of steps."""
        lengths_B = one_a_lane(lengths, "lengths", count, torch.int64)
        if (found := out_of_range(lengths_B, steps)) is not None:
            raise UserError(f"lengths range from {found[0]} to {found[1]}; they must be between 0 and the {steps} steps of x")
        return lengths_B.to(device=device, dtype=torch.int64)


def _check_dtypes(carries: Carries, x: Tensor) -> None:
    """Check that a carry has the dtype of x; with half-precision x it may be float32, and under autocast they mix freely."""
    mixed = _SHORT if is_cast(x.device.type) else (torch.float32,) if x.dtype in HALVES else ()
    for part in (part for carry in carries for part in carry):
        if part.dtype != x.dtype and not (part.dtype in mixed and x.dtype in _SHORT):
            raise UserError(f"LSTM got a carry in {part.dtype}, but x in {x.dtype}; convert both h and c, as in h.to({x.dtype})")


def _whole(**sizes: int) -> tuple[int, ...]:
    """Convert sizes to Python ints, from any integer type (numpy scalars, one-element tensors)."""
    for name, size in sizes.items():
        try:
            operator.index(size)
        except TypeError:
            raise UserError(f"{name}={size!r} must be a whole number") from None
    return tuple(operator.index(size) for size in sizes.values())


def _either(name: str, given: Any, other_name: str, other: Any) -> Any:
    """Return an argument that has two names; giving both is an error."""
    if given is not None and other is not None:
        raise UserError(f"LSTM got both {name} and {other_name}, two names of one argument; pass one of them")
    return other if given is None else given
