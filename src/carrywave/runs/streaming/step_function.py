"""`StepFunction`: one step of a model for many clients at once, as `out, state = step(x, state)`, without what only training needs.

Each layer computes its cell's definition, with weights that are looked up once. What comes out is what the model computes over a whole
sequence, up to rounding.

Shapes: B client, W width of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from carrywave.errors import UserError
from carrywave.kernels.reference import Rest, step
from carrywave.model.model import Model


class StepFunction:
    """The state is a list of tensors [B, …]: the parts of each layer's carry, then what a pooled head has accumulated."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, Model):
            raise UserError("a module in one piece has no carry to keep between steps; train cw.Model(encoder, lstm, head) instead")
        for whole, what, remedy in (
            (model.has_front, "a front reads over time", "set model.front=none"),
            (model.lstm.bidirectional, "bidirectional layers read the end of a sequence first", "set model.bidirectional=false"),
            (model.whole_head, f"the head {type(model.head).__name__} reads whole sequences", "use one that reads single steps, or pools"),
        ):
            if whole:
                raise UserError(
                    f"a stepper gives its answer before the sequence ends, but {what}; {remedy} and train again, or use predict"
                )
        if not model.has_output:
            raise UserError(f"head {type(model.head).__name__} has no forward method, so it cannot predict; add one")
        self.encoder, self.head, self.pooled = model.encoder, model.head, model.pooled
        self.lstm = lstm = model.lstm
        with torch.no_grad():
            # Its hooks compute the weights, if they are pruned or normalised.
            lstm(torch.zeros(1, 1, lstm.input_size, dtype=lstm.dtype, device=next(lstm.parameters()).device))
            self.cell, shares = lstm.cell, lstm.zoneout if any(lstm.zoneout) else ()
            weights = [lstm.weights(layer)[0].by_heads(lstm.outputs(layer)) for layer in range(lstm.num_layers)]
            self.layers = [Rest(lstm.cell, each, shares=shares) for each in weights]
            self.norms = [getattr(lstm, f"norm_l{layer}") if lstm.layer_norm else None for layer in range(lstm.num_layers)]
            self.dtype, self.device = lstm.dtype, weights[0].w_ih.device
            acc = model.head.start(1, self.dtype, self.device) if self.pooled else ()  # type: ignore[operator]
            self.initial: list[Tensor] = [*(part[0] for carry in lstm.initial(1) for part in carry), *acc]

    def names(self) -> list[str]:
        """What each tensor of the state is."""
        carries = [f"l{layer}.{part}" for layer in range(len(self.layers)) for part in self.cell.parts]
        return carries + [f"pooled.{place}" for place in range(len(self.initial) - len(carries))]

    def __call__(self, x: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The head's output [B, …] for inputs [B, …], and the state after them; to be called in inference mode."""
        parts, after = len(self.cell.parts), list[Tensor]()
        y_BW: Tensor = self.encoder(x[None])[0]
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            carry, y_BW = step({"gates": layer.weights.inputs(y_BW)}, layer, state[number * parts : (number + 1) * parts])
            after.extend(carry)
            y_BW = y_BW if norm is None else norm(y_BW)
        if not self.pooled:
            out: Tensor = self.head(y_BW[None])[0]
            return out, after
        one_B = torch.ones(len(y_BW), dtype=torch.int64, device=y_BW.device)
        acc = self.head.pool(y_BW[None], one_B, tuple(state[len(after) :]))  # type: ignore[operator]
        return self.head(acc), [*after, *acc]
