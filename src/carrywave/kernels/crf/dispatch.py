"""The loss and the best paths of a chain: on CUDA by kernels of our own (`crf.cu`), elsewhere by the definition.

The loss's gradients are probabilities of labels and of pairs of labels, which the forward-backward algorithm gives together with the loss.
So they are computed at once, in a few launches however long the sequences are, and backward only multiplies them.

Shapes: T time, B lane, V labels, C chunks of a sum. The two of `2` are all paths, and those through the known labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from carrywave.kernels import derivatives
from carrywave.kernels.crf import definition
from carrywave.kernels.crf.definition import UNKNOWN, Chain
from carrywave.kernels.cuda import nvrtc

_SOURCE = "crf.cu"
_MOST_LABELS = 2048  # two rows of float64 in the memory of a block
_ROWS = 8  # of the matrix of pairs, for each thread
_STEPS_PER_CHUNK, _MOST_CHUNKS = 64, 128
_cuda_kernel = nvrtc.Replaceable("conditional random fields")


def summed(emissions_TBV: Tensor, tags_TB: Tensor, lengths_B: Tensor, chain: Chain, weights_B: Tensor | None = None) -> Tensor:
    """The sum of the lanes' negative log-likelihoods, each times its weight, in the dtype of the emissions."""
    if _serves(emissions_TBV, tags_TB):
        apply: Any = _ChainLoss.apply
        total: Tensor | None = _cuda_kernel.tried(lambda: apply(emissions_TBV, *chain, tags_TB, lengths_B, weights_B))
        if total is not None:
            return total
    return _plain(emissions_TBV, *chain, tags_TB, lengths_B, weights_B)


def best_paths(emissions_TBV: Tensor, lengths_B: Tensor, chain: Chain) -> Tensor:
    """The best path of each lane [T, B], as `definition.best_paths` has it."""
    emissions_TBV, chain = emissions_TBV.detach(), Chain(*(each.detach() for each in chain))
    if _serves(emissions_TBV):
        paths_TB = _cuda_kernel.tried(lambda: _best_paths(emissions_TBV.contiguous(), lengths_B.to(torch.int64), chain))
        if paths_TB is not None:
            return paths_TB
    return definition.best_paths(emissions_TBV, lengths_B, chain)


def _plain(emissions: Tensor, start: Tensor, transitions: Tensor, end: Tensor, tags: Tensor, lengths: Tensor, weights: Any) -> Tensor:
    each_B = definition.losses(emissions, tags, lengths, Chain(start, transitions, end))
    return (each_B if weights is None else each_B * weights.double()).sum().to(emissions.dtype)


def _serves(emissions_TBV: Tensor, tags_TB: Tensor | None = None) -> bool:
    supported = emissions_TBV.is_cuda and emissions_TBV.dtype in (torch.float32, torch.float64) and not derivatives.plain_only()
    return supported and emissions_TBV.numel() > 0 and emissions_TBV.shape[2] <= _MOST_LABELS and (tags_TB is None or tags_TB.is_cuda)


class _ChainLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        emissions_TBV: Tensor,
        start_V: Tensor,
        transitions_VV: Tensor,
        end_V: Tensor,
        tags_TB: Tensor,
        lengths_B: Tensor,
        weights_B: Tensor | None,
    ) -> Tensor:
        chain = Chain(start_V, transitions_VV, end_V)
        tags_TB, lengths_B = tags_TB.to(torch.int64).contiguous(), lengths_B.to(torch.int64).contiguous()
        ctx.save_for_backward(emissions_TBV, *chain, tags_TB, lengths_B, weights_B)
        total, ctx.slopes = loss_and_slopes(emissions_TBV.contiguous(), tags_TB, lengths_B, chain, weights_B, any(ctx.needs_input_grad[:4]))
        return total

    @staticmethod
    @derivatives.as_saved
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if derivatives.beyond_numbers(grad):
            inputs, fixed = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
            return *derivatives.through(lambda *given: _plain(*given, *fixed), inputs, ctx.needs_input_grad[:4], (grad,)), None, None, None
        wanted: Sequence[bool] = ctx.needs_input_grad[:4]
        return *(slope * grad if want else None for slope, want in zip(ctx.slopes, wanted, strict=True)), None, None, None


def loss_and_slopes(
    emissions_TBV: Tensor, tags_TB: Tensor, lengths_B: Tensor, chain: Chain, weights_B: Tensor | None, slopes: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss by the kernels and, if they are wanted, its slopes in the emissions and in each part of the chain."""
    (steps, lanes, labels), dtype = emissions_TBV.shape, emissions_TBV.dtype
    start_V, transitions_VV, end_V = (each.to(dtype).contiguous() for each in chain)
    totals_2B = emissions_TBV.new_empty(2, lanes, dtype=torch.float64)
    alphas, betas, shares = (emissions_TBV.new_empty(2, steps, lanes, labels) if slopes else None for _ in range(3))
    offsets_2TB = emissions_TBV.new_empty(2, steps, lanes, dtype=torch.float64) if slopes else None
    _kernel("crf_sums", emissions_TBV)(
        (lanes, 2, 1), (_threads(labels), 1), emissions_TBV, tags_TB, lengths_B, start_V, transitions_VV, transitions_VV.t().contiguous(),
        end_V, alphas, betas, shares, offsets_2TB, totals_2B, steps, lanes,
    )  # fmt: skip
    weight_B = None if weights_B is None else weights_B.to(torch.float64).contiguous()
    losses_B = totals_2B[0] - totals_2B[1]
    total = (losses_B if weight_B is None else losses_B * weight_B).sum().to(dtype)
    if shares is None:
        return total, ()
    slopes_TBV = shares[0] - shares[1]
    if weight_B is not None:
        slopes_TBV *= weight_B.to(dtype)[:, None]
    chunks = max(1, min(_MOST_CHUNKS, steps * lanes // _STEPS_PER_CHUNK))
    pairs_CVV = emissions_TBV.new_empty(chunks, labels, labels)
    _kernel("crf_pairs", emissions_TBV)(
        (-(-labels // _ROWS), chunks, 1), (_threads(labels), 1), alphas, betas, tags_TB, lengths_B, weight_B, transitions_VV, pairs_CVV,
        steps, lanes,
    )  # fmt: skip
    last_1BV = slopes_TBV.gather(0, (lengths_B - 1).clamp(min=0)[None, :, None].expand(1, lanes, labels))
    return total, (slopes_TBV, slopes_TBV[0].sum(0), pairs_CVV.sum(0), last_1BV[0].sum(0))


def _best_paths(emissions_TBV: Tensor, lengths_B: Tensor, chain: Chain) -> Tensor:
    steps, lanes, labels = emissions_TBV.shape
    start_V, transitions_VV, end_V = (each.to(emissions_TBV.dtype).contiguous() for each in chain)
    before_TBV = emissions_TBV.new_empty(steps, lanes, labels, dtype=torch.int32)
    paths_TB = emissions_TBV.new_full((steps, lanes), UNKNOWN, dtype=torch.int64)
    _kernel("crf_best", emissions_TBV)(
        (lanes, 1, 1), (_threads(labels), 1), emissions_TBV, lengths_B.contiguous(), start_V, transitions_VV, end_V, before_TBV, paths_TB,
        steps, lanes,
    )  # fmt: skip
    return paths_TB


def _threads(labels: int) -> int:
    return min(1024, -(-labels // 32) * 32)


def _kernel(name: str, like: Tensor) -> nvrtc.Kernel:
    labels = like.shape[2]
    constants = (("LABELS", labels), ("ROWS", _ROWS), ("DOUBLE", int(like.dtype == torch.float64)))
    return nvrtc.kernel(_SOURCE, name, constants, 2 * labels * like.element_size(), like.get_device())
