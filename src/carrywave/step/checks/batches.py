"""Validates the batches and states that a user passes to a trainer. What depends on the kind of a batch (shapes, dtypes, what it has) is
checked when a kind is new, values at every step. Only tensors on the host are inspected, because reading from a GPU would block.

Shapes: B lane, L label.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from carrywave.data.batch import IGNORED, Batch
from carrywave.errors import UserError
from carrywave.model.encoders import Embedding, Numbers
from carrywave.model.heads.classes import Sigmoid, Softmax
from carrywave.model.heads.crf import CRF
from carrywave.model.heads.ctc import Ctc
from carrywave.model.heads.pooled import PooledSigmoid, PooledSoftmax
from carrywave.model.heads.scoring import check_weights
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.over_time.front import Front
from carrywave.model.stage import check_resets
from carrywave.spec.train_spec import TrainSpec

Lanes = tuple[int, ...]  # the numbers of all lanes of a batch, in its order
MOST_KINDS = 4096


class BatchChecks:
    """The checks of one model's batches. `gradients`: whether the loss will be differentiated."""

    def __init__(self, model: Model | OpaqueModel, *, keep_state: bool, gradients: bool = True) -> None:
        self.model, self.keep_state, self.gradients = model, keep_state, gradients
        self._known: set[object] = set()
        self._reader = _first(model.encoder) if isinstance(model, Model) else None
        coded = isinstance(self._reader, Embedding | nn.Embedding)
        self._values = coded or isinstance(model.head, Sigmoid | PooledSigmoid | Softmax | PooledSoftmax | CRF | Ctc)

    def __call__(self, batches: Sequence[Batch]) -> None:
        """Refuse batches that cannot be intended."""
        if not batches:
            raise UserError("a step needs a batch; make one with Batch.of(inputs, targets)")
        for batch in batches:
            if not isinstance(batch, Batch):
                several = isinstance(batch, list | tuple) and all(isinstance(each, Batch) for each in batch)
                remedy = "pass them one by one: trainer.step(*batches)" if several else "make them with Batch.of(inputs, targets)"
                raise UserError(f"a step takes one or more batches as arguments, got a {type(batch).__name__}; {remedy}")
            given = (batch.inputs, batch.targets, batch.weights)
            forms = tuple([None if each is None else (each.shape, each.dtype, each.requires_grad) for each in given])
            kind = forms, batch.goes_on, batch.part_of is None, batch.pooled, batch.unsure, batch.resets is None
            if kind not in self._known:
                self._check_kind(batch)
                if len(self._known) >= MOST_KINDS:
                    self._known.clear()
                self._known.add(kind)
            if self._values and batch.part_of is None and isinstance(self.model, Model):
                _check_values(batch, self.model, self._reader)

    def _check_kind(self, batch: Batch) -> None:
        model = self.model
        if isinstance(model, OpaqueModel):
            model.expect(batch.pooled)
        if batch.goes_on and not self.keep_state:
            raise UserError(f"fresh=False continues the carry of the previous step, but {why_no_carry(model)}remove fresh")
        if batch.part_of is not None:  # of our own loader
            return
        for name in ("inputs", "targets", "weights") if self.gradients else ():
            tensor = getattr(batch, name)
            if tensor is not None and tensor.requires_grad:
                raise UserError(
                    f"the {name} require grad, but a step trains the model's parameters alone; put what makes them into the model, or "
                    "detach"
                )
        name = type(model.head).__name__
        if batch.pooled is not None and batch.pooled != model.pooled:
            if model.pooled:
                raise UserError(f"the targets are one per step, but {name} has pooled = True; pass one per lane, [lane, …]")
            raise UserError(
                f"the targets are one per lane, but {name} reads one per step; pass [time, lane, …], or set pooled = True in {name}"
            )
        if batch.unsure and model.pooled:
            shape = list(batch.inputs.shape[:2])
            raise UserError(f"targets of shape {shape} could be one per step or several per lane; say which: Batch.of(..., pooled=True)")
        if batch.resets is not None:
            if isinstance(model, OpaqueModel):
                raise UserError(f"the batch has resets, which a module such as {name} does not know; use cw.Model(encoder, lstm, head)")
            check_resets(model)
        if batch.weights is not None:
            _check_weights(batch, batch.weights, model)
        if batch.targets is None:
            raise UserError("the batch has no targets, so there is nothing to learn from; pass Batch.of(inputs, targets)")
        if self._reader is not None:
            _check_inputs(batch.inputs, self._reader)
            _check_targets(batch.targets, model.head)


def check_surroundings(spec: TrainSpec, device: torch.device) -> None:
    """Refuse a step inside torch.autocast, because the spec determines the precision, or inside torch.inference_mode."""
    if torch.is_inference_mode_enabled():
        raise UserError("a step was called inside torch.inference_mode, where nothing can be differentiated; call it outside")
    if torch.is_autocast_enabled(device.type):
        name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(torch.get_autocast_dtype(device.type), "bf16")
        raise UserError(
            f"a step was called inside torch.autocast, but train.precision={spec.precision}; call it outside and set train.precision={name}"
        )


def check_continued(batches: Sequence[Batch], before: Lanes | None) -> Lanes | None:
    """Refuse another number of lanes than in the previous batch unless all are fresh, and a lane that continues at another place.

    The carry is kept by place, and each replica keeps that of its own lanes. Returns the lanes of the last batch.
    """
    for batch in batches:
        count = (batch.part_of or (0, batch.lanes.shape[0]))[1]
        lanes = tuple(range(count)) if batch.numbers is None else batch.numbers
        if before is not None and lanes != before:
            _check_moved(batch, lanes, before)
        before = lanes
    return before


def _check_moved(batch: Batch, lanes: Lanes, before: Lanes) -> None:
    fresh = batch.fresh.tolist()
    if all(fresh):
        return
    if len(lanes) != len(before):
        raise UserError(
            f"the carry is of {len(before)} lanes, but the batch has {len(lanes)}; keep the number of lanes, or make all of them fresh"
        )
    for place, starts in enumerate(fresh if batch.part_of is None else ()):
        if lanes[place] != before[place] and not starts:
            fact = f"lane {lanes[place]} continues its carry in column {place}, where the previous batch had lane {before[place]}"
            raise UserError(f"{fact}; keep the lanes in one order, or make those that move fresh")


def why_no_carry(model: Model | OpaqueModel) -> str:
    """Why lanes cannot go on from the previous batch, and what to do instead of giving that up."""
    if isinstance(model, OpaqueModel):
        return f"a trainer does not know the carry of a {type(model.module).__name__}; wrap its parts as cw.Model(encoder, lstm, head), or "
    name = type(model.head).__name__
    if model.pooled and not model.whole_head:
        return f"the head {name} pools (pooled = True), which ends with the batch; pass whole sequences, and "
    if model.reads_whole:
        return f"the {'head ' + name if model.whole_head else 'model'} reads whole sequences; "
    return "this trainer was created with keep_state=False; "


def _check_weights(batch: Batch, weights: Tensor, model: Model | OpaqueModel) -> None:
    """Refuse weights that the model's loss does not take, or not in this form."""
    if isinstance(model, OpaqueModel):
        check_weights(weights, model.given_loss, f"the module {type(model.module).__name__}", by_lane=model.pooled)
        return
    by_lane = model.whole_head or (model.pooled and batch.resets is None)
    check_weights(weights, model.head.loss, f"the head {type(model.head).__name__}", by_lane=by_lane)
    if model.pooled and batch.resets is not None and weights.dim() == 1:
        raise UserError(
            "the weights are one for each lane, but lanes hold several sequences; pass [time, lane], at the last step of each sequence"
        )


def _first(module: nn.Module) -> nn.Module:
    """The innermost module that reads the inputs."""
    while isinstance(module, nn.Sequential) and len(module):
        module = module[0]
    return module if not isinstance(module, Front) or module.step_encoder is None else _first(module.step_encoder)


def _check_inputs(inputs: Tensor, reader: nn.Module) -> None:
    numbers = reader.width if isinstance(reader, Numbers) else reader.in_features if isinstance(reader, nn.Linear) else None
    numbers = reader.features if isinstance(reader, Front) else numbers
    if numbers is not None and (not inputs.is_floating_point() or inputs.dim() < 3 or inputs.shape[-1] != numbers):
        raise UserError(
            f"the inputs are {_form_of(inputs)}, but the encoder's {type(reader).__name__} reads {numbers} numbers per step; "
            f"pass floats of shape [time, lane, {numbers}]"
        )
    if isinstance(reader, Embedding | nn.Embedding) and inputs.is_floating_point():
        raise UserError(f"the inputs are {_form_of(inputs)}, but the encoder's {type(reader).__name__} reads tokens; pass whole numbers")


def _check_targets(targets: Tensor, head: nn.Module) -> None:
    """Refuse targets in a form that the head cannot learn."""
    fact = f"the targets are {_form_of(targets)}, but the head {type(head).__name__}"
    if isinstance(head, Sigmoid | PooledSigmoid):
        if not targets.is_floating_point() or targets.shape[-1] != head.classes:
            raise UserError(
                f"{fact} learns {head.classes} labels of which any number holds; pass a float vector of {head.classes} for each, 0 or 1, "
                "NaN where it is not known"
            )
    elif isinstance(head, Softmax | PooledSoftmax | CRF):
        if targets.is_floating_point():
            raise UserError(f"{fact} learns classes; pass whole numbers")
        if isinstance(head, CRF) and targets.dim() != 2:
            raise UserError(f"{fact} learns a label for each step; pass [time, lane]")
    elif isinstance(head, Ctc) and (targets.is_floating_point() or targets.dim() != 2 or not targets.shape[1]):
        raise UserError(f"{fact} learns labels in a row; pass whole numbers [lane, labels], with -1 after the last label of a lane")


def _check_values(batch: Batch, model: Model, reader: nn.Module | None) -> None:
    """Refuse codes and labels that encoder and head do not know."""
    inputs, targets, head = batch.inputs, batch.targets, model.head
    rows = reader.vocabulary if isinstance(reader, Embedding) else reader.num_embeddings if isinstance(reader, nn.Embedding) else None
    if rows is not None and inputs.device.type == "cpu" and inputs.numel():
        low, high = (int(each) for each in inputs.aminmax())
        if low < 0 or high >= rows:
            raise UserError(
                f"the inputs contain token {low if low < 0 else high}, but the encoder knows 0 to {rows - 1}; "
                "use tokens in that range, or a larger embedding"
            )
    if targets is None or targets.device.type != "cpu" or not targets.numel():
        return
    if isinstance(head, Sigmoid | PooledSigmoid):
        wrong = targets[(targets < 0) | (targets > 1)]
        if len(wrong):
            raise UserError(
                f"the targets contain {float(wrong[0]):g}, but a label holds or does not; pass 1 or 0 for each, NaN where it is not known"
            )
    elif isinstance(head, Softmax | PooledSoftmax | CRF):
        low, high = (int(each) for each in torch.where(targets == IGNORED, 0, targets).aminmax())
        if low < 0 or high >= head.classes:
            raise UserError(
                f"the targets contain class {low if low < 0 else high}, but the head knows 0 to {head.classes - 1} ({IGNORED} for none); "
                "use classes in that range, or give the head more of them"
            )
    elif isinstance(head, Ctc):
        if int(targets.max()) >= head.blank:
            raise UserError(
                f"the targets contain label {int(targets.max())}, but the head knows 0 to {head.blank - 1}; use labels in that range"
            )
        if not batch.lengths.is_cuda:
            _check_fit(targets, batch.lengths, model)


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


def _form_of(tensor: Tensor) -> str:
    """Dtype and shape, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
