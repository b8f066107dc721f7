"""The train section of the spec: optimizer, schedule, evaluation, the metric that decides which weights are the best, snapshots, and when
replicas exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from carrywave.spec.section import Positive, Section, Share
from carrywave.spec.sync_keys import check_sync

BestMetric = Literal[
    "loss",
    "unweighted_loss",
    "perplexity",
    "bits",
    "accuracy",
    "micro_f1",
    "macro_f1",
    "exact_match",
    "span_f1",
    "top_5_accuracy",
    "label_error",
    "sequence_error",
    "mae",
    "rmse",
    "mase",
    "pinball",
    "crps",
    "weighted_quantile_loss",
    "nse_median",
    "kge_median",
]

OF_TASK: Mapping[str, tuple[str, ...]] = {
    "language": ("loss", "perplexity", "bits"),
    "classification": ("loss", "unweighted_loss", "accuracy", "macro_f1", "top_5_accuracy"),
    "tagging": ("loss", "unweighted_loss", "accuracy", "macro_f1", "span_f1", "top_5_accuracy"),
    "transcription": ("loss", "label_error", "sequence_error"),
    "forecasting": ("loss", "mae", "rmse", "mase", "pinball", "crps", "weighted_quantile_loss"),
    "regression": ("loss", "mae", "rmse"),
}
EACH_STEP = ("loss", "mae", "rmse", "nse_median", "kge_median")  # of regression with data.each_step
MULTI_LABEL = ("loss", "unweighted_loss", "micro_f1", "macro_f1", "exact_match")  # of any task with data.multi_label
# Better if higher; every other metric is better if lower.
HIGHER = ("accuracy", "micro_f1", "macro_f1", "exact_match", "span_f1", "top_5_accuracy", "nse_median", "kge_median")
OF_LOSS = ("loss", "perplexity", "bits")  # follow from the loss; the others need what a head predicts
OF_DISTRIBUTIONS = ("crps", "weighted_quantile_loss")
OF_POINTS = ("mae", "rmse", "mase")  # need a point forecast, which among quantiles is the median


def check_best(
    metric: str,
    task: str,
    quantiles: Sequence[float] | None,
    *,
    weighted: bool,
    multi_label: bool = False,
    distribution: bool = False,
    each_step: bool = False,
) -> None:
    """Refuse a metric that evaluations of this task do not have."""
    known = MULTI_LABEL if multi_label else EACH_STEP if each_step else OF_TASK[task]
    if metric not in known:
        of = f"{task} with several labels (data.multi_label)" if multi_label else f"{task} at every step" if each_step else task
        raise ValueError(f"train.best={metric} is not a metric of {of}; use {', '.join(known)}")
    if metric == "unweighted_loss" and not weighted:
        raise ValueError("train.best=unweighted_loss is for train.class_weights and data.weight, without which it is the loss; use loss")
    if metric in OF_DISTRIBUTIONS and not distribution:
        raise ValueError(f"train.best={metric} needs data.distribution; set it, or use loss, mae, rmse or mase")
    if metric == "pinball" and quantiles is None:
        raise ValueError("train.best=pinball needs data.quantiles; set them, or use loss, mae, rmse or mase")
    if metric in OF_POINTS and quantiles is not None and 0.5 not in quantiles:
        raise ValueError(f"train.best={metric} needs the median; add 0.5 to data.quantiles, or use pinball")


def score(metric: str, value: float) -> float:
    """The value in a form in which lower is better."""
    return -value if metric in HIGHER else value


class TrainSpec(Section):
    """The optimisation."""

    optimizer: Literal["sgd", "adam", "adamw", "ntasgd"] = Field(
        "adam", description="update rule; ntasgd is SGD that averages its weights once it stops improving"
    )
    lr: Annotated[float, Field(gt=0.0)] = Field(2e-3, description="learning rate")
    momentum: Share = Field(0.0, description="sgd only")
    betas: tuple[Share, Share] = Field((0.9, 0.999), description="adam and adamw")
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="pulls weights towards zero; adamw applies it apart from the gradient, the others through it"
    )
    nonmono: Positive = Field(5, description="ntasgd: evaluations without improvement before averaging starts")
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None,
        description="keep an exponential moving average of the weights after each step, with this decay, such as 0.999; it is what is "
        "evaluated, written as weights and exported. Any optimizer but ntasgd, which averages by itself",
    )
    clip: Annotated[float, Field(gt=0.0)] | None = Field(None, description="clip gradients to this norm, taken over all of them together")
    epochs: Annotated[int, Field(ge=0)] = Field(
        0, description="passes over train; 0: as many as make one to three thousand steps, at least 5 and at most 150"
    )
    max_steps: Positive | None = Field(None, description="stop after this many optimizer steps")
    accumulate: Positive = Field(1, description="batches per optimizer step")
    precision: Literal["auto", "fp32", "tf32", "fp64", "bf16", "fp16"] = Field(
        "auto",
        description="arithmetic; with bf16 and fp16, parameters and optimizer state stay in fp32. auto: bf16 if all devices are GPUs made "
        "for it (compute capability 8.0 or higher), otherwise fp32; the spec in a run's folder says which",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(1, description="seed of all randomness: weights, order, dropout")
    schedule: Literal["constant", "cosine", "plateau", "linear"] = Field("constant", description="learning-rate schedule")
    warmup: Annotated[int, Field(ge=0)] = Field(0, description="steps of linear warm-up, in any schedule")
    hold: Annotated[int, Field(ge=0)] = Field(0, description="cosine, linear: steps at the full learning rate, from the end of the warm-up")
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(0.25, description="plateau multiplies the learning rate by this")
    patience: Annotated[int, Field(ge=0)] = Field(0, description="plateau: evaluations without improvement that are tolerated")
    alpha: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="activation regularisation: times the mean square of the last layer's outputs"
    )
    beta: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="temporal activation regularisation: times the mean square of their changes from step to step"
    )
    evaluate_every: Positive | None = Field(None, description="optimizer steps between evaluations; by default at the end of each epoch")
    best: BestMetric = Field(
        "loss",
        description="metric of valid that picks the best weights, and that early_stop and plateau look at: accuracies, F1, "
        "exact_match, nse_median and kge_median better if higher, the others if lower; with class_weights, loss is the weighted one, and "
        "unweighted_loss the one without them",
    )
    weights: Literal["auto", "best", "last"] = Field(
        "auto",
        description="which weights a run keeps: those of the best evaluation, or those after the last step; auto: the best, but the last "
        "if valid has fewer than 100 sequences with one target each, too few to choose by",
    )
    early_stop: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="stop after this many evaluations without improvement of train.best; 0: never; by default a third of the "
        "evaluations, at least 5 and at most 15, but never if train.epochs is set",
    )
    class_weights: Literal["balanced"] | dict[str, Annotated[float, Field(gt=0.0)]] | None = Field(
        None,
        description="classification, tagging: weights of the labels in the loss, by default 1; balanced: the same for each in total. "
        "With data.multi_label, weights of targets that are 1 (torch's pos_weight); balanced: zeros and ones of a label weigh the same",
    )
    label_smoothing: Share = Field(
        0.0,
        description="classification, tagging: the share of each target in training that is spread evenly over all labels, as torch's cross "
        "entropy has it; losses of evaluations are without it. With data.multi_label, half of it is taken from ones and given to zeros",
    )
    loss: Literal["mse", "mae", "nse"] = Field(
        "mse",
        description="regression, forecasting without quantiles: the loss; nse (data.each_step): the squared error in units of the "
        "deviation of each series",
    )
    on_nan: Literal["stop", "skip", "back"] = Field(
        "stop",
        description="what to do when a loss or gradient is not finite: stop the run, skip the step, or go back to the last snapshot with "
        "half the learning rate; see docs/reliability.md",
    )
    log_every: Positive = Field(50, description="optimizer steps between lines in metrics.jsonl")
    track: tuple[Literal["mlflow", "wandb"], ...] = Field(
        (), description="trackers that get a copy of metrics.jsonl, such as [mlflow]; nothing is sent to any other; see docs/python.md"
    )
    snapshot_every: Annotated[int, Field(ge=0)] | None = Field(
        1000, description="optimizer steps between snapshots within an epoch; 0: only at the end of each epoch, where one is always taken"
    )
    keep: Positive = Field(2, description="snapshots to keep")
    sync: Literal["step", "local", "diloco", "async"] = Field(
        "step",
        description="when replicas exchange: at every step, as one device would compute; or, each another algorithm for slow links, see "
        "docs/parallel.md: local averages weights every sync_every steps, diloco takes an outer step on their difference, async pushes "
        "gradients whenever they are ready, with a result that depends on timing",
    )
    sync_every: Positive = Field(
        50, description="local, diloco: optimizer steps that a replica takes on its own between exchanges; async: between meetings"
    )
    sync_momentum: Share | None = Field(
        None,
        description="local: momentum of the averaged weights from exchange to exchange (BMUF), by default 0; diloco: Nesterov momentum of "
        "the outer step, by default 0.5",
    )
    sync_lr: Annotated[float, Field(gt=0.0)] = Field(1.0, description="diloco: learning rate of the outer step")
    sync_staleness: Annotated[int, Field(ge=0)] = Field(
        4, description="async: optimizer steps that a replica may be ahead of the slowest before it waits"
    )

    @property
    def exchange_momentum(self) -> float:
        """The momentum of what replicas exchange."""
        return self.sync_momentum if self.sync_momentum is not None else 0.5 if self.sync == "diloco" else 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ema is not None and self.optimizer == "ntasgd":
            raise ValueError("optimizer=ntasgd averages weights by itself; remove ema, or use another optimizer")
        check_sync(dict(self), {name: field.default for name, field in TrainSpec.model_fields.items()})
        return self
