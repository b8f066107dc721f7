"""What a trained model does with data it was not trained on, to be shown: texts, forecasts, confusions, pairs of numbers. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_CLASSES = 24  # of a confusion matrix
MOST_LABELS = 100  # rows of a table by label


@dataclass(frozen=True)
class Continued:
    """A text from the data, what the model wrote after it, and what really follows."""

    prompt: str
    written: str
    truth: str


@dataclass(frozen=True)
class Forecasted:
    """The last forecast of a series within the data, beside what came."""

    title: str
    history: Sequence[tuple[float, float]]  # steps relative to the origin, values
    truth: Sequence[tuple[float, float]]
    forecast: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]]  # step, lower, upper; empty: no quantiles
    band_name: str = ""
    point_name: str = "forecast"
    times: Sequence[str] = ()  # of the history and what came after it; empty: not known


@dataclass(frozen=True)
class Distributed:
    """How large errors are by step ahead, beside those of simple forecasts, and in which series they are largest."""

    title: str
    by_step: Sequence[tuple[str, Sequence[float]]]  # the model first
    worst: Sequence[tuple[str, float]]  # series and their errors, the largest first; empty if there are few
    series: int


@dataclass(frozen=True)
class Confused:
    """How often each label was taken for each other."""

    labels: Sequence[str]
    counts: Sequence[Sequence[int]]  # [truth][prediction]

    def folded(self, most: int = MOST_CLASSES) -> Confused:
        """The labels that occur most often; the rest counts as one."""
        if len(self.labels) <= most:
            return self
        seen = [sum(row) for row in self.counts]
        kept = sorted(sorted(range(len(seen)), key=lambda at: -seen[at])[: most - 1])
        place = {at: number for number, at in enumerate(kept)}
        counts = [[0] * most for _ in range(most)]
        for truth, row in enumerate(self.counts):
            for guess, many in enumerate(row):
                counts[place.get(truth, most - 1)][place.get(guess, most - 1)] += many
        rest = f"{len(self.labels) - most + 1} others"
        return Confused([*(self.labels[at] for at in kept), rest], counts)

    @property
    def accuracy(self) -> float | None:
        """The share of targets that were met; None without any."""
        total = sum(map(sum, self.counts))
        return sum(row[at] for at, row in enumerate(self.counts)) / total if total else None


@dataclass(frozen=True)
class Decided:
    """How well each of several labels, or each type of spans, is predicted: its name, precision, recall, F1, how often it holds and how
    often it is predicted.
    """

    rows: Sequence[Mapping[str, str | int | float]]  # as `tasks.label_metrics` and `tasks.span_metrics` have them
    name: str = "label"  # of what the rows are for

    def folded(self, most: int = MOST_LABELS) -> Sequence[Mapping[str, str | int | float]]:
        """The rows of the labels that hold most often, those first."""
        return sorted(self.rows, key=lambda row: -int(row["targets"]))[:most]


@dataclass(frozen=True)
class Transcribed:
    """Sequences, as far as they can be written, with the labels that they have and those that the model finds in them."""

    rows: Sequence[tuple[str, str, str]]  # input, truth, prediction


@dataclass(frozen=True)
class Paired:
    """Numbers that were to be predicted, and those that were."""

    title: str
    points: Sequence[tuple[float, float]]  # truth, prediction


@dataclass(frozen=True)
class Followed:
    """What was measured at the last steps of a series, and what was estimated."""

    title: str
    truth: Sequence[tuple[float, float]]  # step, value, where there is one
    estimate: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Ranked:
    """How well each series is estimated: its NSE, KGE, RMSE and number of targets."""

    rows: Sequence[Mapping[str, str | int | float]]  # as `tasks.step_metrics` has them

    def folded(self, most: int = MOST_LABELS) -> Sequence[Mapping[str, str | int | float]]:
        """The rows of the series with the lowest NSE, those first; series without one come last."""
        return sorted(self.rows, key=lambda row: float(row["nse"]) if row["nse"] == row["nse"] else float("inf"))[:most]


Sample = Continued | Forecasted | Confused | Decided | Paired | Distributed | Followed | Ranked | Transcribed


@dataclass(frozen=True)
class Samples:
    """The samples of a run, and a sentence about them; or the reason why there are none."""

    note: str
    shown: Sequence[Sample] = ()
