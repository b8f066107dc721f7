"""`LinearPart`: the simple model beside a network that reads sequences of numbers, fitted once and before it.

Its answers come to the network's head with the data, mixed with what the network finds (`Pooled.mixed`). The network is trained by itself:
trained together, it would learn only what the linear part leaves, which on its own training rows is nothing.

Shapes: N sequence, F feature, V answer (class, label or number).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.data.sequences import Sequences
from carrywave.data.shuffle import permutation
from carrywave.spec.spec import Spec
from carrywave.tasks.linear import leave_one_out
from carrywave.tasks.linear.random_convolutions import RandomConvolutions

MOST_ROWS, MOST_STEPS = 4096, 1 << 22  # that it is fitted on
NETWORK_SHARE = 0.4  # of the answers, until it is chosen
LEAST = math.log(1e-6)  # the logarithm of the least probability of a class
SITE = 41  # of the keyed choice of rows
PART, HELD, SCALARS = "features.", ("held_starts", "held_answers"), ("warmth", "share", "first_share")


@dataclass(frozen=True)
class LinearPart:
    """`share`: how much the network's answer weighs beside this one. `held`: the answers for held-out sequences, each by all others, by
    the row at which a sequence starts.
    """

    features: RandomConvolutions
    weights_FV: Tensor
    bias_V: Tensor
    kind: str  # what it answers: `classes`, `labels` of which any may hold, or `numbers`
    warmth: float
    held_starts_N: Tensor
    held_answers_NV: Tensor
    share: float
    first_share: float  # before the network was trained
    seen: str = ""  # how it answered for each of its own sequences, by the others

    @classmethod
    def fit(
        cls,
        kind: str,
        answers: int,
        train: Sequences,
        held: Sequences | None,
        count: int,
        seed: int,
        device: torch.device,
        class_weights: Tensor | None = None,
    ) -> LinearPart | None:
        """Fit to the training sequences and those held out of them, at most `MOST_ROWS`; None if fewer than two have a target.

        What it answers for one that was held out is found from all others.
        """
        both = train if held is None else joined(train, held)
        targets, importance_N = np.asarray(both.labels), np.ones(len(both)) if both.weights is None else np.array(both.weights, np.float64)
        real_N = (targets >= 0) if kind == "classes" else np.isfinite(targets).all(1)
        if kind == "classes" and class_weights is not None:
            importance_N *= class_weights.numpy()[np.maximum(targets, 0)]
        rows = np.flatnonzero(real_N & (importance_N > 0))
        if len(rows) < 2:
            return None
        limit = max(2, min(MOST_ROWS, int(MOST_STEPS / both.lengths[rows].mean())))
        rows = np.sort(rows[permutation(len(rows), seed=seed, epoch=0, site=SITE)[:limit]])
        features = RandomConvolutions.fit(train, count, seed, device)
        features_NF = torch.empty(len(rows), features.count, device=device)
        for places_N, block_NF in features(both, rows):
            features_NF[places_N.to(device)] = block_NF
        wanted = torch.from_numpy(targets[rows]).to(device)
        if kind == "classes":
            targets_NV = 2.0 * torch.nn.functional.one_hot(wanted.long(), answers).double() - 1.0
        else:
            targets_NV = wanted.double() if kind == "numbers" else 2.0 * wanted.double() - 1.0
        ridge = leave_one_out.fit(features_NF, targets_NV, torch.from_numpy(importance_N[rows]).to(device))
        warmth = leave_one_out.warmth_of(ridge.others_NV, wanted.long()) if kind == "classes" else 1.0
        # Where no class has two sequences, the answers cannot be judged, and a network has nothing to learn a class from.
        share = 0.0 if warmth is None else NETWORK_SHARE
        outside = np.flatnonzero(rows >= len(train))
        part = cls(
            features,
            ridge.weights_FV,
            ridge.bias_V,
            kind,
            warmth or 1.0,
            torch.tensor(both.starts[rows[outside]].tolist(), dtype=torch.int64),
            torch.zeros(0, answers),
            share,
            share,
            _seen(kind, ridge.others_NV, targets_NV),
        )
        return replace(part, held_answers_NV=part._answers(ridge.others_NV[torch.from_numpy(outside).to(device)].float()).cpu())

    def __call__(self, data: Sequences, *, held: bool = False) -> NDArray[np.float32]:
        """[N, V]: logarithms of probabilities, log odds of labels, or numbers; `held`: the data was held out of what this was fitted on."""
        out_NV = torch.empty(len(data), len(self.bias_V))
        for places_N, block_NF in self.features(data):
            out_NV[places_N] = self._answers(block_NF @ self.weights_FV + self.bias_V).cpu()
        if held and len(self.held_starts_N):
            order = torch.argsort(self.held_starts_N)
            starts_N = torch.from_numpy(np.array(data.starts))
            at_N = torch.searchsorted(self.held_starts_N[order], starts_N).clamp(max=len(order) - 1)
            found_N = self.held_starts_N[order][at_N] == starts_N
            out_NV[found_N] = self.held_answers_NV[order][at_N[found_N]]
        return out_NV.numpy()

    def _answers(self, scores_NV: Tensor) -> Tensor:
        match self.kind:
            case "classes":
                return (self.warmth * scores_NV).log_softmax(1).clamp(min=LEAST)
            case "labels":
                return ((scores_NV + 1.0) / 2.0).logit(0.01)
        return scores_NV

    def beside(self, answers_NV: NDArray[np.float32]) -> NDArray[np.float32]:
        """[N, V + 1]: what a head mixes with the network's answers, and in the last column how much these weigh."""
        return np.concatenate([answers_NV, np.full((len(answers_NV), 1), self.share, np.float32)], axis=1)

    def tensors(self) -> dict[str, Tensor]:
        """What a file holds of it."""
        own = {"weights": self.weights_FV, "bias": self.bias_V, HELD[0]: self.held_starts_N, HELD[1]: self.held_answers_NV}
        own |= {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in SCALARS}
        return {name: tensor.cpu().contiguous() for name, tensor in own.items()} | {
            PART + name: tensor.cpu() for name, tensor in self.features.tensors().items()
        }

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], kind: str, device: torch.device) -> LinearPart:
        """What `tensors` gave."""
        features = RandomConvolutions.of(
            {name.removeprefix(PART): each.to(device) for name, each in tensors.items() if name.startswith(PART)}
        )
        warmth, share, first_share = (float(tensors[name]) for name in SCALARS)
        weights_FV, bias_V = (tensors[name].to(device) for name in ("weights", "bias"))
        return cls(features, weights_FV, bias_V, kind, warmth, tensors[HELD[0]], tensors[HELD[1]], share, first_share)


def _seen(kind: str, others_NV: Tensor, targets_NV: Tensor) -> str:
    """How it answers for each of its own sequences, by the others."""
    if kind == "classes":
        found = f"right for {float((others_NV.argmax(1) == targets_NV.argmax(1)).double().mean()):.1%} of"
    else:
        spread = (targets_NV - targets_NV.mean(0)).square().mean().clamp(min=1e-12)
        found = f"R² {1.0 - float((others_NV - targets_NV).square().mean() / spread):.3f} over"
    return f"{found} {len(targets_NV):,} sequences, each left out in its turn"


def kind_of(spec: Spec) -> str:
    """What the linear part of a task answers."""
    return "numbers" if spec.task == "regression" else "labels" if spec.data.multi_label else "classes"


def joined(train: Sequences, held: Sequences) -> Sequences:
    """Both parts of one array, one after the other."""
    assert train.labels is not None
    assert held.labels is not None
    weights = None if train.weights is None or held.weights is None else np.concatenate([train.weights, held.weights])
    return replace(
        train,
        starts=np.concatenate([train.starts, held.starts]),
        lengths=np.concatenate([train.lengths, held.lengths]),
        labels=np.concatenate([train.labels, held.labels]),
        weights=weights,
        names=None,
    )
