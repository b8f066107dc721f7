"""`Task`: what a spec and its data define, by the kind of task: views of the data, a network with its head, metrics and baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from carrywave.data.codec import Codec
from carrywave.data.sequences import Sequences, View
from carrywave.data.text.documents import DocumentEnds
from carrywave.model.model import Model
from carrywave.model.parameter_placement import Holding
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec
from carrywave.tasks import ridge
from carrywave.tasks.baselines import line_of
from carrywave.tasks.classification import Classification
from carrywave.tasks.forecasting import Forecasting
from carrywave.tasks.kind import Kind, Part
from carrywave.tasks.language import Language
from carrywave.tasks.linear.part import LinearPart
from carrywave.tasks.mase_scale import MaseScale
from carrywave.tasks.metrics.bands import Bands
from carrywave.tasks.metrics.errors import Metric
from carrywave.tasks.network import network
from carrywave.tasks.regression import EachStep, Regression
from carrywave.tasks.tagging import Tagging
from carrywave.tasks.transcription import Transcription

KINDS: Mapping[str, type[Kind]] = {
    "language": Language,
    "classification": Classification,
    "tagging": Tagging,
    "transcription": Transcription,
    "regression": Regression,
    "forecasting": Forecasting,
}


@dataclass(frozen=True)
class Task:
    """What a spec and its data define."""

    spec: Spec
    codec: Codec
    facts: DataFacts
    scale: MaseScale = field(default_factory=MaseScale)  # forecasting: denominator of MASE
    own_model: bool = False  # the network is the user's: the spec does not say how often it answers
    line: ridge.Ridge | None = None  # forecasting: fitted to train, to compare with; None if train is not at hand
    linear: LinearPart | None = None  # classification and regression: the fitted part whose answers are mixed with the network's
    bands: Bands | None = None  # forecasting: what lies around single values

    @staticmethod
    def of(spec: Spec, codec: Codec, facts: DataFacts, train: Sequences) -> Task:
        """The task of a run that trains on this data."""
        if spec.task != "forecasting":
            return Task(spec, codec, facts)
        return Task(spec, codec, facts, MaseScale.of(train, codec, spec.data.season)).with_line(train)

    def with_line(self, train: Sequences) -> Task:
        """The task with a straight line through the training data to compare forecasts with."""
        if self.spec.task != "forecasting":
            return self
        return replace(self, line=line_of(train, np.array(self.codec.targets), self.spec.lags, self.spec.data.horizon))

    @cached_property
    def kind(self) -> Kind:
        """What this task does in its own way."""
        return (EachStep if self.spec.each_step else KINDS[self.spec.task])(self)

    @cached_property
    def document_ends(self) -> DocumentEnds | None:
        """What ends a document in a stream of tokens, by `data.reset`."""
        return DocumentEnds.of(self.spec.data.reset, self.codec)

    @property
    def levels(self) -> tuple[float, ...] | None:
        """The quantiles that a forecast has, those that the ends of bands stand for included; None: forecasts are single values."""
        return self.spec.data.levels if self.bands is None else self.bands.levels

    def part(self, name: str, data: Sequences) -> Part:
        """The steps and targets of a part."""
        return self.kind.part(name, data)

    def unlabelled(self, data: Sequences) -> View:
        """A view without targets, for prediction."""
        return self.kind.unlabelled(data)

    def model(self, train: Sequences | None = None, holding: Holding | None = None, *, draw: bool = True) -> Model:
        """Build the network; see `network`."""
        return network(self, train, holding, draw=draw)

    def meter(self, device: torch.device, part: Part, *, by_series: bool = False, tops: Sequence[int] = ()) -> Metric | None:
        """An empty metric for one pass over a part; `by_series`: forecasts are scored for each series, too; `tops`: with classes, numbers
        of likeliest ones of which one must be right.
        """
        return self.kind.meter(device, part, by_series=by_series, tops=tops)

    def derived(self, loss: float) -> dict[str, float]:
        """The metrics that follow from the loss alone."""
        return self.kind.derived(loss)
