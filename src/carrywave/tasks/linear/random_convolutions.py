"""What random convolutions find in sequences of numbers: four summaries of the steps at which each of many of them exceeds a bias.

84 kernels of nine weights, three of 2 and six of -1, at dilations up to the length of a sequence, over the values and over their
differences from step to step; the biases are quantiles of what the kernels give on some training sequences (MiniRocket: Dempster, Schmidt
and Webb, 2021). Of the steps above a bias, their share, how far above they are on average, where they lie on average, and their longest
stretch (MultiRocket: Tan, Dempster, Bergmeir and Webb, 2022). Lengths may vary.

Shapes: N sequence, C channel, T time, K kernel, F feature.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Self

import numpy as np
import torch
from torch import Tensor

from carrywave.data.sequences import Sequences

TAPS = 9
SUMMARIES = 4  # of the steps above a bias
PLACES = torch.tensor(list(combinations(range(TAPS), 3)))  # of the weights of 2
KERNELS_KP = torch.full((len(PLACES), TAPS), -1.0).scatter_(1, PLACES, 2.0)
MOST_DILATIONS = 32
FITTED_ON = 32  # sequences whose values give the biases
QUANTILES_OF = 4096  # of those values
BLOCK_VALUES = 1 << 14  # of all sequences that are convolved at once, in all channels
GOLDEN = (math.sqrt(5.0) + 1.0) / 2.0


@dataclass(frozen=True)
class KernelScale:
    """The kernels at one dilation, over the values or over their differences."""

    dilation: int
    mix_KC: Tensor  # 1 where a kernel reads a channel
    biases_KJ: Tensor

    def convolved(self, x_NCT: Tensor) -> Tensor:
        """[N, K, T]: what the kernels give; what lies beyond the ends is zero."""
        steps, reach = x_NCT.shape[2], self.dilation * (TAPS // 2)
        padded = torch.nn.functional.pad(x_NCT, (reach, reach))
        taps = torch.stack([padded[:, :, place * self.dilation :][:, :, :steps] for place in range(TAPS)], 2)  # [N, C, P, T]
        # Not torch's convolution, which may use TF32, and so give other features on other devices.
        kernels = (KERNELS_KP.to(x_NCT.device)[:, None] * self.mix_KC[:, :, None]).flatten(1)
        return torch.matmul(kernels, taps.flatten(1, 2))


@dataclass(frozen=True)
class RandomConvolutions:
    """`values` and `changes`: the scales over the values of sequences, and over their differences."""

    values: tuple[KernelScale, ...]
    changes: tuple[KernelScale, ...]

    @classmethod
    def fit(cls, data: Sequences, count: int, seed: int, device: torch.device) -> Self:
        """About `count` features, with biases from some of the sequences."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(data), generator=generator)[:FITTED_ON].numpy()
        longest, channels = int(data.lengths.max()), data.inputs.shape[1]
        seen = [padded(data, rows[place : place + 1], device)[0] for place in range(len(rows))]
        scales: list[tuple[KernelScale, ...]] = []
        for read in (seen, [changes(x) for x in seen]):
            found = []
            for dilation, each in dilations(longest, count // (2 * SUMMARIES)).items():
                share = torch.rand(len(PLACES), 1, generator=generator).clamp(min=1.5 / channels)
                mix_KC = (torch.rand(len(PLACES), channels, generator=generator) < share).float()
                mix_KC[torch.arange(len(PLACES)), torch.randint(channels, (len(PLACES),), generator=generator)] = 1.0
                bare = KernelScale(dilation, mix_KC.to(device), mix_KC)
                given = torch.cat([bare.convolved(x)[0] for x in read], 1).cpu()
                given = given[:, torch.randperm(given.shape[1], generator=generator)[:QUANTILES_OF]]
                at = torch.frac(torch.arange(1, each + 1) * GOLDEN)
                found.append(KernelScale(dilation, mix_KC.to(device), torch.quantile(given, at, dim=1).t().contiguous().to(device)))
            scales.append(tuple(found))
        return cls(*scales)

    @property
    def count(self) -> int:
        """The number of features."""
        return SUMMARIES * sum(scale.biases_KJ.numel() for scale in (*self.values, *self.changes))

    def __call__(self, data: Sequences, rows: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, block by block, the places [N] of sequences among `rows` and their features [N, F]."""
        rows = np.arange(len(data)) if rows is None else rows
        device, most = self.values[0].mix_KC.device, BLOCK_VALUES / data.inputs.shape[1]
        order = np.argsort(data.lengths[rows], kind="stable")
        while len(order):
            longest_N = np.maximum.accumulate(data.lengths[rows[order]])
            many = max(1, int((longest_N * np.arange(1, len(order) + 1) <= most).sum()))
            block, order = order[:many], order[many:]
            x_NCT, lengths_N = padded(data, rows[block], device)
            features = [*summaries(self.values, x_NCT, lengths_N), *summaries(self.changes, changes(x_NCT), lengths_N)]
            yield torch.from_numpy(block), torch.cat(features, 1)

    def products(self, data: Sequences, weights_FV: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, block by block, the places [N] of sequences and their features times the weights [N, V]."""
        for places_N, block_NF in self(data):
            yield places_N, block_NF @ weights_FV

    def tensors(self) -> dict[str, Tensor]:
        """What a file holds of it."""
        named = {}
        for kind, scales in (("values", self.values), ("changes", self.changes)):
            for scale in scales:
                named[f"{kind}.{scale.dilation}.mix"], named[f"{kind}.{scale.dilation}.biases"] = scale.mix_KC, scale.biases_KJ
        return named

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """What `tensors` gave."""
        scales: dict[str, list[KernelScale]] = {"values": [], "changes": []}
        for kind, dilation in sorted({(kind, int(rest.split(".")[0])) for kind, _, rest in (name.partition(".") for name in tensors)}):
            mix_KC, biases_KJ = (tensors[f"{kind}.{dilation}.{part}"] for part in ("mix", "biases"))
            scales[kind].append(KernelScale(dilation, mix_KC, biases_KJ))
        return cls(tuple(scales["values"]), tuple(scales["changes"]))


def dilations(longest: int, count: int) -> dict[int, int]:
    """How many biases each kernel has at each dilation, about `count` in all, for sequences of at most so many steps."""
    each = max(1, count // len(PLACES))
    number = min(each, MOST_DILATIONS)
    top = math.log2(max((longest - 1) / (TAPS - 1), 1.0))
    spread = [int(2 ** (top * place / max(number - 1, 1))) for place in range(number)]
    return {dilation: max(1, spread.count(dilation) * each // number) for dilation in sorted(set(spread))}


def padded(data: Sequences, rows: np.ndarray[tuple[int], np.dtype[np.int64]], device: torch.device) -> tuple[Tensor, Tensor]:
    """[N, C, T], [N]: some sequences, with zeros after their ends, and their lengths."""
    lengths_N = data.lengths[rows]
    steps_T = np.arange(int(lengths_N.max()))
    real_NT = steps_T < lengths_N[:, None]
    values_NTC = np.asarray(data.inputs[data.starts[rows][:, None] + np.minimum(steps_T, lengths_N[:, None] - 1)], np.float32)
    values_NTC = np.where(real_NT[..., None], values_NTC, np.float32(0.0))
    return torch.from_numpy(values_NTC).to(device).transpose(1, 2), torch.from_numpy(lengths_N).to(device)


def changes(x_NCT: Tensor) -> Tensor:
    """The difference of each step from the one before; the first has none."""
    return x_NCT.diff(dim=2, prepend=x_NCT[:, :, :1])


def summaries(scales: tuple[KernelScale, ...], x_NCT: Tensor, lengths_N: Tensor) -> Iterator[Tensor]:
    """[N, K × 4] for each bias of each scale: of the real steps at which each kernel exceeds it, the share, the mean of what it exceeds it
    by, the mean place, and the longest stretch, the last two as parts of the sequence.
    """
    ended_N1T = (torch.arange(x_NCT.shape[2], device=x_NCT.device) >= lengths_N[:, None])[:, None]
    padding = int(lengths_N.min()) < x_NCT.shape[2]
    x_NCT = x_NCT.masked_fill(ended_N1T, 0.0) if padding else x_NCT
    place_T = torch.arange(1.0, x_NCT.shape[2] + 1, device=x_NCT.device)
    for scale in scales:
        given_NKT = scale.convolved(x_NCT)
        given_NKT = given_NKT.masked_fill_(ended_N1T, -torch.inf) if padding else given_NKT
        for bias_K in scale.biases_KJ.t():
            # 1 or 0, as floats, whose sums are several times as fast as those of bools
            above_NKT = torch.gt(given_NKT, bias_K[:, None], out=given_NKT.new_empty(given_NKT.shape))
            count_NK = above_NKT.sum(2)
            over_NK = (given_NKT - bias_K[:, None]).clamp_(min=0.0).sum(2)
            below_NKT = torch.addcmul(place_T, above_NKT, place_T, value=-1.0)  # the place of each step that is not above; 0 where it is
            places_NK = place_T.sum() - below_NKT.sum(2)
            stretch_NK = (place_T - below_NKT.cummax(2).values).amax(2)
            some_NK, length_N1 = count_NK.clamp(min=1.0), lengths_N[:, None]
            found = (count_NK / length_N1, over_NK / some_NK, places_NK / some_NK / length_N1, stretch_NK / length_N1)
            yield torch.stack(found, 2).flatten(1)
