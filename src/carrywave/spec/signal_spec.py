"""Parts of the spec for raw signals: the layers of `model.front`, convolutions over time that shorten long sequences before the recurrent
layers, and `data.augment`, the changes to sequences in training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from carrywave.spec.section import Positive, Section

WIDEST, LONGEST = 1 << 16, 4096  # most channels of a layer; most steps of a kernel, and of all strides together


class AugmentSpec(Section):
    """Random changes to the sequences of numbers that are trained on, others in every epoch; evaluations read the data as it is."""

    noise: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="standard deviation of normal noise that is added to every number, in standardised units"
    )
    scale: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="standard deviation of a factor around 1, one for each sequence and feature"
    )
    shift: bool = Field(
        False,
        description="begin at a random step, and go on from the end to the beginning; only where the start of a sequence means nothing",
    )


class FrontLayer(Section):
    """One convolution over time, with normalisation and ReLU after it."""

    channels: Positive = Field(64, description="width of what comes out")
    kernel: Positive = Field(5, description="steps that one output reads, an odd number: as many after its place as before it")
    stride: Positive = Field(2, description="steps from one output to the next, so that n steps become n / stride, rounded up")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel is {self.kernel}, but as many steps are read after a place as before it; use {self.kernel + 1}")
        for name, most in (("channels", WIDEST), ("kernel", LONGEST), ("stride", LONGEST)):
            if getattr(self, name) > most:
                raise ValueError(f"{name} is {getattr(self, name)}; use at most {most}")
        return self


def _layers(*each: tuple[int, int, int]) -> tuple[FrontLayer, ...]:
    return tuple(FrontLayer(channels=channels, kernel=kernel, stride=stride) for channels, kernel, stride in each)


FRONTS: Mapping[str, tuple[FrontLayer, ...]] = {
    "none": (),
    "small": _layers((64, 9, 4), (128, 9, 4)),
    "deep": _layers((64, 9, 2), (128, 7, 2), (128, 5, 2)),
}


def front_layers(front: str | Sequence[FrontLayer]) -> tuple[FrontLayer, ...]:
    """The layers of a front, by its name or as they were listed."""
    return FRONTS.get(front, ()) if isinstance(front, str) else tuple(front)  # `auto` is decided once the data is known


def total_stride(layers: Sequence[FrontLayer]) -> int:
    """The steps of the input that become one: n steps become n / this, rounded up, whatever the order of the layers."""
    return math.prod(layer.stride for layer in layers)
