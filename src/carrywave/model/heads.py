"""Heads: one result per step (`Softmax`, `Sigmoid`, `Forecast`) or one per sequence (`PooledSoftmax`, `PooledSigmoid`, `PooledNumbers`).

Every head has `forward(y) -> out`, `score(out, target) -> (loss sum, count)`, and `loss(y, target)`, which does both. Losses are sums, not
means: replicas, chunks and micro-batches hold different numbers of targets, and the division happens once. A missing target (-100 among
integers, a non-finite number among floats) adds nothing to the sum, the count or the gradient. Losses are in float32 or wider.

A pooled head reads sequences that may arrive in several time chunks: `start` makes an accumulator, `pool` adds each chunk's outputs
to it, and forward and loss read it once, at the end. A head with `reads_whole = True` (none is here) reads sequences that are never cut,
and their lengths: `forward(y, lengths)`, `loss(y, target, lengths)`.

Shapes: T time, B lane, W width of the last layer, V classes, K steps ahead, C columns, Q quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from carrywave.errors import UserError
from carrywave.kernels import cross_entropy
from carrywave.kernels.deferred_gradients import linear
from carrywave.model.over_time import pooling, segments
from carrywave.model.vocabulary import rows as vocabulary_rows
from carrywave.model.vocabulary.rows import Rows
from carrywave.spec.step_inputs import LEAST_DEVIATION

IGNORED = -100  # an integer target that does not count

Accumulator = tuple[Tensor, Tensor]  # (what was seen of each lane [B, R], as `pooling` keeps it; steps so far [B] int64)


def at_least_float32(x: Tensor) -> Tensor:
    """x, upcast to float32 if its dtype is narrower, as under autocast."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def numbers(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Like torch's `linear`, but in the dtype of the weights under autocast too: a number that is an answer is not rounded to 8 bits."""
    with torch.autocast(x.device.type, enabled=False):
        return linear(x.to(weight.dtype), weight, bias)


def score_classes(logits: Tensor, target: Tensor, weights_V: Tensor | None, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Summed cross entropy, and the number of real targets or the sum of their class weights: the quotient equals torch's mean."""
    target = target.reshape(-1)
    total = cross_entropy.summed(logits.reshape(-1, logits.shape[-1]), target, IGNORED, weights_V, smoothing)
    real = target != IGNORED
    if weights_V is None:
        return total, real.sum().to(total.dtype)
    return total, torch.where(real, weights_V.to(total.dtype)[target.clamp(min=0)], 0.0).sum()


def score_labels(logits: Tensor, target: Tensor, weights_V: Tensor | None, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Binary cross entropy, summed over all labels whose target is present, and the number of steps or sequences that have any.

    `weights_V` are those of targets that are 1, torch's `pos_weight`. With `smoothing`, half of it is taken from ones and given to zeros.
    """
    logits = at_least_float32(logits)
    real = torch.isfinite(target)
    wanted = torch.where(real, target.to(logits.dtype), 0.0)
    wanted = wanted + smoothing * (0.5 - wanted) if smoothing else wanted
    positive = None if weights_V is None else weights_V.to(logits.dtype)
    errors = binary_cross_entropy_with_logits(logits, wanted, pos_weight=positive, reduction="none")
    return torch.where(real, errors, 0.0).sum(), real.any(dim=-1).sum().to(logits.dtype)


def score_numbers(out: Tensor, target: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Element-wise error, 0 where the target is missing, and a mask of the targets that are present."""
    out = at_least_float32(out)
    real = torch.isfinite(target)
    # Masked before the square: masked after it, the gradient would be 0 · NaN.
    gap = torch.where(real, out - target.to(out.dtype), 0.0)
    return (gap.square() if kind == "mse" else gap.abs()), real


def check_loss(kind: str) -> str:
    """Return a loss for numbers if it is known, otherwise raise."""
    if kind not in ("mse", "mae"):
        raise UserError(f"loss={kind} is unknown; use mse or mae")
    return kind


def class_weights(weights: Tensor | None, classes: int) -> Tensor | None:
    """Check class weights against the number of classes, and copy them to float32."""
    if weights is not None and (weights.shape != (classes,) or not bool((torch.isfinite(weights) & (weights >= 0)).all())):
        raise UserError(f"class weights {weights.tolist()} do not match {classes} classes; pass one finite number >= 0 for each")
    return None if weights is None else weights.detach().clone().float()


class Softmax(nn.Module):
    """Cross entropy over classes at every step. `tied` is the embedding's matrix, which is then shared.

    `rows`: this worker holds only these classes, and others hold the rest; class weights and smoothing must then be left out.
    `label_smoothing`: of the loss in training, as torch defines it; evaluation has none.
    """

    pooled = False

    def __init__(
        self,
        width: int,
        classes: int,
        tied: nn.Parameter | None = None,
        bias: bool = True,
        weights: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        rows: Rows | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        held = classes if rows is None else rows.count
        if tied is not None and tied.shape != (held, width):
            raise UserError(
                f"a tied matrix of shape {list(tied.shape)} does not match {held} classes x width {width}; use one of that shape"
            )
        self.rows = rows
        self.width = width
        self.classes = classes
        self.label_smoothing = label_smoothing
        self.weight = nn.Parameter(torch.empty(held, width, device=device).uniform_(-(width**-0.5), width**-0.5)) if tied is None else tied
        self.bias = nn.Parameter(torch.zeros(held, device=device)) if bias else None
        self.weights: Tensor | None
        self.register_buffer("weights", class_weights(weights, classes))

    def forward(self, y_TBW: Tensor) -> Tensor:
        """Logits [T, B, V]."""
        if self.rows is not None:
            return vocabulary_rows.logits(y_TBW, self.weight, self.bias, self.rows)
        return linear(y_TBW, self.weight, self.bias)

    def score(self, logits_TBV: Tensor, target_TB: Tensor) -> tuple[Tensor, Tensor]:
        """Loss sum and count."""
        return score_classes(logits_TBV, target_TB, self.weights, self.label_smoothing if self.training else 0.0)

    def loss(self, y_TBW: Tensor, target_TB: Tensor) -> tuple[Tensor, Tensor]:
        """Loss sum and count, from the last layer's output."""
        if self.rows is not None:
            return vocabulary_rows.summed_cross_entropy(y_TBW, self.weight, self.bias, target_TB, IGNORED, self.rows)
        return self.score(self(y_TBW), target_TB)

    def extra_repr(self) -> str:
        return f"{self.width}, {self.classes}"


class Sigmoid(Softmax):
    """Labels of which any number may hold at a step, each with its binary cross entropy; as `Softmax` in everything but the loss.

    Targets are 0 or 1, NaN where one is missing. The loss of a step is the sum over its labels, and steps are what is counted.
    """

    def __init__(self, width: int, classes: int, weights: Tensor | None = None, *, label_smoothing: float = 0.0) -> None:
        super().__init__(width, classes, weights=weights, label_smoothing=label_smoothing)

    def score(self, logits_TBV: Tensor, target_TBV: Tensor) -> tuple[Tensor, Tensor]:
        """Loss sum and the number of steps with a target."""
        return score_labels(logits_TBV, target_TBV, self.weights, self.label_smoothing if self.training else 0.0)


def tie(head: Softmax, embedding: nn.Module) -> None:
    """Make head and embedding share one matrix: the same Parameter object."""
    weight = embedding.weight
    if not isinstance(weight, nn.Parameter) or weight.shape != head.weight.shape:
        shape = list(weight.shape) if isinstance(weight, Tensor) else None
        raise UserError(f"the embedding matrix {shape} cannot be tied to the softmax matrix {list(head.weight.shape)}; use equal widths")
    head.weight = weight


class Forecast(nn.Module):
    """Forecasts, at every step, the next K values of C columns: [T, B, K, C], or [T, B, K, C, Q] with quantiles.

    Quantiles cannot cross: the first is unconstrained, and each following one adds a positive increment. Their loss is the pinball
    loss, averaged over quantiles.

    With `linear`, a linear function of the last N values of each column, less the last one, is added. With `scaled`, what comes from the
    layers is in units of the deviation of the last N values, so that what is learned at one level of volatility holds at others. N is
    `past_steps`; forward and loss then read these values too, [T, B, C, N].
    """

    pooled = False

    def __init__(
        self,
        width: int,
        horizon: int,
        outputs: int,
        quantiles: Sequence[float] | None = None,
        loss: str = "mse",
        *,
        linear: bool = False,
        scaled: bool = False,
        past_steps: int = 0,
    ) -> None:
        super().__init__()
        if (linear or scaled) != (past_steps > 0):
            raise UserError(f"a forecast has linear={linear}, scaled={scaled} and past_steps={past_steps}; set it if one of them is set")
        self.horizon = horizon
        self.outputs = outputs
        self.quantiles = None if quantiles is None else tuple(quantiles)
        self.kind = check_loss(loss)
        if self.quantiles is not None and (
            not self.quantiles or any(not low < high for low, high in zip((0.0, *self.quantiles), (*self.quantiles, 1.0), strict=True))
        ):
            raise UserError(f"quantiles must increase between 0 and 1, got {list(self.quantiles)}; list each once, from low to high")
        numbers = horizon * outputs * len(self.quantiles or (0.5,))
        self.weight = nn.Parameter(torch.empty(numbers, width).uniform_(-(width**-0.5), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(numbers))
        self.past_steps, self.scaled = past_steps, scaled
        self.line = Line(horizon, outputs, past_steps) if linear else None

    def forward(self, y_TBW: Tensor, past_TBCN: Tensor | None = None) -> Tensor:
        """The forecasts made at each step."""
        out = numbers(y_TBW, self.weight, self.bias)
        out = out.view(*out.shape[:-1], self.horizon, self.outputs, -1)
        if self.quantiles is not None:
            out = at_least_float32(out)
            # Shifted so that a newly initialised model's quantiles span about 1 in total, however many there are.
            rises = softplus(out[..., 1:] - math.log(max(1, len(self.quantiles) - 1)))
            out = torch.cat((out[..., :1], out[..., :1] + rises.cumsum(-1)), dim=-1)
        if past_TBCN is not None and self.scaled:
            out = out * deviation(past_TBCN)[:, :, None, :, None]
        if past_TBCN is not None and self.line is not None:
            out = out + self.line(past_TBCN)[..., None]
        return out[..., 0] if self.quantiles is None else out

    def score(self, out: Tensor, target_TBKC: Tensor) -> tuple[Tensor, Tensor]:
        """Loss sum over the targets that are present, and their number."""
        if self.quantiles is None:
            errors, real = score_numbers(out, target_TBKC, self.kind)
            return errors.sum(), real.sum().to(errors.dtype)
        out = at_least_float32(out)
        real = torch.isfinite(target_TBKC)
        gap = torch.where(real[..., None], target_TBKC.to(out.dtype)[..., None] - out, 0.0)
        # Filled on the device: a copy from the host cannot be part of a CUDA graph.
        share_Q = torch.cat([out.new_full((1,), share) for share in self.quantiles])
        pinball = torch.maximum(share_Q * gap, (share_Q - 1.0) * gap)
        return pinball.sum() / len(self.quantiles), real.sum().to(out.dtype)

    def loss(self, y_TBW: Tensor, target_TBKC: Tensor, past_TBCN: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss sum and count, from the last layer's output."""
        return self.score(self(y_TBW, past_TBCN), target_TBKC)


class Line(nn.Module):
    """A linear function of the last N values of each column less the last one, for each step ahead. It starts at zero: `Task.model` sets it
    to the ridge solution.
    """

    def __init__(self, horizon: int, outputs: int, past_steps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, past_steps, horizon))
        self.bias = nn.Parameter(torch.zeros(outputs, horizon))

    def forward(self, past_TBCN: Tensor) -> Tensor:
        """The differences [T, B, K, C] from the last value."""
        steps, lanes, columns, past = past_TBCN.shape
        with torch.autocast(past_TBCN.device.type, enabled=False):
            gaps_CRN = (past_TBCN - past_TBCN[..., -1:]).to(self.weight.dtype).permute(2, 0, 1, 3).reshape(columns, steps * lanes, past)
            ahead_CRK = torch.baddbmm(self.bias[:, None], gaps_CRN, self.weight)
        return ahead_CRK.view(columns, steps, lanes, -1).permute(1, 2, 3, 0)


def deviation(past_TBCN: Tensor) -> Tensor:
    """The deviation [T, B, C] of the last N values, at least `LEAST_DEVIATION` of that of all of train."""
    return at_least_float32(past_TBCN).var(dim=-1, correction=0).clamp(min=LEAST_DEVIATION**2).sqrt()


class Pooled(nn.Module):
    """Base of the pooled heads: a linear layer over what `pooling` makes of all real steps.

    With two directions, the last step is the forward half at the last real step and the reverse half at the first one, where
    the reverse direction ends.
    """

    pooled = True

    def __init__(self, width: int, outputs: int, pool: str, bidirectional: bool) -> None:
        super().__init__()
        if bidirectional and width % 2:
            raise UserError(f"a bidirectional head has width {width}; use an even width")
        self.width = width
        self.pooling = pooling.check_pool(pool)
        self.bidirectional = bidirectional
        read = pooling.result_width(pool, width)
        self.weight = nn.Parameter(torch.empty(outputs, read).uniform_(-(read**-0.5), read**-0.5))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.query = nn.Parameter(torch.zeros(width)) if pool == "attention" else None  # at zero, attention is the mean

    @property
    def row_width(self) -> int:
        """The width of the accumulator's first part."""
        return pooling.row_width(self.pooling, self.width)

    def start(self, lanes: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Accumulator:
        """The accumulator before the first step, in float32 or wider so that long sums keep their small terms."""
        dtype = torch.promote_types(dtype or self.weight.dtype, torch.float32)
        device = device or self.weight.device
        return torch.zeros(lanes, self.row_width, dtype=dtype, device=device), torch.zeros(lanes, dtype=torch.int64, device=device)

    def pool(self, y_TBW: Tensor, lengths_B: Tensor, acc: Accumulator) -> Accumulator:
        """The accumulator after a chunk in which each lane has `lengths_B` real steps."""
        seen_BR, count_B = acc
        y_TBW = y_TBW.to(seen_BR.dtype)
        seen_BR = pooling.add(self.pooling, y_TBW, lengths_B, seen_BR, count_B, two_ways=self.bidirectional, query_W=self.query)
        return seen_BR, count_B + lengths_B

    def pool_by_sequence(self, y_TBW: Tensor, at: segments.Places, acc: Accumulator) -> tuple[Accumulator, Accumulator]:
        """After a chunk in which lanes begin new sequences: the accumulators of all of them, place by place, and that of the sequence that
        each lane has come to.
        """
        seen_BR, count_B = acc
        y_TBW = y_TBW.to(seen_BR.dtype)
        seen_KBR = segments.add(self.pooling, y_TBW, at, seen_BR, count_B, two_ways=self.bidirectional, query_W=self.query)
        count_KB = torch.cat((at.count_KB[:1] + count_B, at.count_KB[1:]))
        current_1B = at.current_B[None]
        seen_1BR = seen_KBR.gather(0, current_1B[..., None].expand(1, *seen_BR.shape))
        return (seen_KBR.flatten(0, 1), count_KB.flatten()), (seen_1BR[0], count_KB.gather(0, current_1B)[0])

    def over_steps(self, acc: Accumulator) -> Tensor:
        """What was pooled of each lane."""
        return pooling.result(self.pooling, *acc).to(self.weight.dtype)

    def forward(self, acc: Accumulator) -> Tensor:
        """One result per lane."""
        return linear(self.over_steps(acc), self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.width}, {self.weight.shape[0]}, pool={self.pooling!r}, bidirectional={self.bidirectional}"


class PooledSoftmax(Pooled):
    """Cross entropy over classes, one label per sequence. `label_smoothing`: as in `Softmax`."""

    def __init__(
        self,
        width: int,
        classes: int,
        pool: str = "last",
        weights: Tensor | None = None,
        *,
        bidirectional: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(width, classes, pool, bidirectional)
        self.classes = classes
        self.label_smoothing = label_smoothing
        self.weights: Tensor | None
        self.register_buffer("weights", class_weights(weights, classes))

    def score(self, logits_BV: Tensor, label_B: Tensor) -> tuple[Tensor, Tensor]:
        """Loss sum and count."""
        return score_classes(logits_BV, label_B, self.weights, self.label_smoothing if self.training else 0.0)

    def loss(self, acc: Accumulator, label_B: Tensor) -> tuple[Tensor, Tensor]:
        """Loss sum and count, from the accumulator."""
        return self.score(self(acc), label_B)


class PooledSigmoid(PooledSoftmax):
    """Labels of which any number may hold for a sequence: as `Sigmoid` is to `Softmax`."""

    def score(self, logits_BV: Tensor, target_BV: Tensor) -> tuple[Tensor, Tensor]:
        """Loss sum and the number of sequences with a target."""
        return score_labels(logits_BV, target_BV, self.weights, self.label_smoothing if self.training else 0.0)


class PooledNumbers(Pooled):
    """A vector of numbers per sequence; a lane's error is the mean over its numbers, and it counts only if all targets are present."""

    def __init__(self, width: int, outputs: int, pool: str = "last", loss: str = "mse", *, bidirectional: bool = False) -> None:
        super().__init__(width, outputs, pool, bidirectional)
        self.outputs = outputs
        self.kind = check_loss(loss)

    def forward(self, acc: Accumulator) -> Tensor:
        """The numbers of each lane."""
        return numbers(self.over_steps(acc), self.weight, self.bias)

    def score(self, out_BC: Tensor, target_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Loss sum and count."""
        whole_B1 = torch.isfinite(target_BC).all(dim=-1, keepdim=True)
        errors_BC, _ = score_numbers(out_BC, torch.where(whole_B1, target_BC, torch.nan), self.kind)
        return errors_BC.sum() / self.outputs, whole_B1.sum().to(errors_BC.dtype)

    def loss(self, acc: Accumulator, target_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Loss sum and count, from the accumulator."""
        return self.score(self(acc), target_BC)
