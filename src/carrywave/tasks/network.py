"""The network of a task: what reads its steps, a front of convolutions, recurrent layers, and the head of its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carrywave.data.sequences import Sequences
from carrywave.data.text.tokenizers import UNKNOWN
from carrywave.errors import SpecError
from carrywave.model.dropout import Dropout
from carrywave.model.encoders import Embedding, Features, Numbers
from carrywave.model.initialization import initialize, rounded_by_host
from carrywave.model.lstm import class_of
from carrywave.model.model import Model
from carrywave.model.over_time.front import Front
from carrywave.model.parameter_placement import Holding, allocate
from carrywave.model.pretrained.embeddings import load_pretrained
from carrywave.model.pretrained.layers import holds_layers, load_lstm, read_lstm
from carrywave.model.vocabulary.spelled_words import SpelledWords
from carrywave.spec.model_spec import CHARACTER_EMBEDDING
from carrywave.spec.step_inputs import step_inputs
from carrywave.tasks.first_weights import first_rare, set_first_weights

if TYPE_CHECKING:
    from carrywave.tasks.task import Task

Encoder = Embedding | SpelledWords | Numbers | Features


def network(task: Task, train: Sequences | None, holding: Holding | None, *, draw: bool) -> Model:
    """Build it, with initial weights keyed by the seed, some of which begin at what the training data says.

    `holding`: it gets memory for these units alone, on their device. Without `draw` the weights are left as they are, to be loaded.
    """
    spec, empty = task.spec.model, None if holding is None else "meta"
    encoder = _encoder(task, train, empty)
    front, (first, between, last) = _front(task, encoder), spec.dropouts(tokens=task.facts.vocabulary > 0)
    lstm = class_of(spec.cell)(
        front.width,
        spec.widths,
        spec.layers,
        dropout=between,
        bidirectional=spec.bidirectional,
        proj_size=spec.projection,
        locked=spec.locked,
        weight_drop=spec.weight_drop,
        recurrent_dropout=spec.recurrent_dropout,
        zoneout=spec.zoneout,
        layer_norm=spec.layer_norm,
        cell_norm=spec.cell_norm,
        learned_carry=spec.learned_carry,
        num_heads=spec.heads,
        kernel=task.spec.plan_spec.kernel,
        device=empty,
    )
    model = Model(
        front,
        lstm,
        task.kind.head(lstm.output_size, encoder, train, empty),
        dropout_in=Dropout(first, locked=spec.locked, name="dropout_in"),
        dropout_out=Dropout(last, locked=spec.locked, name="dropout_out"),
    )
    if holding is not None:
        allocate(model, holding)
    if not draw:
        return model
    initialize(model, task.spec.train.seed, init=spec.init, forget_bias=spec.forget_bias)
    model.drawn = holding is not None
    model.rounded_by_host = rounded_by_host(model, spec.init)
    model.rounded_by_host |= set_first_weights(model, task.spec, task.codec, train, task.line)
    if spec.pretrained is not None and holds_layers(spec.pretrained):
        load_lstm(lstm, read_lstm(spec.pretrained), spec.pretrained)
    elif spec.pretrained is not None:
        words = encoder.words if isinstance(encoder, SpelledWords) else encoder
        if not isinstance(words, Embedding) or not task.codec.vocabulary:
            raise SpecError(
                f"model.pretrained={spec.pretrained} needs a vocabulary of words or characters; set data.tokens=word, or remove it"
            )
        load_pretrained(spec.pretrained, list(task.codec.vocabulary), words.weight)
    return model


def _encoder(task: Task, train: Sequences | None, device: str | None) -> Encoder:
    """The embedding of tokens, with what reads their characters beside it; or numbers, with categories."""
    spec, facts, inputs = task.spec.model, task.facts, step_inputs(task.spec, task.facts)
    if not facts.vocabulary:
        return Features(inputs) if inputs.tables else Numbers(inputs.width)
    words = Embedding(facts.vocabulary, spec.embedding or spec.widths[0], spec.dropout_words, device=device)
    if spec.dropout_rare and train is not None:
        if UNKNOWN not in task.codec.vocabulary:
            raise SpecError("model.dropout_rare makes words <unk>, which the vocabulary does not have; set data.tokens=word, or remove it")
        words.rare = (first_rare(train, words.vocabulary), task.codec.vocabulary.index(UNKNOWN), spec.dropout_rare)
    if not facts.characters:
        return words
    return SpelledWords(words, facts.characters, facts.word_length, CHARACTER_EMBEDDING, spec.characters)


def _front(task: Task, encoder: Encoder) -> Encoder | Front:
    """The encoder, with the convolutions of `model.front` behind it."""
    spec = task.spec.model
    if not spec.front_layers:
        return encoder
    words = isinstance(encoder, Embedding | SpelledWords)
    return Front(encoder if words else encoder.width, spec.front_layers, spec.front_dropout, scales=spec.front_scales)
