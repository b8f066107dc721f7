"""`LinearPart`: the simple model beside a network that reads signals or texts, fitted once and before it.

Its answers come to the network's head with the data, mixed with what the network finds (`Pooled.mixed`). The network is trained by itself:
trained together, it would learn only what the linear part leaves, which on its own training rows is nothing.

Shapes: N sequence, F feature, V answer (class, label or number).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.data.sequences import Sequences
from carrywave.spec.spec import Spec
from carrywave.tasks.linear.ngrams import KEYS, NGrams
from carrywave.tasks.linear.random_convolutions import RandomConvolutions

NETWORK_SHARE = 0.4  # of the answers, until it is chosen
LEAST = math.log(1e-6)  # the logarithm of the least probability of a class
PART, HELD, SCALARS = "features.", ("held_starts", "held_answers"), ("warmth", "share", "first_share")


class FeatureMap(Protocol):
    """What the scores are weighted sums of."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def products(self, data: Sequences, weights_FV: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, block by block, the places [N] of sequences and their features times the weights [N, V]."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What a file holds of it."""
        ...


@dataclass(frozen=True)
class LinearPart:
    """`share`: how much the network's answer weighs beside this one. `held`: the answers for held-out sequences, each by all others, by
    the row at which a sequence starts.
    """

    features: FeatureMap
    weights_FV: Tensor
    bias_V: Tensor
    kind: str  # what it answers: `classes`, `labels` of which any may hold, or `numbers`
    warmth: float
    held_starts_N: Tensor
    held_answers_NV: Tensor
    share: float
    first_share: float  # before the network was trained
    seen: str = ""  # how it answered for each of its own sequences, by the others

    def __call__(self, data: Sequences, *, held: bool = False) -> NDArray[np.float32]:
        """[N, V]: logarithms of probabilities, log odds of labels, or numbers; `held`: the data was held out of what this was fitted on."""
        out_NV = torch.empty(len(data), len(self.bias_V))
        for places_N, block_NV in self.features.products(data, self.weights_FV):
            out_NV[places_N] = self.answers(block_NV + self.bias_V).cpu()
        if held and len(self.held_starts_N):
            order = torch.argsort(self.held_starts_N)
            starts_N = torch.from_numpy(np.array(data.starts))
            at_N = torch.searchsorted(self.held_starts_N[order], starts_N).clamp(max=len(order) - 1)
            found_N = self.held_starts_N[order][at_N] == starts_N
            out_NV[found_N] = self.held_answers_NV[order][at_N[found_N]]
        return out_NV.numpy()

    def answers(self, scores_NV: Tensor) -> Tensor:
        """What is said of sequences with these scores."""
        match self.kind:
            case "classes":
                return (self.warmth * scores_NV).log_softmax(1).clamp(min=LEAST)
            case "labels" if isinstance(self.features, NGrams):
                return scores_NV  # of a logistic regression
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
    def of(cls, tensors: Mapping[str, Tensor], kind: str, vocabulary: Sequence[str], device: torch.device) -> LinearPart:
        """What `tensors` gave, of a run with this vocabulary."""
        named = {name.removeprefix(PART): each for name, each in tensors.items() if name.startswith(PART)}
        found: FeatureMap
        if KEYS in named:
            found, device = NGrams.of(named, vocabulary), torch.device("cpu")
        else:
            found = RandomConvolutions.of({name: each.to(device) for name, each in named.items()})
        warmth, share, first_share = (float(tensors[name]) for name in SCALARS)
        weights_FV, bias_V = (tensors[name].to(device) for name in ("weights", "bias"))
        return cls(found, weights_FV, bias_V, kind, warmth, tensors[HELD[0]], tensors[HELD[1]], share, first_share)


def kind_of(spec: Spec) -> str:
    """What the linear part of a task answers."""
    return "numbers" if spec.task == "regression" else "labels" if spec.data.multi_label else "classes"


@dataclass(frozen=True)
class LinearRows:
    """The sequences that a linear part is fitted to: `rows` of the training sequences and, after them, of those held out."""

    data: Sequences
    rows: NDArray[np.int64]
    importance_N: NDArray[np.float64]

    @classmethod
    def of(cls, kind: str, train: Sequences, held: Sequences | None, class_weights: Tensor | None) -> Self:
        """All that have a target, and a weight above 0."""
        both = train if held is None else joined(train, held)
        targets, importance_N = np.asarray(both.labels), np.ones(len(both)) if both.weights is None else np.array(both.weights, np.float64)
        real_N = (targets >= 0) if kind == "classes" else np.isfinite(targets).all(1)
        if kind == "classes" and class_weights is not None:
            importance_N *= class_weights.numpy()[np.maximum(targets, 0)]
        rows = np.flatnonzero(real_N & (importance_N > 0))
        return cls(both, rows, importance_N[rows])

    def some(self, chosen: NDArray[Any]) -> Self:
        """Some of them."""
        return replace(self, rows=self.rows[chosen], importance_N=self.importance_N[chosen])

    def targets(self, kind: str, answers: int) -> Tensor:
        """[N, V] float64: 1 or -1 for each class or label, or numbers."""
        wanted = torch.from_numpy(np.asarray(self.data.labels)[self.rows])
        if kind == "classes":
            return 2.0 * torch.nn.functional.one_hot(wanted.long(), answers).double() - 1.0
        return wanted.double() if kind == "numbers" else 2.0 * wanted.double() - 1.0


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
