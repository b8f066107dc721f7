"""`Front`: strided convolutions over time before the recurrent layers, for sequences too long to be read step by step.

A layer is a convolution that reads as many steps after a place as before it, a norm over the channels of each step or over all real steps
of a sequence, ReLU and dropout. What lies beyond the end of a lane is zero before every convolution, as it is for a sequence without
padding, and nothing looks at other lanes. So a lane's result depends neither on its padding nor on who shares its batch.

Numbers can be read in two scales: a signal is told by its shape, which is the same at any offset and gain, or by these.

It is the encoder of a model, but is given whole sequences, and their lengths. The layers after it see n / stride steps, rounded up.

Shapes: T time, B lane, F features, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from carrywave.errors import UserError
from carrywave.kernels.lengths import real_steps
from carrywave.model.dropout import Dropout
from carrywave.spec.signal_spec import FRONTS, FrontLayer, front_layers, total_stride

Steps = TypeVar("Steps", int, Tensor)
LEAST_SQUARE = 1e-6  # added to the mean square of what a norm divides
FARTHEST = 5.0  # a sequence's mean or deviation from those of train, in deviations; what is farther is as far


def shorter(steps: Steps, stride: int) -> Steps:
    """A number of steps, or that of each lane, after a front."""
    return steps if stride == 1 else (steps + (stride - 1)) // stride


class TimeConvolution(nn.Conv1d):
    """torch's, under a name of ours: where it is used, it is given whole sequences."""


class SequenceNorm(nn.Module):
    """A norm over all channels of all real steps of a sequence, with a weight and a bias for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, y_TBC: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """The same shape; padding is not told from the rest in what comes out."""
        wide_TBC = y_TBC.to(torch.promote_types(y_TBC.dtype, torch.float32))  # sums of thousands of steps
        mean_B1, deviation_B1 = moments(wide_TBC.mean(2, keepdim=True), wide_TBC, lengths_B)
        return ((wide_TBC - mean_B1) / deviation_B1 * self.weight + self.bias).to(y_TBC.dtype)


def moments(means_TBC: Tensor, y_TBC: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and deviation [B, C] over real steps; of channels that share a mean in `means`, and so have one, [B, 1]."""
    steps, lanes = y_TBC.shape[:2]
    lengths_B = y_TBC.new_full((lanes,), steps, dtype=torch.int64) if lengths_B is None else lengths_B
    real_TB1, steps_B1 = real_steps(lengths_B, steps), lengths_B.clamp(min=1)[:, None].to(y_TBC.dtype)
    mean_BC = torch.where(real_TB1, means_TBC, 0.0).sum(0) / steps_B1
    squares_TBC = (y_TBC - mean_BC).square()
    squares_TBC = squares_TBC if means_TBC.shape == y_TBC.shape else squares_TBC.mean(2, keepdim=True)
    return mean_BC, (torch.where(real_TB1, squares_TBC, 0.0).sum(0) / steps_B1 + LEAST_SQUARE).sqrt()


def in_two_scales(x_TBF: Tensor, lengths_B: Tensor | None) -> Tensor:
    """[T, B, 4 F]: numbers as they are, in units of their own sequence, and the mean and the deviation of that."""
    mean_BF, deviation_BF = moments(x_TBF, x_TBF, lengths_B)
    facts_B = torch.cat([mean_BF, deviation_BF - 1.0], 1).clamp(-FARTHEST, FARTHEST)
    return torch.cat([x_TBF, (x_TBF - mean_BF) / deviation_BF, facts_B.expand(x_TBF.shape[0], *facts_B.shape)], 2)


class Front(nn.Module):
    """Convolutions over time behind an encoder of single steps.

    `features`: the width of a step, or a module that encodes single steps [T, B, …] and has a `width`. `layers`: `small`, `deep`, or a
    mapping with channels, kernel and stride for each layer. Each is followed by a norm over the channels of a step; with `scales`, over all
    of a sequence, and numbers are read in the units of their own sequence, too.

    >>> import torch
    >>> import carrywave as cw
    >>> front = cw.Front(3, [{"channels": 8, "kernel": 5, "stride": 2}, {"channels": 16, "kernel": 3, "stride": 2}])
    >>> front.width, front.stride, tuple(front(torch.zeros(101, 4, 3)).shape)
    (16, 4, (26, 4, 16))
    """

    def __init__(
        self,
        features: int | nn.Module,
        layers: str | Sequence[FrontLayer | Mapping[str, int]] = "deep",
        dropout: float = 0.0,
        *,
        scales: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(layers, str) and layers not in FRONTS:
            raise UserError(f"a front {layers!r} is unknown; use {', '.join(FRONTS)}, or list its layers")
        listed = front_layers(layers if isinstance(layers, str) else [_layer(each) for each in layers])
        if not listed:
            raise UserError("a front has no layers; list at least one, or leave it out")
        self.step_encoder = features if isinstance(features, nn.Module) else None
        width = features if isinstance(features, int) else getattr(features, "width", None)
        if not isinstance(width, int) or width < 1:
            raise UserError(f"a front reads {width} features of a step; pass a number of at least 1, or a module with a `width`")
        self.features, self.scales = width, scales and self.step_encoder is None
        width *= 4 if self.scales else 1
        self.layers = listed
        self.stride = total_stride(listed)
        self.convolutions = nn.ModuleList()
        self.norms = nn.ModuleList()
        for layer in listed:
            self.convolutions.append(TimeConvolution(width, layer.channels, layer.kernel, layer.stride, layer.kernel // 2))
            self.norms.append(SequenceNorm(layer.channels) if scales else nn.LayerNorm(layer.channels))
            width = layer.channels
        self.width = width
        self.dropouts = nn.ModuleList(Dropout(dropout) for _ in listed)  # named by their place in the model

    def forward(self, x: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """[T / stride, B, C], from x [T, B, …]; without lengths, every step is real."""
        y_TBC = x if self.step_encoder is None else self.step_encoder(x)
        if y_TBC.dim() != 3 or y_TBC.shape[-1] != self.features:
            raise UserError(f"a front reads steps of {self.features} features, but got {list(y_TBC.shape)}; pass [time, lane, features]")
        if self.scales:
            y_TBC = in_two_scales(y_TBC, lengths_B)
        for layer, convolution, norm, dropout in zip(self.layers, self.convolutions, self.norms, self.dropouts, strict=True):
            if lengths_B is not None:
                y_TBC = torch.where(real_steps(lengths_B, y_TBC.shape[0]), y_TBC, 0.0)
                lengths_B = shorter(lengths_B, layer.stride)
            y_TBC = convolution(y_TBC.permute(1, 2, 0)).permute(2, 0, 1)
            y_TBC = norm(y_TBC, lengths_B) if isinstance(norm, SequenceNorm) else norm(y_TBC)
            y_TBC = dropout(y_TBC.relu())
        return y_TBC

    def extra_repr(self) -> str:
        return f"{self.features}, stride={self.stride}"


def _layer(given: FrontLayer | Mapping[str, int]) -> FrontLayer:
    try:
        return given if isinstance(given, FrontLayer) else FrontLayer.model_validate(dict(given), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = f"{'.'.join(map(str, first['loc']))} {first['msg'].removeprefix('Value error, ')}".strip()
        raise UserError(f"a front cannot have the layer {dict(given)} ({what}); pass channels, an odd kernel and a stride") from None
