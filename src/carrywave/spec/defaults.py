"""What a spec leaves open: batch sizes, chosen from the data, what forecasts are relative to (`data.residual: auto`), and the precision
(`train.precision: auto`), from the devices.

A batch size is chosen so that an epoch has enough steps and a batch enough sequences. Torch-free: a laptop plans with the precision that a
cluster will use.
"""

from __future__ import annotations

from typing import Literal

from carrywave.spec.data_spec import BatchSpec
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec

AUTO = "auto"
BF16_CAPABILITY = (8, 0)  # the compute capability from which GPUs have matrix units for bf16; older ones emulate it, slowly
STEPS = 64  # per window of a stream
MOST_LANES = 32
MOST_TOKENS = 4096  # per batch of separate sequences, or enough for this many sequences of mean length, whichever is more:
SEQUENCES = 32
LARGEST = 1 << 16  # upper limit on tokens per batch, however long the sequences
LEAST_BATCHES = 16  # per epoch, if the data has enough sequences or steps


def fitted(spec: Spec, facts: DataFacts) -> Spec:
    """The spec with every batch size filled in: given values are kept, the others are derived from the training data."""
    batch, spec = spec.batch, with_residual(spec)
    if not facts.steps:
        return spec  # only the facts that shape the model are known, not the amount of data
    if spec.streams:
        steps = batch.steps or STEPS
        lanes = batch.lanes or min(max(facts.steps // (steps * LEAST_BATCHES), 1), MOST_LANES)
        return _with(spec, batch.model_copy(update={"lanes": lanes, "steps": steps}))
    most = max(MOST_TOKENS, min(SEQUENCES * -(-facts.steps // max(facts.sequences, 1)), LARGEST))
    tokens = batch.tokens or min(most, max(facts.steps // LEAST_BATCHES, facts.longest, 1))
    return _with(spec, batch.model_copy(update={"tokens": tokens}))


def _with(spec: Spec, batch: BatchSpec) -> Spec:
    return spec if batch == spec.batch else spec.model_copy(update={"batch": batch})


def with_residual(spec: Spec) -> Spec:
    """The spec with a naive forecast in place of `auto`: the last season if there is one and the model has no linear part to find it.

    A linear part starts from the last value. Differences have none to start from: that the last one will come again says little.
    """
    if spec.data.residual != AUTO or spec.task != "forecasting":
        return spec
    found = "last" if spec.model.linear else "season" if spec.data.season > 1 else "none" if spec.data.transform == "diff" else "last"
    return spec.model_copy(update={"data": spec.data.model_copy(update={"residual": found})})


def suited(*, made_for_bf16: bool) -> Literal["bf16", "fp32"]:
    """The precision that suits devices that are all made for bf16, or not."""
    return "bf16" if made_for_bf16 else "fp32"


def with_precision(spec: Spec, precision: str) -> Spec:
    """The spec with a precision in place of `auto`; one that was asked for stays."""
    if spec.train.precision != AUTO:
        return spec
    return spec.model_copy(update={"train": spec.train.model_copy(update={"precision": precision})})
