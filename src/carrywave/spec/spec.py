"""The spec as a whole: its sections, and what must fit together between them. Frozen pydantic models.

Every field that affects the result is in one of the sections, each of which has a file of its own. `PlanSpec` says how the work is split,
which affects speed and memory only. Torch-free, so a laptop can validate a spec for a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from carrywave.spec.data_spec import BatchSpec, DataSpec
from carrywave.spec.model_spec import ModelSpec
from carrywave.spec.plan_spec import PlanSpec
from carrywave.spec.section import Section
from carrywave.spec.signal_spec import total_stride
from carrywave.spec.train_spec import TrainSpec, check_best

PAST_STEPS = 96  # last values that a straight line reads, and that give a moving scale, where a spec does not say how many

TaskName = Literal["language", "classification", "tagging", "transcription", "forecasting", "regression"]


class Spec(Section):
    """One complete training run.

    >>> import carrywave as cw
    >>> cw.Spec.model_validate({"task": "forecasting", "data": {"horizon": 12}}).data.horizon
    12
    """

    task: TaskName = Field(
        "language",
        description="what to predict: the next token, a label per sequence, a label per step, labels in a row that are in no fixed place "
        "(transcription), the next values, numbers per sequence or, with data.each_step, per step",
    )
    data: DataSpec = DataSpec()
    model: ModelSpec = ModelSpec()
    batch: BatchSpec = BatchSpec()
    train: TrainSpec = TrainSpec()
    plan: Literal["auto"] | PlanSpec = "auto"

    @model_validator(mode="after")
    def _check(self) -> Self:
        wrong = next((message for is_wrong, message in self._combinations() if is_wrong), None)
        if wrong is not None:
            raise ValueError(wrong)
        check_best(
            self.train.best,
            self.task,
            self.data.levels,
            weighted=self.train.class_weights is not None or self.data.weight not in (None, "none"),
            multi_label=self.data.multi_label,
            distribution=self.data.distribution != "none",
            each_step=self.each_step,
        )
        return self

    def _combinations(self) -> Iterator[tuple[bool, str]]:
        """What cannot be together: whether it is, and the fact with the remedy."""
        task, data, model, batch, train, plan = self.task, self.data, self.model, self.batch, self.train, self.plan_spec
        last, first, stride = model.projection or model.widths[-1], model.embedding or model.widths[0], total_stride(model.front_layers)
        streams, read_on = self.streams, self.streams or task in ("language", "forecasting")
        yield model.tie and task != "language", f"model.tie is for language models, not for {task}; remove it"
        yield (
            model.tie and last != first,
            f"model.tie needs an embedding as wide as the last layer, got {first} and {last}; set model.embedding={last}",
        )
        separate = "use separate sequences (classification, regression, transcription or tagging with batch.tokens), or remove it"
        yield model.bidirectional and read_on, f"model.bidirectional cannot read a stream backwards; {separate}"
        for name, asked in (("model.front", bool(model.front_layers)), ("model.crf", model.crf is True), (task, task == "transcription")):
            whole = f"{name} reads whole sequences"
            yield asked and read_on, f"{whole}, but a stream is read in windows; {separate}"
            remedy = "use plan.micro_batches, which divides lanes instead, or remove it"
            yield asked and plan.chunk_steps is not None, f"plan.chunk_steps={plan.chunk_steps} cuts time, but {whole}; {remedy}"
        each = "tagging labels every step" if task == "tagging" else "every step has a target (data.each_step)"
        yield (
            stride > 1 and (task == "tagging" or self.each_step),
            f"model.front makes one step of {stride}, but {each}; list layers with a stride of 1, or remove it",
        )
        yield (
            stride > 1 and train.beta > 0,
            f"train.beta={train.beta:g} penalises changes from step to step, which model.front has merged; remove one of them",
        )
        chosen = model.crf is True
        yield chosen and task != "tagging", f"model.crf chooses the labels of a sequence together, for tagging, not for {task}; remove it"
        yield chosen and data.multi_label, "model.crf chooses one label for each step, but data.multi_label allows any number; remove one"
        for key, given in (
            ("train.class_weights", train.class_weights is not None),
            ("train.label_smoothing", train.label_smoothing > 0),
            ("train.best=top_5_accuracy", train.best == "top_5_accuracy"),
            ("plan.share_head", plan.share_head),
        ):
            yield chosen and given, f"{key} is for single labels, but model.crf chooses whole sequences; remove one of them"
        yield (
            model.word_scores > 0 and not (model.crf and model.characters),
            "model.word_scores is for model.crf, and reads characters; set model.crf=true and model.characters=50",
        )
        yield (
            task == "forecasting" and batch.tokens is not None,
            "forecasting reads streams; set batch.lanes and batch.steps instead of batch.tokens",
        )
        yield (
            task == "transcription" and data.augment is not None and data.augment.shift,
            "data.augment.shift moves steps, but transcription has labels for all of them, in their order; use noise and scale",
        )
        yield (
            self.each_step and data.standardize in ("sequence", "window"),
            f"data.standardize={data.standardize} needs targets that a new series does not have; use true, which is one scale for all "
            "series, or false",
        )
        yield (
            not self.each_step and data.missing == "mask",
            "data.missing=mask is for regression with data.each_step; use forward, interpolate or zero",
        )
        yield not self.each_step and train.loss == "nse", "train.loss=nse is for regression with data.each_step; use mse or mae"
        yield self.pooled and streams, f"{task} reads separate sequences; set batch.tokens instead of batch.lanes and batch.steps"
        yield (
            not streams and (batch.vary or batch.eval_lanes is not None),
            "batch.vary and batch.eval_lanes are for streams, not for separate sequences; remove them",
        )
        yield (
            data.standardize == "window" and task != "forecasting",
            f"data.standardize=window is for forecasting, not for {task}; use true, false or sequence",
        )
        yield (
            self.random_windows and batch.vary,
            "batch.vary is for windows that follow each other, which those of data.warmup do not; remove one of them",
        )
        yield (
            train.best == "weighted_quantile_loss" and data.transform != "none",
            "train.best=weighted_quantile_loss is in the units of the file, which data.transform is not; use crps",
        )
        yield (
            train.optimizer == "ntasgd" and train.schedule == "plateau",
            "train.optimizer=ntasgd averages weights instead of lowering the learning rate; use train.schedule=constant",
        )

    @property
    def streams(self) -> bool:
        """True if the data is cut into contiguous streams whose carry is kept, rather than into separate sequences."""
        if self.batch.tokens is not None:
            return False
        if self.batch.lanes is not None or self.batch.steps is not None:
            return True
        return self.task in ("language", "forecasting") or self.each_step

    @property
    def each_step(self) -> bool:
        """True for a regression with targets at every step."""
        return self.task == "regression" and self.data.each_step

    @property
    def reads_series(self) -> bool:
        """True if the data is a table of series, read along their times."""
        return self.task == "forecasting" or self.each_step

    @property
    def pooled(self) -> bool:
        """True if there is one target, or one row of them, per sequence."""
        return self.task in ("classification", "regression", "transcription") and not self.each_step

    @property
    def mixes(self) -> bool:
        """True if a linear part can answer for a sequence beside the network: with labels, or with numbers."""
        return self.pooled and self.task != "transcription"

    @property
    def reads_whole(self) -> bool:
        """True if a front or the head needs whole sequences at once, so that time cannot be cut."""
        return self.task == "transcription" or self.model.crf is True or bool(self.model.front_layers)

    @property
    def lanes(self) -> int:
        """Parallel streams in training."""
        return self.batch.lanes or 32

    @property
    def steps(self) -> int:
        """Steps per window of a stream."""
        return self.batch.steps or 64

    @property
    def tokens(self) -> int:
        """Steps in a batch of separate sequences, padding included."""
        return self.batch.tokens or 4096

    @property
    def scale_steps(self) -> int:
        """How many last values have the scale in which a forecaster reads each step (`data.standardize: window`); 0: none have."""
        return self.lags if self.data.standardize == "window" else 0

    @property
    def lags(self) -> int:
        """How many last values a straight line reads: those of the model's linear part, or else 96."""
        return self.model.linear or PAST_STEPS

    @property
    def augments(self) -> bool:
        """True if `data.augment` changes what is trained on: separate sequences, of numbers."""
        return self.data.augment is not None and not self.streams and not self.each_step

    @property
    def random_windows(self) -> bool:
        """True if windows of series come in random order, each after `data.warmup` steps that are not scored."""
        return self.each_step and self.streams and self.data.warmup > 0

    @property
    def starts_from(self) -> Literal["none", "last", "season"]:
        """Forecasting: the naive forecast that a model adds to: the last season if there is one, or the last value, as with a linear part.

        A difference is no count, so the head of counts finds their level itself; that the last change will come again says little.
        """
        if self.data.counts:
            return "none"
        if self.model.linear:
            return "last"
        return "season" if self.data.season > 1 else "none" if self.data.transform == "diff" else "last"

    @property
    def reads_changes(self) -> bool:
        """Forecasting: whether each column's change since the last season is read: if forecasts start from that season or from a line."""
        return self.starts_from == "season" or (self.model.linear > 0 and self.data.season > 1)

    @property
    def past_steps(self) -> int:
        """Forecasting: how many of the last values of each column the head reads at every step; 0 for none.

        That of counts reads at least one, beside which it finds the scale of the series.
        """
        return self.model.linear or self.scale_steps or int(self.data.counts)

    @property
    def plans_itself(self) -> bool:
        """True if the split is left to the planner; naming only a kernel does not change that."""
        return self.plan == "auto" or not self.plan.model_fields_set - {"kernel"}

    @property
    def plan_spec(self) -> PlanSpec:
        """The plan section; `auto` becomes one in which nothing is set."""
        return PlanSpec() if self.plan == "auto" else self.plan
