"""Chooses the batch size if the spec gives none, so that an epoch has enough steps and a batch enough sequences."""

from __future__ import annotations

from carrywave.spec.batch_spec import BatchSpec
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec

STEPS = 64  # per window of a stream
MOST_LANES = 32
MOST_TOKENS = 4096  # per batch of separate sequences, or enough for this many sequences of mean length, whichever is more:
SEQUENCES = 32
LARGEST = 1 << 16  # upper limit on tokens per batch, however long the sequences
LEAST_BATCHES = 16  # per epoch, if the data has enough sequences or steps


def fitted(spec: Spec, facts: DataFacts) -> Spec:
    """The spec with every batch size filled in: given values are kept, the others are derived from the training data."""
    batch = spec.batch
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
