"""Splits the vocabulary of a model over workers: which tensors have its rows, and how a whole model becomes one with some of them.

The vocabulary is that of the `Embedding` that encodes tokens. Its matrix is split by rows, and so are the matrix and the bias of a
`Softmax` over the same vocabulary, tied or not. Everything else is held by every replica.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.errors import PlanError, UserError
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.model.model import Model
from carrywave.model.vocabulary.rows import Exchange, Rows

_REMEDY = "remove plan.split_vocabulary"


def split_rows(model: nn.Module) -> dict[str, Rows]:
    """The rows that a model has of each tensor that is split, by its first name; empty if its vocabulary is not split."""
    if not isinstance(model, Model) or not isinstance(model.encoder, Embedding) or model.encoder.rows is None:
        return {}
    rows = {"encoder.weight": model.encoder.rows}
    head = model.head
    if isinstance(head, Softmax) and head.rows is not None:
        if head.weight is not model.encoder.weight:
            rows["head.weight"] = head.rows
        if head.bias is not None:
            rows["head.bias"] = head.rows
    return rows


def whole_shape(name: str, shape: torch.Size, rows: Mapping[str, Rows]) -> tuple[int, ...]:
    """The shape that a tensor of this shape has in the whole model."""
    return (rows[name].vocabulary, *shape[1:]) if name in rows else tuple(shape)


def count_parameters(model: nn.Module) -> int:
    """The number of parameters of the whole model, whoever holds them."""
    rows = split_rows(model)
    return sum(math.prod(whole_shape(name, parameter.shape, rows)) for name, parameter in model.named_parameters())


def check_modules(model: nn.Module) -> int:
    """Refuse a model whose modules cannot do with some rows of its vocabulary; returns the size of the vocabulary."""
    encoder = model.encoder if isinstance(model, Model) else None
    if not isinstance(model, Model) or type(encoder) is not Embedding:
        kind = type(model if encoder is None else encoder)
        actual = f"{kind.__name__} of {kind.__module__.partition('.')[0]}"
        raise PlanError(f"plan.split_vocabulary=true needs carrywave's Embedding as the encoder, but this model has {actual}; {_REMEDY}")
    allowed = [encoder, model.head] if _has_vocabulary(model) else [encoder]
    for path, module in model.named_modules():
        if not any(module is each for each in allowed) and any(tensor is encoder.weight for tensor in module._parameters.values()):
            raise PlanError(
                f"{path} ({type(module).__name__}) reads the embedding's whole matrix, which plan.split_vocabulary=true splits; "
                f"use carrywave's Softmax without class weights, or {_REMEDY}"
            )
    return encoder.vocabulary


@torch.no_grad()
def split_vocabulary(model: Model, exchange: Exchange) -> None:
    """Keep this worker's rows of a model's vocabulary, and connect it with the workers that hold the others."""
    encoder = model.encoder
    assert isinstance(encoder, Embedding)
    local_rows = encoder.rows or Rows.of_worker(encoder.vocabulary, exchange.index, exchange.of)
    local_rows = replace(local_rows, exchange=exchange)
    tensors = [encoder.weight] if encoder.rows is None else []
    if isinstance(model.head, Softmax) and _has_vocabulary(model):
        head = model.head
        tensors += [t for t in (head.weight, head.bias) if t is not None and head.rows is None and t is not encoder.weight]
        head.rows = local_rows
        head.register_state_dict_post_hook(_refuse_rows)  # type: ignore[no-untyped-call]
    encoder.rows = local_rows
    encoder.register_state_dict_post_hook(_refuse_rows)  # type: ignore[no-untyped-call]
    for tensor in tensors:
        # A copy, so that the other rows are freed; in the same parameter, which a user's optimizer may hold.
        tensor.data = tensor.data[local_rows.low : local_rows.high].clone()


@torch.no_grad()
def join_vocabulary(model: Model, whole: Mapping[str, Tensor]) -> None:
    """Give a model that has some rows of its vocabulary all of them again, from whole tensors by name."""
    tensors = dict(model.named_parameters())
    for name in split_rows(model):
        tensors[name].data = whole[name].to(tensors[name].device, tensors[name].dtype)
        tensors[name].grad = None
    for module in (model.encoder, model.head):
        if isinstance(module, Embedding | Softmax):
            module.rows = None


def _refuse_rows(module: Embedding | Softmax, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Refuse to save some rows as if they were all."""
    if module.rows is not None:
        raise UserError(
            f"{prefix}weight is split over workers, so this state_dict would save only rows {module.rows.low} to {module.rows.high - 1}; "
            "call trainer.gathered() for the weights or trainer.state_dict() for everything, on every worker, and save what rank 0 gets"
        )


def _has_vocabulary(model: Model) -> bool:
    """True if the head is a softmax over the encoder's vocabulary."""
    encoder, head = model.encoder, model.head
    return isinstance(encoder, Embedding) and type(head) is Softmax and head.classes == encoder.vocabulary and head.weights is None
