"""Validates the targets of a user's batches against the head that learns them. Only tensors on the host are inspected: reading from a GPU
would block.

Shapes: B lane, L label.
"""

from __future__ import annotations

import torch
from torch import Tensor

from carrywave.data.batch import IGNORED, Batch
from carrywave.errors import UserError
from carrywave.model.heads.classes import Sigmoid, Softmax
from carrywave.model.heads.crf import CRF
from carrywave.model.heads.ctc import Ctc
from carrywave.model.heads.pooled import PooledSigmoid, PooledSoftmax
from carrywave.model.model import Model


def check_targets(batch: Batch, model: Model) -> None:
    """Refuse targets that the head cannot learn."""
    targets, head = batch.targets, model.head
    if targets is None:
        raise no_targets()
    if isinstance(head, Sigmoid | PooledSigmoid):
        _check_several(targets, head)
    elif isinstance(head, Softmax | PooledSoftmax | CRF):
        _check_classes(targets, head)
    elif isinstance(head, Ctc):
        _check_transcripts(targets, head)
        if not targets.is_cuda and not batch.lengths.is_cuda:
            _check_fit(targets, batch.lengths, model)


def _check_several(targets: Tensor, head: Sigmoid | PooledSigmoid) -> None:
    """Of any number of labels: 0 or 1 for each, or what lies between."""
    if not targets.is_floating_point() or targets.shape[-1] != head.classes:
        raise UserError(
            f"the targets are {form_of(targets)}, but the head {type(head).__name__} learns {head.classes} labels of which any number "
            f"holds; pass a float vector of {head.classes} for each, 0 or 1, NaN where it is not known"
        )
    if not targets.is_cuda and bool(((targets < 0) | (targets > 1)).any()):
        wrong = float(targets[(targets < 0) | (targets > 1)][0])
        raise UserError(f"the targets contain {wrong:g}, but a label holds or does not; pass 1 or 0 for each, NaN where it is not known")


def _check_classes(targets: Tensor, head: Softmax | PooledSoftmax | CRF) -> None:
    name = type(head).__name__
    if targets.is_floating_point():
        raise UserError(f"the targets are {form_of(targets)}, but the head {name} learns classes; pass whole numbers")
    if isinstance(head, CRF) and targets.dim() != 2:
        raise UserError(f"the targets are {form_of(targets)}, but the head {name} learns a label for each step; pass [time, lane]")
    if targets.device.type == "cpu" and targets.numel():
        low, high = (int(each) for each in torch.where(targets == IGNORED, 0, targets).aminmax())
        if low < 0 or high >= head.classes:
            raise UserError(
                f"the targets contain class {low if low < 0 else high}, but the head knows 0 to {head.classes - 1} ({IGNORED} for none); "
                "use classes in that range, or give the head more of them"
            )


def _check_transcripts(targets: Tensor, head: Ctc) -> None:
    if targets.is_floating_point() or targets.dim() != 2 or not targets.shape[1]:
        raise UserError(
            f"the targets are {form_of(targets)}, but the head {type(head).__name__} learns labels in a row; pass whole numbers [lane, "
            "labels], with -1 after the last label of a lane"
        )
    if targets.device.type == "cpu" and targets.numel() and int(targets.max()) >= head.blank:
        raise UserError(
            f"the targets contain label {int(targets.max())}, but the head knows 0 to {head.blank - 1}; use labels in that range"
        )


def _check_fit(targets_BL: Tensor, lengths_B: Tensor, model: Model) -> None:
    """Refuse labels that no alignment fits into the answers for their lane: their loss would be infinite."""
    repeats_B = ((targets_BL[:, 1:] == targets_BL[:, :-1]) & (targets_BL[:, 1:] >= 0)).sum(1)
    needed_B = ((targets_BL >= 0).sum(1) + repeats_B).tolist()
    for lane, (needed, length) in enumerate(zip(needed_B, lengths_B.tolist(), strict=True)):
        if needed > model.output_steps(length):
            raise UserError(
                f"the labels of lane {lane} need {needed} answers, with a blank between equal ones, but the head gives "
                f"{model.output_steps(length)} for its {length} steps; raise upsample of Ctc, or leave the lane out"
            )


def no_targets() -> UserError:
    """The error for a batch without targets."""
    return UserError("the batch has no targets, so there is nothing to learn from; pass Batch.of(inputs, targets)")


def form_of(tensor: Tensor) -> str:
    """Dtype and shape, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
