"""The batch where the spec names none: as large as suits the data, so that an epoch has some steps, and a step some sequences."""

from __future__ import annotations

from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import BatchSpec, Spec

STEPS = 64  # window of a stream
MOST_LANES = 32
MOST_TOKENS = 4096  # of separate sequences, or so many of their steps as hold this many of them:
SEQUENCES = 32
LARGEST = 1 << 16  # however long sequences are
LEAST_BATCHES = 16  # in an epoch, as far as there are sequences, or steps, for them


def fitted(spec: Spec, facts: DataFacts) -> Spec:
    """The spec with its batch as numbers: those that are given, and for the others what suits the training data."""
    batch = spec.batch
    if not facts.steps:
        return spec  # nothing is known of the data but what the model is shaped by
    if spec.streams:
        steps = batch.steps or STEPS
        lanes = batch.lanes or min(max(facts.steps // (steps * LEAST_BATCHES), 1), MOST_LANES)
        return _with(spec, batch.model_copy(update={"lanes": lanes, "steps": steps}))
    most = max(MOST_TOKENS, min(SEQUENCES * -(-facts.steps // max(facts.sequences, 1)), LARGEST))
    tokens = batch.tokens or min(most, max(facts.steps // LEAST_BATCHES, facts.longest, 1))
    return _with(spec, batch.model_copy(update={"tokens": tokens}))


def _with(spec: Spec, batch: BatchSpec) -> Spec:
    return spec if batch == spec.batch else spec.model_copy(update={"batch": batch})
