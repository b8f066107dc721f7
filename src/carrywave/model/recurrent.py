"""`Recurrent`: layers of a cell, with the parameters and state_dict of torch's module of the same name, lengths instead of packing, and an
explicit carry.

`forward` is the public entry point, with torch's shapes; `run`, `initial` and `reset` are for trainers, with one carry per layer so that
widths may differ.

Shapes: T time, B lane, I input, H hidden, G = gates · H, P output width (the projection, or H), L layers, D directions, O = P·D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.nn.utils.weight_norm import WeightNorm

from carrywave.cells.cell import Cell, Extra
from carrywave.errors import UserError, WrongTensor
from carrywave.kernels import random
from carrywave.kernels.carry import AnyCarries, changed
from carrywave.kernels.dispatch import Backends, backends_of
from carrywave.kernels.dropout import Coordinates, dropped
from carrywave.kernels.layers import is_cast, run_layers
from carrywave.kernels.lengths import for_each_lane, packed_like
from carrywave.kernels.step_marks import CellNoise, StepMarks
from carrywave.kernels.weights import Layer, LayerWeights
from carrywave.kernels.window import WindowChunk
from carrywave.model import arguments, as_torch
from carrywave.model.arguments import GivenCarry

# Options that nn.LSTM does not have.
_MORE = ("locked", "weight_drop", "recurrent_dropout", "zoneout", "layer_norm", "cell_norm", "learned_carry", "num_heads", "kernel")
# Hooks through which torch recomputes pruned and weight-normalised parameters: trainers, which bypass a module's hooks, call these.
CALLED_HOOKS = (BasePruningMethod, WeightNorm)
_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")  # in the order of `LayerWeights`


class Recurrent(nn.Module):
    """Layers of one cell, with all options of torch's modules, one width or a list of widths, and several kinds of keyed dropout.

    A subclass names its cell: `cw.LSTM` is one. So is this, of a cell that keeps a share of its output from step to step:

    >>> from typing import NamedTuple
    >>> import torch
    >>> import carrywave as cw
    >>> class Kept(NamedTuple):
    ...     h: torch.Tensor
    >>> def step(gates, carry, weights):
    ...     return (0.9 * carry[0] + 0.1 * (gates + weights.recurrent(carry[0])).tanh(),)
    >>> class Leaky(cw.Recurrent):
    ...     cell = cw.Cell("leaky", gates=1, carry=Kept, step=step)
    >>> y, h = Leaky(input_size=3, hidden_size=8, bidirectional=True)(torch.zeros(5, 4, 3), lengths=[5, 5, 3, 2])
    >>> tuple(y.shape), tuple(h.shape)
    ((5, 4, 16), (2, 4, 8))
    """

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
        arguments.check_options(self, bias=bias, batch_first=batch_first, proj_size=proj_size)
        input_size, hidden_size, widths, proj_size, num_heads = arguments.checked_sizes(
            input_size, hidden_size, num_layers, proj_size, num_heads
        )
        arguments.check_shares(dropout=dropout, weight_drop=weight_drop, recurrent_dropout=recurrent_dropout)
        if recurrent_dropout or cell_norm:
            arguments.check_step(self.cell, widths[0], proj_size, recurrent_dropout=recurrent_dropout, cell_norm=cell_norm)
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
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        for layer, hidden in enumerate(widths):
            inputs = self.input_size if layer == 0 else self.outputs(layer - 1)
            for suffix in self._suffixes(layer):
                rows = self.cell.gates * hidden
                shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, inputs), "weight_hh": (rows, (proj_size or hidden) // num_heads)}
                if bias:
                    shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
                if proj_size:
                    shapes |= {"weight_hr": (proj_size, hidden)}
                shapes |= {name: extra.shape for name, extra in self.further(layer).items()}
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
        return self._any_parameter.dtype

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

    def forward(
        self,
        x: Tensor | PackedSequence | None = None,
        carry: GivenCarry | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        key: Tensor | None = None,
        *,
        lanes: Tensor | Sequence[int] | None = None,
        start: int = 0,
        full: bool = False,
        fresh: Tensor | Sequence[bool] | None = None,
        resets: Tensor | None = None,
        input: Tensor | PackedSequence | None = None,
        hx: GivenCarry | None = None,
    ) -> tuple[Tensor, Any]:
        """Outputs and the carry at each lane's last real step, in torch's shapes; if widths differ, one carry per layer.

        x is [T, B, I], [B, T, I] with batch_first, or [T, I] unbatched. `fresh` [B]: lanes that start from the initial carry instead of
        the given one. `resets`, true or false for each step of each lane, in the layout of x: a new sequence starts with this step, from
        the initial carry (and the reverse direction ends there). Without a key, dropout in training uses the scope's, or one drawn from
        torch's default generator. `input` and `hx` are torch's names for x and carry. Outputs of a PackedSequence are packed like it.
        """
        named: dict[str, Any] = {"lengths": lengths, "key": key, "lanes": lanes, "start": start}
        named |= {"full": full, "fresh": fresh, "resets": resets}
        if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
            # The compiled program breaks here, as at torch's modules: inside it, torch's functions would become a loop over all steps.
            eager = torch.compiler.disable(Recurrent.forward)  # type: ignore[no-untyped-call]
            return cast(tuple[Tensor, Any], eager(self, x, carry, **named, input=input, hx=hx))
        given_x, carry = arguments.either(self, "x", x, "input", input), arguments.either(self, "carry", carry, "hx", hx)
        if isinstance(given_x, Proxy):
            return as_torch.recorded(self, given_x, carry, **named)
        packed = given_x if isinstance(given_x, PackedSequence) else None
        if packed is not None:
            if lengths is not None:
                raise UserError(f"{type(self).__name__} got a PackedSequence, which has its own lengths; remove lengths")
            given_x, lengths = pad_packed_sequence(packed)
        x, lanes_first = arguments.checked_input(self, given_x), self.batch_first and packed is None
        batched = x.dim() == 3
        x_TBI = x[:, None] if not batched else x.transpose(0, 1) if lanes_first else x
        steps, count = x_TBI.shape[:2]
        if steps == 0:
            raise WrongTensor(f"{type(self).__name__} got x of shape {list(x.shape)}; x must have at least one step")
        alone = lengths is None and resets is None and fresh is None and lanes is None
        if (found := as_torch.whole_stack(self, x_TBI, carry, batched=batched) if alone else None) is not None:
            return found[0][:, 0] if not batched else found[0].transpose(0, 1) if lanes_first else found[0], found[1]
        lengths_B = None if lengths is None else arguments.checked_lengths(lengths, steps, count, x.device)
        resets_TB = None if resets is None else arguments.checked_resets(self, resets, x.shape[:-1], x.device, lanes_first=lanes_first)
        fresh_B = None if fresh is None else for_each_lane(fresh, "fresh", count, torch.bool).to(x.device)
        lanes_B = None if lanes is None else for_each_lane(lanes, "lanes", count, torch.int64).to(x.device)
        given = self.initial(count, x.dtype, x.device) if carry is None else arguments.split_carry(self, carry, count, batched=batched)
        if carry is not None:
            arguments.check_dtypes(self, given, x)
        of_lanes: dict[str, Any] = {"lengths": lengths_B, "fresh": fresh_B, "resets": resets_TB, "lanes": lanes_B}
        y_TBO, ends = self.run(x_TBI, given, **of_lanes, start=start, key=key, full=full)
        if is_cast(x.device.type):
            y_TBO, ends = as_torch.as_cast(self, y_TBO, ends, given)
        if packed is not None:
            return cast(Tensor, packed_like(y_TBO, torch.as_tensor(lengths), packed)), self.join(ends)
        y = y_TBO[:, 0] if not batched else y_TBO.transpose(0, 1) if lanes_first else y_TBO
        ends = ends if batched else tuple(changed(end, lambda part: part[:, 0]) for end in ends)
        return y, self.join(ends)

    def run(
        self,
        x_TBI: Tensor,
        carries: AnyCarries,
        *,
        lengths: Tensor | None = None,
        fresh: Tensor | None = None,
        resets: Tensor | None = None,
        lanes: Tensor | None = None,
        start: int = 0,
        key: Tensor | None = None,
        full: bool = False,
        layers: range | None = None,
        clean: bool = False,
        chunk: WindowChunk | None = None,
    ) -> tuple[Tensor, AnyCarries]:
        """Run some layers (all by default), time first, from one carry per layer. See `kernels.layers.run_layers`."""
        layers = range(self.num_layers) if layers is None else layers
        for hook in self._forward_pre_hooks.values():
            if isinstance(hook, CALLED_HOOKS):
                hook(self, ())
        if fresh is not None:
            carries = self.reset(carries, fresh, layers)
        sites = [random.site(f"{self.path}.l{layer}.dropout") for layer in layers if layer < self.num_layers - 1]
        if self.training and (self.weight_drop or (self.dropout and sites) or self.noisy):
            scope = random.current_scope()
            if key is None and scope is not None:
                key, lanes, start = scope.key_of(self.path), scope.lanes if lanes is None else lanes, scope.start
            key = random.draw().to(x_TBI.device) if key is None else key
        else:
            key = None
        norms = [getattr(self, f"norm_l{layer}") for layer in layers] if self.layer_norm else None
        return run_layers(
            x_TBI,
            carries,
            self._weights_of(layers, key, chunk),
            lengths,
            backends=self.backends,
            full=full,
            dropout=self.dropout,
            locked=self.locked,
            norms=norms,
            marks=self._marks(layers, resets, x_TBI, (key, lanes, start)),
            key=key,
            lanes=lanes,
            start=start,
            sites=sites,
            backend=self.kernel,
            clean=clean,
            chunk=chunk,
        )

    def _marks(
        self, layers: range, resets: Tensor | None, like: Tensor, drawn: tuple[Tensor | None, Tensor | None, int]
    ) -> list[StepMarks] | None:
        """What happens to the carry of each layer at its steps; `drawn`: the key, the lanes and the time of the first step."""
        noisy = any(self.zoneout) or (self.recurrent_dropout and drawn[0] is not None)
        if resets is None and not noisy:
            return None
        learned = resets is not None and self.learned_carry
        starts = self.initial(1, like.dtype, like.device, layers) if learned else [None] * len(layers)
        sites = [tuple(self.path + suffix for suffix in self._suffixes(layer)) for layer in layers]
        noises = [CellNoise(self.recurrent_dropout, self.zoneout, each, self.locked, *drawn) if noisy else None for each in sites]
        return [StepMarks(resets, start, noise) for start, noise in zip(starts, noises, strict=True)]

    def _weights_of(self, layers: range, key: Tensor | None, chunk: WindowChunk | None) -> list[Layer]:
        """The weights of some layers, for a chunk. A backend that has begun with the window's first chunk keeps those it was given then."""
        plain = [self._parameters_of(layer) for layer in layers]
        if key is None or not self.weight_drop or (chunk is not None and chunk.index > 0 and self.backends.begun(chunk, plain)):
            return plain
        dropped_layers = [self.weights(layer, key) for layer in layers]
        if chunk is not None and chunk.index == 0:
            of_both = zip((each for layer in plain for each in layer), (each for layer in dropped_layers for each in layer), strict=True)
            chunk.window.same += [dropped_weights.w_hh for given, dropped_weights in of_both if isinstance(given.w_hh, nn.Parameter)]
        return dropped_layers

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
        like = self._any_parameter
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
        first = carries[0][0]
        fresh_B1 = fresh_B[:, None]
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
    def _any_parameter(self) -> Tensor:
        """A parameter to read dtype and device from. Not looked up by name: pruned or parametrized weights are no longer parameters."""
        parameter = next((each for each in self._parameters.values() if each is not None), None)
        return next(self.parameters()) if parameter is None else parameter

    def _suffixes(self, layer: int) -> tuple[str, ...]:
        return (f"_l{layer}", f"_l{layer}_reverse")[: self.directions]

    def _parameters_of(self, layer: int) -> Layer:
        found = []
        for suffix in self._suffixes(layer):
            extra = {name: getattr(self, name + suffix) for name in self.further(layer)}
            found.append(LayerWeights._make([*(getattr(self, name + suffix, None) for name in _NAMES), extra or None, None]))
        return tuple(found)
