"""A task combines a view of the data, a network with its head, and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.data.codec import Codec
from carrywave.data.sequences import History, Sequences, View
from carrywave.data.tables.channels import LARGEST, LEAST, series_names
from carrywave.data.tables.series import unseen_series
from carrywave.data.tables.window_scale import WindowScale
from carrywave.data.text.documents import DocumentEnds
from carrywave.data.text.tag_scheme import check_sequences, tags_of
from carrywave.data.text.tokenizers import UNKNOWN
from carrywave.errors import DataError, SpecError
from carrywave.model.dropout import Dropout
from carrywave.model.encoders import Embedding, Features, Numbers
from carrywave.model.initialization import initialize, rounded_by_host
from carrywave.model.lstm import class_of
from carrywave.model.model import Model
from carrywave.model.over_time.front import Front
from carrywave.model.parameter_placement import Holding, allocate
from carrywave.model.pretrained.embeddings import load_pretrained
from carrywave.model.pretrained.layers import holds_layers, load_lstm, read_lstm
from carrywave.model.sample_weights import seen
from carrywave.model.vocabulary.spelled_words import SpelledWords
from carrywave.spec.facts import DataFacts
from carrywave.spec.model_spec import CHARACTER_EMBEDDING
from carrywave.spec.spec import Spec
from carrywave.spec.step_inputs import step_inputs
from carrywave.tasks import metrics, ridge, views
from carrywave.tasks.bands import BandErrors, Bands
from carrywave.tasks.baselines import LAGS, LINEAR_METRICS, BaselineErrors, baselines, line_of, without_season
from carrywave.tasks.distribution_metrics import DistributionErrors
from carrywave.tasks.first_weights import first_rare, set_first_weights
from carrywave.tasks.heads import Encoder, head_of
from carrywave.tasks.kept_forecasts import KeptForecasts
from carrywave.tasks.linear.part import LinearPart
from carrywave.tasks.mase_scale import MaseScale
from carrywave.tasks.span_metrics import TagConfusion
from carrywave.tasks.step_metrics import StepErrors
from carrywave.tasks.transcription import targets as transcripts


@dataclass(frozen=True)
class Part:
    """One part of the data as a task reads it: train, valid, test, or a file given later."""

    name: str
    data: Sequences
    view: View
    baselines: Mapping[str, BaselineErrors] = field(default_factory=dict)  # forecasting: what simple forecasts come to
    baseline: dict[str, float] = field(default_factory=dict)  # their metrics
    notes: tuple[str, ...] = ()  # remarks for the user
    change_SC: NDArray[np.float64] | None = None  # forecasting: denominator of MASE per series and column; 0 excludes it
    kept: bool = False  # forecasting: an evaluation keeps every forecast instead of summing errors


@dataclass(frozen=True)
class Task:
    """What a spec and its data define: views, network and metrics."""

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
        """Return the task of a run that trains on this data."""
        if spec.task != "forecasting":
            return Task(spec, codec, facts)
        return Task(spec, codec, facts, MaseScale.of(train, codec, spec.data.season)).with_line(train)

    def with_line(self, train: Sequences) -> Task:
        """Return the task with a straight line through the training data to compare forecasts with."""
        if self.spec.task != "forecasting":
            return self
        return replace(self, line=line_of(train, np.array(self.codec.targets), self.spec.lags, self.spec.data.horizon))

    def part(self, name: str, data: Sequences) -> Part:
        """Return the steps and targets of a part."""
        match self.spec.task:
            case "language":
                view = views.language(data, self.document_ends)
                if name == "train" and self.document_ends is not None and not self.document_ends.any_in(data.inputs):
                    raise DataError(f"train never has data.reset={self.spec.data.reset!r}, which is to end its documents; set what does")
            case "tagging":
                view = self._with_history(views.tagging(data), data)
                if self.spec.model.crf:
                    check_sequences(name, data, self.facts.labels, self.spec.data.scheme)
            case "forecasting":
                layout, targets = views.Layout.of(self.codec), np.array(self.codec.targets)
                view = views.forecasting(data, self.spec, targets, layout)
            case "transcription":
                view = transcripts.view(name, data, self.codec, None if self.own_model else self.spec.model)
            case "regression" if self.spec.each_step:
                view = views.each_step(data, self.spec.train.loss)
            case "classification" | "regression":
                view = views.pooled(data)
                if self.linear is not None and name != "train":
                    return self._beside_linear(Part(name, data, view), self.linear)
        if self.spec.task != "forecasting":
            return Part(name, data, view)
        view = self._with_history(view, data)
        change_SC = self.scale.of_series(data, self.codec.channels)
        if name == "train":
            return Part(name, data, view, change_SC=change_SC)
        simple, no_line = baselines(data, self.spec.data, np.array(self.codec.targets), change_SC, self.line)
        unseen = unseen_series(name, series_names(data.names or (), self.codec.channels), self.codec)
        notes = self._short_of_season(name, data) + unseen + self._without_mase(name, data)
        notes += () if no_line is None else (f"{name}: {no_line}",)
        return Part(name, data, view, simple, self._baseline(simple), notes, change_SC)

    def _beside_linear(self, part: Part, linear: LinearPart) -> Part:
        """The part with the answers of the linear part for its sequences, and what these score by themselves."""
        answers_NV = linear(part.data, held=part.name == "valid")
        part = replace(part, view=replace(part.view, linear=linear.beside(answers_NV)))
        meter = self.meter(torch.device("cpu"), part)
        if meter is None or part.view.labels is None:
            return part
        targets = torch.from_numpy(np.array(part.view.labels))
        weights = None if part.view.weights is None else torch.from_numpy(np.array(part.view.weights))
        numbers_N = torch.arange(len(targets))
        known = seen(targets, weights, pooled=True)
        assert known is not None
        meter.update(torch.from_numpy(answers_NV), known, numbers_N, torch.zeros_like(numbers_N))
        scores = {f"linear_{name}": value for name, value in meter.values().items() if name in LINEAR_METRICS}
        return replace(part, baseline=scores)

    @cached_property
    def document_ends(self) -> DocumentEnds | None:
        """What ends a document in a stream of tokens, by `data.reset`."""
        return DocumentEnds.of(self.spec.data.reset, self.codec)

    def _baseline(self, simple: Mapping[str, BaselineErrors]) -> dict[str, float]:
        """Return the metrics of simple forecasts, under the model's metric names prefixed with theirs."""
        quantiles = self.spec.data.levels
        point = quantiles is None or 0.5 in quantiles
        values = {metric: value for name, errors in simple.items() for metric, value in errors.metrics(name, point=point).items()}
        return values if self.line is None or "ridge" not in simple else values | {LAGS: float(self.line.weights_CNK.shape[1])}

    def _short_of_season(self, name: str, data: Sequences) -> tuple[str, ...]:
        season = self.spec.data.season
        short, total = without_season(data, self.spec.data)
        if not short or season == 1:
            return ()
        columns = len(self.codec.channels) or 1  # which are forecast together, as far as a person sees
        many = f"{short // columns:,} of {total // columns:,} forecasts"
        fact = f"{many} have less than a season ({season} rows) before them, so their naive forecast is the last value"
        return (f"{name}: {fact}; add earlier rows",)

    def _without_mase(self, name: str, data: Sequences) -> tuple[str, ...]:
        """Return a line about series that train does not contain: their seasonal change is unknown."""
        many, channels = len(self.codec.channels) or 1, self.codec.channels
        total, new = len(data) // many, len(self.scale.unknown((data.names or ())[::many], channels))
        quantiles = self.spec.data.levels
        if not new or (quantiles is not None and 0.5 not in quantiles):
            return ()
        which = f"{new:,} of {total:,} series" if new < total else "all series"
        return (f"{name}: mase leaves out {which}, because train does not contain them; use the series names of train",)

    def model(self, train: Sequences | None = None, holding: Holding | None = None, *, draw: bool = True) -> Model:
        """Build the network, with initial weights keyed by the seed. Balanced class weights need the training data.

        `holding`: it gets memory for these units alone, on their device. Without `draw` the weights are left as they are, to be loaded.
        """
        spec, empty = self.spec.model, None if holding is None else "meta"
        tokens = self.facts.vocabulary > 0
        inputs = step_inputs(self.spec, self.facts)
        width = (spec.embedding or spec.widths[0]) if tokens else inputs.width
        encoder: Encoder = Features(inputs) if inputs.tables else Numbers(width)
        if tokens:
            encoder = self._words(Embedding(self.facts.vocabulary, width, spec.dropout_words, device=empty), train)
        front = self._front(encoder)
        hidden = spec.dropout if spec.dropout_hidden is None else spec.dropout_hidden
        lstm = class_of(spec.cell)(
            front.width,
            spec.widths,
            spec.layers,
            dropout=hidden,
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
            kernel=self.spec.plan_spec.kernel,
            device=empty,
        )
        first = spec.dropout if spec.dropout_input is None else spec.dropout_input
        last = spec.dropout if spec.dropout_output is None else spec.dropout_output
        # Numeric inputs are few and each one matters, so by default they get no dropout.
        first = first if tokens or spec.dropout_input is not None else 0.0
        model = Model(
            front,
            lstm,
            head_of(self.spec, self.codec, self.facts, lstm.output_size, encoder, train, empty),
            dropout_in=Dropout(first, locked=spec.locked, name="dropout_in"),
            dropout_out=Dropout(last, locked=spec.locked, name="dropout_out"),
        )
        if holding is not None:
            allocate(model, holding)
        if not draw:
            return model
        initialize(model, self.spec.train.seed, init=spec.init, forget_bias=spec.forget_bias)
        model.drawn = holding is not None
        model.rounded_by_host = rounded_by_host(model, spec.init)
        model.rounded_by_host |= set_first_weights(model, self.spec, self.codec, train, self.line)
        if spec.pretrained is not None and holds_layers(spec.pretrained):
            load_lstm(lstm, read_lstm(spec.pretrained), spec.pretrained)
        elif spec.pretrained is not None:
            self._pretrain(encoder)
        return model

    def _front(self, encoder: Encoder) -> Encoder | Front:
        """The encoder, with the convolutions of `model.front` behind it."""
        spec = self.spec.model
        if not spec.front_layers:
            return encoder
        words = isinstance(encoder, Embedding | SpelledWords)
        return Front(encoder if words else encoder.width, spec.front_layers, spec.front_dropout, scales=spec.front_scales)

    def _words(self, words: Embedding, train: Sequences | None) -> Embedding | SpelledWords:
        """The embedding of tokens, with what reads their characters beside it."""
        spec = self.spec.model
        if spec.dropout_rare and train is not None:
            if UNKNOWN not in self.codec.vocabulary:
                raise SpecError(
                    "model.dropout_rare makes words <unk>, which the vocabulary does not have; set data.tokens=word, or remove it"
                )
            words.rare = (first_rare(train, words.vocabulary), self.codec.vocabulary.index(UNKNOWN), spec.dropout_rare)
        if not self.facts.characters:
            return words
        facts = self.facts
        return SpelledWords(words, spec.characters, facts.characters, facts.word_length, CHARACTER_EMBEDDING, spec.character_width)

    def unlabelled(self, data: Sequences) -> View:
        """Return a view without targets, for prediction."""
        if self.spec.task != "forecasting":
            beside = None if self.linear is None else self.linear.beside(self.linear(data))
            view = View(data.inputs, data.starts, data.lengths, resets_at=views.resets(data, self.document_ends), linear=beside)
            return self._with_history(view, data)
        return self._with_history(views.series(data, self.spec, views.Layout.of(self.codec)), data)

    def _with_history(self, view: View, data: Sequences) -> View:
        """The view with the past values that the head reads and, of counts, their units; or with the characters of words."""
        if self.spec.model.word_scores:
            return replace(view, history=History(1, np.arange(1, data.inputs.shape[1])))
        if self.spec.task != "forecasting":
            return view
        past, targets = self.spec.past_steps, np.array(self.codec.targets)
        units = data.units[:, targets] if self.spec.data.counts and data.units is not None else None
        return replace(view, history=History(past, targets, units, data.firsts)) if past else view

    def _pretrain(self, encoder: Encoder) -> None:
        path, encoder = self.spec.model.pretrained, encoder.words if isinstance(encoder, SpelledWords) else encoder
        if path is None or not isinstance(encoder, Embedding) or not self.codec.vocabulary:
            raise SpecError(f"model.pretrained={path} needs a vocabulary of words or characters; set data.tokens=word, or remove it")
        load_pretrained(path, list(self.codec.vocabulary), encoder.weight)

    @property
    def levels(self) -> tuple[float, ...] | None:
        """The quantiles that a forecast has, those that the ends of bands stand for included; None: forecasts are single values."""
        return self.spec.data.levels if self.bands is None else self.bands.levels

    def meter(self, device: torch.device, part: Part, *, by_series: bool = False, tops: Sequence[int] = ()) -> metrics.Metric | None:
        """Create an empty metric for one pass over a part; `by_series`: forecasts are scored for each series, too. `tops` as in
        `metrics.for_task`.
        """
        if part.kept:
            shape = self.spec.data.horizon, self.facts.outputs, len(self.codec.channels)
            return KeptForecasts(part.view, *shape, device, self._deviation(part.data, self.spec.scale_steps, device))
        change = None if part.change_SC is None else torch.from_numpy(part.change_SC)
        unit: Tensor | None = None
        columns: metrics.Columns | None = None
        if self.spec.each_step:
            return StepErrors(self.codec, part.data.names or (), device)
        if self.spec.task == "regression":
            units = torch.tensor(self.codec.target_std, dtype=torch.float64)
            # Numbers of different units are not averaged in them.
            unit, columns = (units, None) if len(units) == 1 else (None, metrics.Columns(tuple(map(str, range(len(units)))), units[None]))
        if self.spec.task == "forecasting" and part.data.units is not None:
            names, channels = self.codec.forecast_columns, self.codec.channels
            units = torch.from_numpy(np.ascontiguousarray(part.data.units[:, list(self.codec.targets)]))
            series = series_names(part.data.names or (), channels) if by_series else ()
            slope = self._slope(part.data, device) if self.codec.transform in LEAST else None
            summed = self.codec.transform == "diff"
            whole = self._targets(part, device) if summed and part.view.weights_at is not None else None
            columns = metrics.Columns(names, units, series, apart=bool(channels), summed=summed, whole=whole, slope=slope)
            if self.spec.data.distribution != "none":
                sizes = self._future(part.data, device) if self.codec.transform == "none" else None
                return DistributionErrors(self.spec.data, self.facts.outputs, change, device, columns, sizes)
            if self.bands is not None:
                deviation = self._deviation(part.data, self.bands.steps, device)
                return BandErrors(self.spec.data, self.facts.outputs, change, device, columns, self.bands, deviation)
        weighted = part.view.weights is not None or part.view.weights_at is not None
        if self.spec.task == "tagging" and not self.spec.data.multi_label and tags_of(self.facts.labels) is not None:
            weighted, chosen = weighted or self.spec.train.class_weights is not None, self.spec.model.crf is True
            return TagConfusion(self.facts.labels, part.data, device, tops, weighted=weighted, chosen=chosen)
        return metrics.for_task(self.spec, self.facts, device, change, unit, columns, tops, weighted=weighted)

    def _targets(self, part: Part, device: torch.device) -> metrics.Slope:
        """The targets of rows, whatever their weight."""
        at, starts, last = part.view.targets_at, part.data.starts, len(part.data.inputs) - 1
        assert at is not None

        def targets(at_B: Tensor, first_B: Tensor, steps: int) -> Tensor:
            rows_TB = starts[at_B.cpu().numpy()] + first_B.cpu().numpy() + np.arange(steps)[:, None]
            return torch.from_numpy(at(np.minimum(rows_TB, last))).to(device, torch.float64)

        return targets

    def _slope(self, data: Sequences, device: torch.device) -> metrics.Slope:
        """What errors of logarithms are multiplied by in the data itself: its values, for log1p 1 more."""
        future = self._future(data, device)
        return lambda at_B, first_B, steps: future(at_B, first_B, steps).clamp(max=LARGEST).exp()

    def _future(self, data: Sequences, device: torch.device) -> metrics.Slope:
        """What comes after each row, in the units of the data or of its logarithms."""
        targets = np.array(self.codec.targets)
        assert data.units is not None
        assert data.means is not None
        mean_SC, std_SC = data.means[:, targets], data.units[:, targets]
        ahead = np.arange(1, self.spec.data.horizon + 1)

        def future(at_B: Tensor, first_B: Tensor, steps: int) -> Tensor:
            at, first = at_B.cpu().numpy(), first_B.cpu().numpy()
            rows_TBH = (data.starts[at] + first + np.arange(steps)[:, None])[..., None] + ahead
            values_TBHC = np.asarray(data.inputs[np.minimum(rows_TBH, len(data.inputs) - 1)][..., targets], np.float64)
            return torch.from_numpy(values_TBHC * std_SC[at][:, None] + mean_SC[at][:, None]).to(device)

        return future

    def _deviation(self, data: Sequences, steps: int, device: torch.device) -> metrics.Slope | None:
        """The deviation of the last values at each row, in standardised units, the same for all steps ahead; None without `steps`."""
        if not steps:
            return None
        scale = WindowScale(data, np.array(self.codec.targets), steps)

        def deviation(at_B: Tensor, first_B: Tensor, steps: int) -> Tensor:
            at, first = at_B.cpu().numpy(), first_B.cpu().numpy()
            rows_TB = data.starts[at] + np.minimum(first + np.arange(steps)[:, None], data.lengths[at] - 1)
            return torch.from_numpy(scale(rows_TB)[1]).to(device, torch.float64)[:, :, None]

        return deviation

    def derived(self, loss: float) -> dict[str, float]:
        """Return the metrics that follow from the loss alone."""
        return metrics.language(loss) if self.spec.task == "language" else {}
