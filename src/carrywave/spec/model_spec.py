"""The model section of the spec: the sizes of the network, its dropout, and how its weights begin."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from carrywave.cells.cell import by_name, names
from carrywave.spec.section import Positive, Section, Share
from carrywave.spec.signal_spec import LONGEST, FrontLayer, front_layers, total_stride

CHARACTER_EMBEDDING, CHARACTERS = 30, 32  # width of the embedding of a character; how many of a word are read, without its middle
WIDEST, DEEPEST = 1 << 16, 4096  # a float32 matrix with this many rows and columns is 16 GiB


class ModelSpec(Section):
    """The network: encoder, stacked LSTM or another cell, head."""

    cell: str = Field("lstm", description=f"recurrent cell of the layers: {', '.join(names())}")
    hidden: Positive | tuple[Positive, ...] = Field(128, description="hidden units of each layer; a list gives each layer its own width")
    layers: Positive = Field(2, description="number of recurrent layers")
    embedding: Positive | None = Field(None, description="width of the token embedding; by default that of the first layer")
    characters: Annotated[int, Field(ge=0)] = Field(
        0,
        description="words: so many convolutions over 3 of its characters, of which each gives its maximum over the word, beside the "
        "embedding of each word, such as 50; 0 for none",
    )
    heads: Positive = Field(1, description="equal groups of each layer's units; between steps, units read only those of their own group")
    projection: Annotated[int, Field(ge=0)] = Field(0, description="width each layer's output is projected to (proj_size); 0 for none")
    bidirectional: bool = Field(False, description="read separate sequences in both directions")
    front: Literal["auto", "none", "small", "deep"] | tuple[FrontLayer, ...] = Field(
        "none",
        description="convolutions over time before the layers, which shorten long sequences: small (64 channels, kernel 9, stride 4; then "
        "128, 9, 4), deep (64, 9, 2; 128, 7, 2; 128, 5, 2), or a list such as [{channels: 64, kernel: 9, stride: 2}]; classification, "
        "transcription and regression, and tagging if every stride is 1",
    )
    front_dropout: Share = Field(0.0, description="dropout after each convolution of the front")
    front_scales: bool = Field(
        False,
        description="the front reads numbers in the units of their own sequence, too, with that sequence's mean and deviation, and its "
        "norms are over whole sequences; otherwise over the channels of each step",
    )
    dropout: Share | tuple[Share, Share, Share] = Field(
        0.0,
        description="dropout on the token embedding, between layers and before the head; or a list with one for each of these places, of "
        "which the first is also for numbers",
    )
    dropout_words: Share = Field(0.0, description="dropout of whole rows of the embedding")
    dropout_rare: Share = Field(
        0.0, description="words: the share of those that occur once in train that are read as <unk>, which is learned from them"
    )
    weight_drop: Share = Field(0.0, description="dropout of recurrent weights, the same for all steps of a batch")
    locked: bool = Field(False, description="use the same dropout mask at every step of a batch (variational dropout)")
    tie: bool = Field(False, description="language: softmax and embedding share one matrix")
    softmax: Literal["full", "adaptive"] = Field(
        "full",
        description="language: score all tokens at every step, or rare ones only in clusters, which is another model and cheaper if the "
        "vocabulary is large",
    )
    crf: bool | Literal["auto"] = Field(
        False,
        description="tagging: labels of a sequence are chosen together, by a score for each pair of neighbours (a conditional random "
        "field), and what data.scheme forbids is never predicted; auto: where the labels of words write spans, with what else is best then",
    )
    word_scores: Annotated[int, Field(ge=0)] = Field(
        0,
        description="model.crf: scores of the labels for the word, its neighbours, ends and shape are added to those of the layers: "
        "a linear part, in a table of so many rows, into which these features are hashed; 0 for none",
    )
    recurrent_dropout: Share = Field(0.0, description="dropout of what each step would add to the carry, inside the cell")
    zoneout: Share | tuple[Share, ...] = Field(
        0.0,
        description="the chance that a unit keeps its value from the step before instead of its new one; a list gives each part of the "
        "carry its own, as in [0.05, 0.5] for h and c of an LSTM",
    )
    layer_norm: bool = Field(False, description="normalise each layer's output")
    cell_norm: bool = Field(
        False, description="normalise inside the cell: the products with input and output, and the memory before its tanh"
    )
    learned_carry: bool = Field(False, description="learn the carry at the start of a sequence instead of starting from zero")
    init: Literal["torch", "orthogonal", "xavier"] = Field("torch", description="how the weights of the layers are initialised")
    init_bias: Literal["frequency", "zero"] = Field(
        "frequency", description="the bias of a softmax starts at the logarithm of how often each class occurs in train, or at zero"
    )
    forget_bias: float | None = Field(
        None, description="initial bias of the forget gate, or of a GRU's update gate: the one that keeps the carry"
    )
    pool: Literal["last", "mean", "max", "attention", "mean_max"] = Field(
        "last",
        description="classification, regression: what the head reads of the real steps: the last, their mean, the maximum of each unit, "
        "a mean with learned weights (attention), or mean and maximum side by side",
    )
    upsample: Positive = Field(
        1,
        description="transcription: answers for each step, so that there may be more labels than steps, as there are more sounds than "
        "letters in some words",
    )
    linear: Annotated[int, Field(ge=0)] = Field(
        0,
        description="forecasting: a linear function of the last so many values is added to what the layers forecast; it starts as a ridge "
        "regression on the training data. classification, regression: about so many features of a model that is fitted first, and whose "
        "answers are mixed with those of the layers: random convolutions of numbers; words, pairs and pieces of words. 0 for none",
    )
    pretrained: str | None = Field(
        None,
        description="pretrained embeddings, as text with a token and its numbers on each line, or layers from elsewhere: of torch.nn.LSTM "
        "or the cell's own module there (.safetensors)",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.cell not in names():
            raise ValueError(f"cell is {self.cell!r}; use one of {', '.join(names())}")
        if self.projection and not by_name(self.cell).projects:
            raise ValueError(f"projection is {self.projection}, but cell={self.cell} has none; remove it")
        by_name(self.cell).zoneout(self.zoneout)
        if self.heads > 1 and self.projection:
            raise ValueError(f"projection {self.projection} would mix what {self.heads} heads keep apart; remove one of them")
        if self.forget_bias is not None and by_name(self.cell).forget_gate is None:
            raise ValueError(f"forget_bias is {self.forget_bias:g}, but cell={self.cell} has no forget gate; remove it")
        if self.front == ():
            raise ValueError("front lists no layer; list some, or use none")
        if self.layers > DEEPEST:
            raise ValueError(f"layers is {self.layers}; use at most {DEEPEST}")
        if isinstance(self.hidden, tuple) and len(self.hidden) != self.layers:
            raise ValueError(f"hidden lists {len(self.hidden)} widths for {self.layers} layers; list one width for each layer")
        if self.upsample > LONGEST:
            raise ValueError(f"upsample is {self.upsample}; use at most {LONGEST}")
        for name, given in (
            ("hidden", max(self.widths)),
            ("embedding", self.embedding or 0),
            ("characters", self.characters),
        ):
            if given > WIDEST:
                raise ValueError(f"{name} is {given}; use at most {WIDEST}")
        widths = self.widths
        if any(width % self.heads for width in widths):
            raise ValueError(f"heads is {self.heads}, which must divide hidden {self.hidden}; each head has an equal share of the units")
        if self.projection and self.projection >= min(widths):
            raise ValueError(f"projection {self.projection} must be smaller than hidden {min(widths)}")
        if self.softmax == "adaptive" and self.tie:
            raise ValueError("tie needs one matrix for all tokens, which softmax=adaptive does not have; remove one of them")
        return self

    def dropouts(self, *, tokens: bool) -> tuple[float, float, float]:
        """Of what the first layer reads, between layers, and of what the head reads. Numbers are few and each one matters: by default they
        get none.
        """
        return self.dropout if isinstance(self.dropout, tuple) else (self.dropout if tokens else 0.0, self.dropout, self.dropout)

    @property
    def front_layers(self) -> tuple[FrontLayer, ...]:
        """The convolutions before the recurrent layers; none if there is no front."""
        return front_layers(self.front)

    def output_steps(self, steps: int) -> int:
        """At how many steps the head answers, for so many steps of a sequence."""
        return -(-steps // total_stride(self.front_layers)) * self.upsample

    @property
    def widths(self) -> tuple[int, ...]:
        """Hidden units of each layer."""
        return self.hidden if isinstance(self.hidden, tuple) else (self.hidden,) * self.layers

    def cutoffs_of(self, vocabulary: int) -> tuple[int, int]:
        """The first tokens of the clusters of an adaptive softmax, by frequency: a twentieth and a quarter of the vocabulary."""
        return max(1, vocabulary // 20), max(2, vocabulary // 4)
