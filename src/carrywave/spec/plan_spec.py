"""The plan section of the spec."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from carrywave.spec.section import Positive, Section


class PlanSpec(Section):
    """How the work is split. Changes speed and memory, never the result."""

    replicas: Positive | None = Field(None, description="copies of the model that share the lanes; by default workers ÷ stages")
    stages: Positive = Field(1, description="consecutive parts into which the layers are split, one per worker")
    chunk_steps: Positive | None = Field(
        None, description="steps of a time chunk; by default the whole window, or 16 with several stages and one micro-batch"
    )
    micro_batches: Positive = Field(1, description="parts into which the lanes are split, which follow each other through the stages")
    cuts: tuple[Positive, ...] | None = Field(
        None, description="first layer of each stage after the first, counted from 1; the head comes after the last layer"
    )
    recompute: bool | Literal["twice"] = Field(
        False,
        description="keep only the input and the carry of each chunk, and recompute the rest in backward; twice: keep few of the carries, "
        "and recompute the others too, for very long sequences. Needs chunk_steps to save memory on one device",
    )
    kernel: Literal["auto", "reference", "aten", "manual", "persistent"] = Field(
        "auto",
        description="backend of the recurrent layers, see docs/architecture.md; the environment variable CARRYWAVE_KERNEL takes precedence",
    )
    share_head: bool = Field(False, description="split the head's work over the stages; for a large vocabulary")
