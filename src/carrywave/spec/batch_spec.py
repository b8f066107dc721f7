"""The batch section of the spec."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from carrywave.spec.section import Positive, Section


class BatchSpec(Section):
    """How much goes into one batch: streams × window, or a budget of steps for separate sequences."""

    lanes: Positive | None = Field(
        None, description="contiguous streams trained side by side; by default as many as suit the data, up to 32"
    )
    steps: Positive | None = Field(
        None, description="steps of a window of back-propagation through time; the carry is kept between windows; by default 64"
    )
    vary: bool = Field(False, description="window lengths vary around steps, as in AWD-LSTM (keyed), and the learning rate with them")
    tokens: Positive | None = Field(
        None, description="separate sequences: steps in a batch, padding included; by default as many as suit the data"
    )
    eval_lanes: Positive | None = Field(None, description="streams in evaluation; by default batch.lanes")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tokens is not None and (self.lanes is not None or self.steps is not None):
            raise ValueError("batch.tokens is for separate sequences and batch.lanes/batch.steps for streams; set one or the other")
        return self
