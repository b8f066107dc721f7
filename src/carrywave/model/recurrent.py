"""`Recurrent`: layers of a cell, with lengths instead of packing, and an explicit carry.

`forward` is the public entry point, with torch's shapes; `run` is for trainers, with one carry per layer so that widths may differ. The way
from here to a kernel: `kernels.layers.run_layers`, then the table in `kernels.dispatch`.

Shapes: T time, B lane, I input, L layers, D directions, O output width of both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.nn.utils.weight_norm import WeightNorm

from carrywave.errors import UserError, WrongTensor
from carrywave.kernels import random
from carrywave.kernels.carry import AnyCarries, changed
from carrywave.kernels.layers import is_cast, run_layers
from carrywave.kernels.lengths import for_each_lane, packed_like
from carrywave.kernels.step_marks import CellNoise, StepMarks
from carrywave.kernels.weights import Layer
from carrywave.kernels.window import WindowChunk
from carrywave.model import arguments, as_torch
from carrywave.model.arguments import GivenCarry
from carrywave.model.layer_stack import LayerStack

# Hooks through which torch recomputes pruned and weight-normalised parameters: trainers, which bypass a module's hooks, call these.
CALLED_HOOKS = (BasePruningMethod, WeightNorm)


class Recurrent(LayerStack):
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
        given_x: Any = x if input is None else arguments.either(self, "x", x, "input", input)
        carry = carry if hx is None else arguments.either(self, "carry", carry, "hx", hx)
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
        sites: list[int] = []
        if self.dropout:
            sites = [random.site(f"{self.path}.l{layer}.dropout") for layer in layers if layer < self.num_layers - 1]
        noisy = bool(self.recurrent_dropout) or any(self.zoneout)
        if self.training and (sites or self.weight_drop or noisy):
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
            marks=None if resets is None and not noisy else self._marks(layers, resets, x_TBI, (key, lanes, start)),
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
