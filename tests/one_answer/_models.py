"""The models of the table, each with the data that it reads. This file alone knows where heads and encoders are defined.

Shapes: T time, B lane, F features, C numbers that are to be found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.cells.cell import Extra, StepWeights
from carrywave.model.encoders import Embedding, Numbers
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.heads.classes import Sigmoid, Softmax
from carrywave.model.heads.crf import CRF
from carrywave.model.heads.ctc import Ctc
from carrywave.model.heads.distributions import DistributionForecast
from carrywave.model.heads.forecast import Forecast
from carrywave.model.heads.pooled import PooledNumbers, PooledSigmoid, PooledSoftmax
from carrywave.model.heads.step_numbers import StepNumbers
from carrywave.model.heads.word_scores import WordScores
from carrywave.model.vocabulary.spelled_words import SpelledWords

VOCABULARY, FEATURES, CLASSES, HORIZON, NUMBERS = 9, 3, 4, 2, 2
CHARACTERS, LETTERS = 7, 3  # codes of characters, and how many of a word are read
SPANS = ("B-x", "B-y", "O", "I-x")  # names of the classes for a CRF: the last one may not follow everything
FRONT = [{"channels": 4, "kernel": 5, "stride": 2}, {"channels": 5, "kernel": 3, "stride": 2}]
DROP = 0.2


@dataclass(frozen=True)
class Kind:
    """What a model of the table reads and answers."""

    reads: str  # words, letters, numbers, own or norm (numbers, through modules of a user) or front
    answers: str  # a class, a label, numbers or labels of each: see `targets`
    pooled: bool = False  # one target for each lane, which is one sequence
    whole: bool = False  # needs whole sequences
    past: int = 0
    counts: bool = False


KINDS = {
    "tied words": Kind("words", "word"),
    "adaptive softmax": Kind("words", "word"),
    "tags": Kind("letters", "class"),
    "labels at each step": Kind("words", "labels"),
    "crf": Kind("letters", "class", whole=True),
    "own chain": Kind("own", "class", whole=True),
    "own": Kind("own", "class"),
    "own, pooled": Kind("own", "class", pooled=True),
    "ctc": Kind("numbers", "transcript", pooled=True, whole=True),
    "last": Kind("numbers", "class", pooled=True),
    "mean": Kind("words", "class", pooled=True),
    "attention": Kind("numbers", "class", pooled=True),
    "mean_max": Kind("numbers", "labels", pooled=True),
    "max of a front": Kind("front", "class", pooled=True, whole=True),
    "numbers of a lane": Kind("numbers", "numbers", pooled=True),
    "numbers at each step": Kind("numbers", "weighted numbers"),
    "forecast": Kind("numbers", "ahead", past=4),
    "quantiles": Kind("numbers", "ahead"),
    "normal": Kind("numbers", "ahead"),
    "student_t": Kind("numbers", "ahead", past=4),
    "poisson": Kind("numbers", "ahead", past=4, counts=True),
    "negative_binomial": Kind("numbers", "ahead", past=1, counts=True),
}
NORMED = "norm of a batch"
KINDS_OF_TABLE = tuple(KINDS)
KINDS[NORMED] = Kind("norm", "class")  # on plans that do not cut a batch
STEPWISE = [name for name, kind in KINDS.items() if not kind.pooled and not kind.whole]  # several stages can share these heads


class OddCarry(NamedTuple):
    out: Tensor
    slow: Tensor
    moved: Tensor


def _odd_step(gates: Tensor, carry: tuple[Tensor, ...], weights: StepWeights) -> tuple[Tensor, ...]:
    out, slow, moved = carry
    new, gate = (gates + weights.recurrent(out)).chunk(2, dim=-1)
    moved = 0.5 * moved + weights.named("gain") * weights.candidate(new.tanh())
    slow = slow + gate.sigmoid() * (moved - slow) * weights.named("pace").sigmoid()
    return weights.projected(weights.normed(slow).tanh()), slow, moved


def _odd_extra(hidden: int) -> dict[str, Extra]:
    return {"gain": Extra((hidden,), 1.0), "pace": Extra((1,), 0.5)}


class Odd(cw.Recurrent):
    """A cell of a user: three parts in its carry, one of them projected, two gates, and parameters of its own."""

    cell = cw.Cell("odd", gates=2, carry=OddCarry, step=_odd_step, extra=_odd_extra, projects=True, memory=True, forget_gate=1)


CELLS: dict[str, type[cw.Recurrent]] = {
    "lstm": cw.LSTM,
    "gru": cw.GRU,
    "rnn": cw.RNN,
    "rnn_relu": cw.RNN_RELU,  # type: ignore[attr-defined]
    "slstm": cw.SLSTM,  # type: ignore[attr-defined]
    "odd": Odd,
}


class OwnHead(nn.Module):
    """Classes at each step, as a user writes them; with dropout, and with weights."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.drop, self.out = nn.Dropout(drop), nn.Linear(width, CLASSES)

    def loss(self, y: Tensor, target: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits = self.out(self.drop(y)).flatten(0, 1)
        each = nn.functional.cross_entropy(logits, target.flatten(), ignore_index=-100, reduction="none").view(target.shape)
        weights = torch.ones_like(each) if weights is None else weights.expand(each.shape)
        return (weights * each).sum(), (weights * (target != -100)).sum()


class OwnPooled(nn.Module):
    """The power of each unit, and a class for each lane."""

    pooled = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.out = width, nn.Linear(width, CLASSES)

    def start(self, lanes: int, dtype: Any = None, device: Any = None) -> tuple[Tensor, ...]:
        return (torch.zeros(lanes, self.width, dtype=dtype, device=device),)

    def pool(self, y: Tensor, lengths: Tensor, acc: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        real = torch.arange(len(y), device=y.device)[:, None, None] < lengths[:, None]
        return (acc[0] + torch.where(real, y, 0.0).square().sum(0),)

    def loss(self, acc: tuple[Tensor, ...], label: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        each = nn.functional.cross_entropy(self.out(acc[0]), label, ignore_index=-100, reduction="none")
        weights = torch.ones_like(each) if weights is None else weights
        return (weights * each).sum(), (weights * (label != -100)).sum()


class Normed(nn.Sequential):
    """Of a user, so that it is tried on pieces of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class OwnChain(nn.Module):
    """A linear-chain CRF: the probability of a lane's tags is known when all of its steps are."""

    reads_whole = True

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.out, self.drop = nn.Linear(width, CLASSES), nn.Dropout(drop)
        self.moves = nn.Parameter(torch.linspace(-1.0, 1.0, CLASSES * CLASSES).view(CLASSES, CLASSES))

    def forward(self, y: Tensor, lengths: Tensor) -> Tensor:
        assert lengths.shape == y.shape[1:2]
        out: Tensor = self.out(self.drop(y))
        return out

    def loss(self, y: Tensor, target: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        scores, tags, rows = self(y, lengths), target.clamp(min=0), torch.arange(y.shape[1], device=y.device)
        right, every = scores[0, rows, tags[0]], scores[0]
        for step in range(1, len(y)):
            real = step < lengths
            right = right + real * (self.moves[tags[step - 1], tags[step]] + scores[step, rows, tags[step]])
            every = torch.where(real[:, None], (every[:, :, None] + self.moves).logsumexp(1) + scores[step], every)
        return torch.where(lengths > 0, every.logsumexp(-1) - right, 0.0).sum(), lengths.sum()


def model(head: str, cell: str, options: dict[str, Any], *, drop: bool, seed: int) -> cw.Model:
    """The model in float64, the same in every process. `options` are of the layers; `drop`: dropout around them and in encoder and head."""
    torch.manual_seed(seed)
    kind, drop_share = KINDS[head], DROP if drop else 0.0
    widths = options.pop("widths", [6, 6, 6])
    width_in = 6 if head == "tied words" else 5
    encoder: nn.Module
    match kind.reads:
        case "words" | "letters":
            width_in = options.get("proj_size") or widths[-1] if head == "tied words" else width_in
            encoder = words = Embedding(VOCABULARY, width_in, drop_share)
            if kind.reads == "letters":
                words.rare = (VOCABULARY // 2, VOCABULARY - 1, 0.5) if drop else None
                encoder = SpelledWords(words, CHARACTERS, LETTERS, 4, 6)
                width_in = encoder.width
        case "own":
            encoder = nn.Sequential(nn.Linear(FEATURES, width_in), nn.Tanh(), nn.Dropout(drop_share))
        case "norm":
            encoder = Normed(nn.Linear(FEATURES, width_in), cw.GlobalNorm(width_in), nn.Tanh(), nn.Dropout(drop_share))
        case "front":
            encoder = cw.Front(FEATURES, FRONT, dropout=drop_share)
            width_in = encoder.width
        case _:
            encoder, width_in = Numbers(FEATURES), FEATURES
    layers = CELLS[cell](width_in, widths, len(widths), **options)
    dropouts = {name: nn.Dropout(drop_share) for name in ("dropout_in", "dropout_out")} if drop else {}
    made = cw.Model(encoder, layers, _head(head, layers, encoder, drop_share), **dropouts).double()
    with torch.no_grad():  # a learned carry starts at zero, where a lane that is not reset could not be told from one that is
        for name, parameter in made.named_parameters():
            if ".carry_" in name:
                parameter.uniform_(-0.5, 0.5)
    return made


def _head(head: str, layers: cw.Recurrent, encoder: Any, drop: float) -> nn.Module:
    width, weights = layers.output_size, torch.tensor([0.5, 2.0, 1.0, 3.0])
    kind = KINDS[head]
    match head:
        case "tied words":
            return Softmax(width, VOCABULARY, tied=encoder.weight)
        case "adaptive softmax":
            return AdaptiveSoftmax(width, VOCABULARY, [3])
        case "tags":
            return Softmax(width, CLASSES, weights=weights, label_smoothing=0.1)
        case "labels at each step":
            return Sigmoid(width, CLASSES, weights=weights)
        case "crf":
            return CRF(width, SPANS, words=WordScores(64, len(SPANS), "aBb1.", CHARACTERS, LETTERS))
        case "own chain":
            return OwnChain(width, drop)
        case "own" | "norm of a batch":
            return OwnHead(width, drop)
        case "own, pooled":
            return OwnPooled(width)
        case "ctc":
            return Ctc(width, CLASSES, upsample=2)
        case "last" | "mean" | "attention" | "max of a front":
            return PooledSoftmax(width, CLASSES, head.split(" ")[0], weights, label_smoothing=0.1)
        case "mean_max":
            return PooledSigmoid(width, CLASSES, head, weights)
        case "numbers of a lane":
            return PooledNumbers(width, NUMBERS, "mean")
        case "numbers at each step":
            return StepNumbers(width, NUMBERS, "nse")
        case "forecast":
            return Forecast(width, HORIZON, NUMBERS, None, linear=True, scaled=True, past_steps=kind.past)
        case "quantiles":
            return Forecast(width, HORIZON, NUMBERS, (0.1, 0.5, 0.9))
    scaled = kind.past > 1
    return DistributionForecast(width, HORIZON, NUMBERS, head, linear=scaled, scaled=scaled, past_steps=kind.past)


def batch(head: str, steps: int, lengths: list[int], *, resets: bool, weights: bool, seed: int, odd: bool, **more: Any) -> cw.Batch:
    """Data drawn by the seed, in float64. `odd`: NaN, or another word, stands in padding."""
    kind, lanes, draw = KINDS[head], len(lengths), torch.Generator().manual_seed(seed)
    lengths_B = torch.tensor(lengths)
    padded_TB = torch.arange(steps)[:, None] >= lengths_B
    history: Tensor | None = None
    if kind.reads in ("words", "letters"):
        inputs = torch.randint(VOCABULARY, (steps, lanes), generator=draw)
        inputs[padded_TB] = VOCABULARY - 1 if odd else 0
        if kind.reads == "letters":
            codes = torch.randint(2, CHARACTERS, (steps, lanes, LETTERS), generator=draw)
            codes[torch.arange(LETTERS) >= torch.randint(LETTERS + 1, (steps, lanes, 1), generator=draw)] = 0
            codes[padded_TB] = CHARACTERS - 1 if odd else 0
            inputs = torch.cat([inputs[..., None], codes], dim=-1)
            history = codes if head == "crf" else None
    else:
        inputs = torch.randn((steps, lanes, FEATURES), generator=draw, dtype=torch.float64)
        inputs[padded_TB] = math.nan if odd else 0.0
    resets_TB = torch.rand((steps, lanes), generator=draw) < 0.3 if resets else None
    unused = lengths_B == 0 if kind.pooled else padded_TB
    targets = _targets(head, (lanes,) if kind.pooled else (steps, lanes), lengths_B, draw)
    if head != "ctc":
        targets[unused] = math.nan if targets.is_floating_point() else -100
    if kind.past:
        history = torch.randn((steps + kind.past - 1, lanes, NUMBERS), generator=draw, dtype=torch.float64)
        if kind.counts:  # with the size of a unit of each lane
            sizes_B1 = torch.linspace(0.5, 9.0, lanes).double()[:, None]
            history = torch.cat([history.abs(), sizes_B1.expand(history.shape)], dim=-1)
    weights_B = 3.0 * torch.rand(lanes, generator=draw, dtype=torch.float64) if weights else None
    if weights_B is not None:
        weights_B[1] = 0.0
    return cw.Batch.of(inputs, targets, lengths_B, pooled=kind.pooled, resets=resets_TB, weights=weights_B, history=history, **more)


def _targets(head: str, lead: tuple[int, ...], lengths_B: Tensor, draw: torch.Generator) -> Tensor:
    match KINDS[head].answers:
        case "word":
            return torch.randint(VOCABULARY, lead, generator=draw)
        case "labels":
            drawn = torch.rand((*lead, CLASSES), generator=draw, dtype=torch.float64)
            return torch.where(drawn < 0.2, math.nan, (drawn < 0.5).double())  # some are missing
        case "transcript":  # as many labels as fit, even if all are equal
            most_B = (lengths_B * 2 + 1) // 2
            found = torch.randint(CLASSES, (*lead, max(1, int(most_B.max()))), generator=draw)
            count_B = (torch.rand(lead, generator=draw) * (most_B + 1)).long()
            found[torch.arange(found.shape[1]) >= count_B[:, None]] = -1
            return found
        case "numbers":
            return torch.randn((*lead, NUMBERS), generator=draw, dtype=torch.float64)
        case "weighted numbers":
            found = torch.randn((*lead, NUMBERS, 2), generator=draw, dtype=torch.float64)
            found[..., 1].abs_()
            found[..., 0][torch.rand((*lead, NUMBERS), generator=draw) < 0.3] = math.nan
            return found
        case "ahead":
            found = torch.randn((*lead, HORIZON, NUMBERS), generator=draw, dtype=torch.float64)
            return found.abs().mul(3).floor() if KINDS[head].counts else found
    found = torch.randint(CLASSES, lead, generator=draw)
    if head == "crf":
        found[found == CLASSES - 1] = -100  # unknown, where it might not be allowed
    return found
