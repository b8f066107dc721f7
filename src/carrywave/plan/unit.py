"""A `Unit` is the smallest part of a model that a plan can place: the encoder, a layer or the head. Encoder and layers are made here."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from carrywave.cells.cell import Cell, by_name, names
from carrywave.errors import PlanError
from carrywave.plan.rates import CallSize
from carrywave.spec.facts import DataFacts
from carrywave.spec.model_spec import CHARACTER_EMBEDDING
from carrywave.spec.signal_spec import total_stride
from carrywave.spec.spec import Spec
from carrywave.spec.step_inputs import step_inputs


@dataclass(frozen=True)
class Convolution:
    """A layer of a front: a product of `inputs` (what its kernel covers) by `channels`, with a norm after it. What reads the characters of
    words is priced as one, too: a product for each character of a step.
    """

    inputs: int
    channels: int
    times: int  # its outputs for each step that the recurrent layers see


@dataclass(frozen=True)
class Unit:
    """The encoder, a layer or the head."""

    name: str
    kind: str  # of a layer, its cell; embedding, softmax, linear; or "numbers": numeric input passes through unchanged
    inputs: int  # of a layer its width, of an embedding its rows
    outputs: int  # of a layer its hidden units, of a head its classes or numbers
    width_in: int  # width of the input from the previous unit; 0 for the encoder
    width_out: int  # width of the output to the next unit; 0 for the head
    parameters: int  # not counting those shared with another unit
    kept: int  # elements per lane and step saved from forward to backward, not counting the input
    deferred: int = 0  # elements per lane and step held from backward until deferred weight gradients are computed
    carry: int = 0  # elements per lane
    work: int = 0  # elements per lane and step of temporary memory while it runs
    projection: int = 0
    directions: int = 1
    dropout: int = 0  # width of the dropout applied to its output; 0 for none
    norm: int = 0  # width of the layer norm applied to its output; 0 for none
    heads: int = 1
    front: tuple[Convolution, ...] = ()  # of the encoder

    def call(self, lanes: int, steps: int) -> CallSize:
        """What the time of one direction on this many lanes and steps depends on."""
        if self.cell is None:
            return CallSize(self.inputs, self.outputs, lanes, steps)
        gates = self.cell.gates * self.outputs
        weights = self.cell.multiply_adds(self.inputs, self.outputs, self.projection, self.heads)
        return CallSize(self.inputs, gates, lanes, steps, max(1, weights - gates * self.inputs))

    @property
    def cell(self) -> Cell | None:
        """The cell of a layer; None for the encoder and the head."""
        return by_name(self.kind) if self.kind in names() else None


def encoder_unit(spec: Spec, facts: DataFacts) -> Unit:
    """The encoder, with the convolutions of a front: everything of it is counted for each step that the layers see."""
    plain, layers = _plain_encoder(spec, facts), spec.model.front_layers
    if not layers:
        return plain
    front: list[Convolution] = []
    stride = many = total_stride(layers)
    width = plain.width_out * (4 if spec.model.front_scales and not facts.vocabulary else 1)
    kept, parameters = plain.kept * many, plain.parameters
    for layer in layers:
        before, many = width * many, many // layer.stride
        front.append(Convolution(width * layer.kernel, layer.channels, many))
        parameters += (width * layer.kernel + 3) * layer.channels  # its bias, and the norm's scale and bias
        kept += before + 4 * layer.channels * many  # what it reads and gives, and what norm, ReLU and dropout make of that
        width = layer.channels
    return replace(
        plain,
        width_out=width,
        parameters=parameters,
        kept=kept,
        deferred=plain.deferred * stride,
        work=max(kept, plain.work * stride),
        dropout=width if plain.dropout else 0,
        front=(*plain.front, *front),
    )


def _plain_encoder(spec: Spec, facts: DataFacts) -> Unit:
    model = spec.model
    if facts.vocabulary:
        rows, width = facts.vocabulary, model.embedding or model.widths[0]
        dropout = width if model.dropouts(tokens=True)[0] or model.dropout_words else 0
        words = Unit("encoder", "embedding", rows, width, 0, width, rows * width, dropout + 2, width + 2, work=width, dropout=dropout)
        return _spelled(words, spec, facts) if facts.characters else words
    if not facts.features:
        raise PlanError("the data has neither tokens nor features, so the model has no input; pass the data's facts, or the data itself")
    inputs = step_inputs(spec, facts)
    width = inputs.width
    return Unit(
        "encoder", "numbers", width, width, 0, width, inputs.parameters, width, dropout=width if model.dropouts(tokens=False)[0] else 0
    )


def _spelled(words: Unit, spec: Spec, facts: DataFacts) -> Unit:
    """The encoder of words with what reads their characters beside it."""
    width, added = CHARACTER_EMBEDDING, spec.model.characters
    read = Convolution(3 * width, added, facts.word_length)
    parameters, kept = (3 * width + 1) * added, 3 * width + 2 * added  # of each character: what the filters read and give
    return replace(
        words,
        width_out=words.width_out + added,
        parameters=words.parameters + facts.characters * width + parameters,
        kept=words.kept + kept * facts.word_length + added,
        work=words.work + kept * facts.word_length,
        dropout=words.dropout and words.dropout + added,
        front=(read,),
    )


def layer_unit(spec: Spec, layer: int, width: int, hidden: int, out: int, dropout: int) -> Unit:
    """One recurrent layer; `dropout`: the width of that on its output."""
    model = spec.model
    cell, directions, back = by_name(model.cell), 2 if model.bidirectional else 1, model.projection or hidden
    rows, extra = cell.gates * hidden, cell.further(hidden, model.cell_norm).values()
    widths, norm = cell.widths(hidden, model.projection), out if model.layer_norm else 0
    of_carry = sum(size for part, size in zip(cell.parts, widths, strict=True) if part in cell.free_parts) if model.learned_carry else 0
    one = cell.multiply_adds(width, hidden, model.projection, model.heads) + 2 * rows + of_carry
    # Inside the cell: both products and the memory before their norms, the candidate and its mask, and the masks of zoneout.
    inside = (2 * cell.gates + 1) * model.cell_norm + 2 * bool(model.recurrent_dropout)
    inside += sum(chance > 0 for chance in cell.zoneout(model.zoneout))
    # What the cell keeps, the output (also before the projection), then what dropout and norm save.
    kept = directions * ((cell.kept + inside) * hidden + (hidden if model.projection else 0)) + out + dropout + norm
    defers = cell.has_kernels(spec.train.precision) and not inside and model.heads == 1  # autograd alone defers nothing
    return Unit(
        f"layer {layer + 1}",
        cell.name,
        width,
        hidden,
        width,
        out,
        directions * (one + sum(math.prod(each.shape) for each in extra)) + 2 * norm,
        kept,
        deferred=directions * (rows + back) + width if defers else 0,
        carry=directions * sum(widths),
        work=directions * cell.kept * hidden + width,
        projection=model.projection,
        directions=directions,
        dropout=dropout,
        norm=norm,
        heads=model.heads,
    )
