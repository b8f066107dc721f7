"""What a spec leaves open: batch sizes, epochs, patience, a front and how spans are found, chosen from the data, and the precision
(`train.precision: auto`), from the devices.

A batch size is chosen so that an epoch has enough steps and a batch enough sequences. Torch-free: a laptop plans with the precision that a
cluster will use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from carrywave.spec.data_spec import BatchSpec
from carrywave.spec.facts import DataFacts
from carrywave.spec.section import Section
from carrywave.spec.signal_spec import FrontLayer
from carrywave.spec.spec import PAST_STEPS, Spec
from carrywave.spec.task_defaults import FRONT, TAGS_DROPOUT, takes_crf

AUTO = "auto"
BF16_CAPABILITY = (8, 0)  # the compute capability from which GPUs have matrix units for bf16; older ones emulate it, slowly
STEPS = 64  # per window of a stream
MOST_LANES = 32
MOST_TOKENS = 4096  # per batch of separate sequences, or enough for this many sequences of mean length, whichever is more:
SEQUENCES = 32
LARGEST = 1 << 16  # upper limit on tokens per batch, however long the sequences
LEAST_BATCHES = 16  # per epoch, if the data has enough sequences or steps
LEAST_WINDOWS = 200  # per epoch of a stream of tokens
LEAST_SEQUENCES = 16  # of a batch, even if an epoch then has few of them
LONG = 32  # steps of a sequence on average, from which a front of convolutions is put before the layers
LEFT = 48  # steps that such a front leaves, within a factor of 1.4
FRONT_LAYERS = ((64, 9), (128, 7), (128, 5))  # channels and kernels
FEATURES, NGRAMS = 20_000, 1 << 18  # of random convolutions; of words, pairs of words and pieces of words
WANTED_STEPS = {"language": 1000, "tagging": 1000, "classification": 2000, "transcription": 3000, "regression": 2000, "forecasting": 3000}
LEAST_EPOCHS, MOST_EPOCHS = 5, 150
LEAST_PATIENCE, MOST_PATIENCE = 5, 15  # evaluations
MANY_SERIES, SEASONS, MOST_PAST_STEPS = 32, 14, 336  # of so many series, a line reads so many seasons, up to so many values
ENOUGH_TO_CHOOSE = 100  # sequences of valid with one target each, by which the best weights can be told from lucky ones
# What finds spans best: by sections, for keys that are not set.
SPANS: Mapping[str, Mapping[str, Any]] = {
    "data": {"lowercase": True, "scheme": "auto"},
    "model": {"characters": 50, "word_scores": 1 << 18, "dropout": 0.5, "dropout_rare": 0.5},
    "train": {"best": "span_f1"},
}


def resolve_for_data(spec: Spec, facts: DataFacts) -> Spec:
    """The spec with everything filled in that depends on the training data: given values are kept."""
    spec = with_spans(spec, spans=facts.spans > 0, spelled=facts.characters > 0)
    if not facts.steps:
        return spec  # only the facts that shape the model are known, not the amount of data
    spec = _with_line(_with_front(_with_linear_part(spec, facts), facts), facts)
    batch, sequences = spec.batch, max(facts.sequences, 1)
    if spec.streams:
        steps = batch.steps or STEPS
        least = LEAST_BATCHES if spec.reads_series else LEAST_WINDOWS
        lanes = batch.lanes or min(max(facts.steps // (steps * least), 1), MOST_LANES)
        spec = _with(spec, batch.model_copy(update={"lanes": lanes, "steps": steps}))
        return _with_epochs(spec, -(-facts.steps // (lanes * steps)))
    mean = -(-facts.steps // sequences)
    most = max(MOST_TOKENS, min(SEQUENCES * mean, LARGEST))
    tokens = batch.tokens or min(most, max(facts.steps // LEAST_BATCHES, min(LEAST_SEQUENCES * mean, facts.steps), facts.longest, 1))
    spec = _with(spec, batch.model_copy(update={"tokens": tokens}))
    return _with_epochs(spec, -(-facts.steps // tokens))


def with_spans(spec: Spec, *, spans: bool, spelled: bool = True) -> Spec:
    """With a CRF in place of `auto` in model.crf, and what goes with it, if labels of words write spans. `spelled`: characters are read."""
    if spec.model.crf != AUTO:
        return spec
    if not spans or not takes_crf(spec):
        return with_keys(spec, {"model": {"crf": False}}, open_keys(spec, {"model": {"dropout": TAGS_DROPOUT}}))
    found = open_keys(spec, SPANS)
    if spec.model.pretrained is not None:
        found["data"].pop("lowercase", None)  # its words have their own case
    if not spelled:
        found["model"].pop("characters", None)
    if not spelled or not found["model"].get("characters", spec.model.characters):
        found["model"].pop("word_scores", None)
    return with_keys(spec, {"model": {"crf": True}}, found)


def open_keys(spec: Spec, sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those of the keys that the spec does not set."""
    return {
        name: {key: value for key, value in values.items() if key not in getattr(spec, name).model_fields_set}
        for name, values in sections.items()
    }


def with_keys(spec: Spec, *sections: Mapping[str, Mapping[str, Any]]) -> Spec:
    """The spec with these values of keys, by section."""
    for each in sections:
        changed: dict[str, Section] = {name: getattr(spec, name).model_copy(update=values) for name, values in each.items() if values}
        spec = spec.model_copy(update=changed)
    return spec


def _with_front(spec: Spec, facts: DataFacts) -> Spec:
    """With a front in place of `auto`: convolutions if sequences of numbers are long, as raw signals are."""
    if spec.model.front != AUTO:
        return spec
    mean = facts.steps / max(facts.sequences, 1)
    if facts.features and mean >= LONG:
        return _with_model(spec, front=_adapted(mean))
    idle = {name: type(spec.model).model_fields[name].default for name, value in FRONT.items() if getattr(spec.model, name) == value}
    return _with_model(spec, front="none", **idle)


def _adapted(mean: float) -> tuple[FrontLayer, ...]:
    """The convolutions of a front, with strides that leave about `LEFT` steps of sequences of this length."""
    halvings = min(max(round(math.log2(mean / LEFT)), 0), 2 * len(FRONT_LAYERS))
    strides = [1 << (halvings + place) // len(FRONT_LAYERS) for place in reversed(range(len(FRONT_LAYERS)))]
    return tuple(
        FrontLayer(channels=channels, kernel=kernel, stride=stride)
        for (channels, kernel), stride in zip(FRONT_LAYERS, strides, strict=True)
    )


def _with_linear_part(spec: Spec, facts: DataFacts) -> Spec:
    """With random convolutions beside the layers that read separate sequences of numbers, unless there was to be no front, which reads the
    same, and with words, pairs and pieces of words beside those that read texts of words; the spec of a run says how many.
    """
    asked = spec.model.model_fields_set
    if not spec.mixes or "linear" in asked or not spec.model.bidirectional:
        return spec
    if not facts.features:
        return _with_model(spec, linear=NGRAMS) if facts.vocabulary and spec.data.tokens == "word" else spec
    return spec if spec.model.front == "none" else _with_model(spec, linear=FEATURES)


def _with_line(spec: Spec, facts: DataFacts) -> Spec:
    """With a linear part that, unless another number than the default is given, reads several seasons of many series, which share its
    weights, and no more values than series have before most of their origins.
    """
    if spec.task != "forecasting" or spec.model.linear != PAST_STEPS:
        return spec
    room = max(1, (-(-facts.steps // max(facts.sequences, 1)) - spec.data.horizon) // 2)
    seasons = SEASONS * spec.data.season if facts.sequences >= MANY_SERIES else 0
    found = min(max(PAST_STEPS, min(seasons, MOST_PAST_STEPS)), room)
    return spec if found == PAST_STEPS else _with_model(spec, linear=found)


def _with_epochs(spec: Spec, batches: int) -> Spec:
    """With a number of epochs, and of evaluations without improvement that end the run, for epochs of so many batches."""
    train = spec.train
    epochs = train.epochs or min(max(-(-WANTED_STEPS[spec.task] * train.accumulate // batches), LEAST_EPOCHS), MOST_EPOCHS)
    patience = train.early_stop if train.epochs == 0 else train.early_stop or 0  # who says how long does not ask to be stopped
    if patience is None:
        evaluations = epochs if train.evaluate_every is None else epochs * batches // train.evaluate_every
        patience = min(max(LEAST_PATIENCE, evaluations // 3), MOST_PATIENCE)
    update = {"epochs": epochs, "early_stop": patience}
    return spec.model_copy(update={"train": train.model_copy(update=update)})


def with_kept_weights(spec: Spec, valid: int | None) -> Spec:
    """With `best` or `last` in place of `auto` in train.weights; `valid`: sequences to validate on, None if there is nothing."""
    few = spec.pooled and valid is not None and valid < ENOUGH_TO_CHOOSE
    update: dict[str, object] = {"weights": "last" if few else "best"} if spec.train.weights == AUTO else {}
    if valid is None:
        update["best"] = spec.train.best  # there is nothing that spans could be counted on
    if (few or valid is None) and spec.train.early_stop is None:
        update["early_stop"] = 0  # what is too small to choose by is too small to stop by
    return spec.model_copy(update={"train": spec.train.model_copy(update=update)})


def _with_model(spec: Spec, **values: Any) -> Spec:
    return spec.model_copy(update={"model": spec.model.model_copy(update=values)})


def _with(spec: Spec, batch: BatchSpec) -> Spec:
    return spec if batch == spec.batch else spec.model_copy(update={"batch": batch})


def suited(*, made_for_bf16: bool) -> Literal["bf16", "fp32"]:
    """The precision that suits devices that are all made for bf16, or not."""
    return "bf16" if made_for_bf16 else "fp32"


def with_precision(spec: Spec, precision: str) -> Spec:
    """The spec with a precision in place of `auto`; one that was asked for stays."""
    if spec.train.precision != AUTO:
        return spec
    return spec.model_copy(update={"train": spec.train.model_copy(update={"precision": precision})})
